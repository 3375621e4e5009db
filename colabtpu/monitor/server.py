"""TensorBoard inside the notebook: started once, reused while it lives, gone with the kernel.

    board = tensorboard("logs")        # Colab, Kaggle, JupyterLab, or a link without a notebook
    board.stop()

The server is a subprocess that needs the tensorboard package alone. It never imports
TensorFlow, even where that is installed: an import costs seconds, and on a TPU host it may
abort. It listens on 127.0.0.1 only, and it holds the read end of a pipe from this process,
so it ends with the kernel however the kernel ends.
"""

import atexit
import html
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colabtpu.errors import ColabTPUError, InvalidArgumentError

HOST = "127.0.0.1"
# TensorBoard's own default comes first: forwarded ports and proxy settings expect it.
USUAL_PORTS = range(6006, 6016)
START_SECONDS = 60.0

# Runs in the child. `notf` is the switch by which tensorboard chooses its stub over TensorFlow.
_CHILD = """
import os, signal, sys, threading, types
def end_with_parent():
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=end_with_parent, daemon=True).start()
sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
from tensorboard.main import run_main
run_main()
"""

_HINTS = (
    "A blank or 403 frame is nearly always the browser: allow third-party cookies for this "
    "site, leave incognito mode, or open the link in a tab of its own."
)


@dataclass(frozen=True)
class Board:
    """A running TensorBoard.

    Attributes:
        logdir: the folder it shows.
        port: its port on 127.0.0.1.
        pid: its process id.
        reused: it ran already when this was made.
    """

    logdir: Path
    port: int
    pid: int
    reused: bool
    _process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False, compare=False)

    @property
    def url(self) -> str:
        """The address on this machine."""
        return f"http://{HOST}:{self.port}/"

    def stop(self) -> None:
        """Ends the server, when this process started it."""
        if self._process is not None:
            _end(self._process)


def tensorboard(
    logdir: str | os.PathLike[str], port: int | None = None, height: int = 800
) -> Board:
    """Shows TensorBoard for `logdir` inline, or prints its link where there is no notebook.

    Args:
        logdir: the folder that holds the runs; made when missing.
        port: a port on 127.0.0.1, or `None` for a free one.
        height: of the frame, in pixels.

    Returns:
        The `Board`, which a live TensorBoard of the same folder is reused for.

    Raises:
        InvalidArgumentError: `port` is out of range or taken.
        ColabTPUError: the tensorboard package is missing, or it does not start.
    """
    board = _serve(Path(logdir).expanduser().resolve(), port)
    print(f"TensorBoard for {board.logdir}{' (already running)' if board.reused else ''}")
    frontend = _frontend()
    if frontend == "none":
        print(f"  {board.url}")
    else:
        from IPython.display import HTML, display

        print(_HINTS)
        display(HTML(_colab_html(board, height) if frontend == "colab" else _html(board, height)))
    return board


def _serve(logdir: Path, port: int | None) -> Board:
    if port is not None and not 0 < port < 65536:
        raise InvalidArgumentError(
            f"`port` must be between 1 and 65535. Received: port={port!r}",
            "Pass port=None for a free one.",
        )
    if importlib.util.find_spec("tensorboard") is None:
        raise ColabTPUError(
            "The tensorboard package is not installed.",
            "Run `pip install tensorboard` (it does not bring TensorFlow).",
        )
    logdir.mkdir(parents=True, exist_ok=True)
    running = _running(logdir, port)
    if running is not None:
        return running
    if port is None:
        port = next((p for p in USUAL_PORTS if _is_free(p)), 0)
    elif not _is_free(port):
        raise InvalidArgumentError(
            f"Port {port} is taken by another program.", "Pass port=None for a free one."
        )
    return _start(logdir, port)


def _start(logdir: Path, port: int) -> Board:
    """Starts a server; port 0 lets the system choose."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _CHILD,
                f"--logdir={logdir}",
                f"--host={HOST}",
                f"--port={port}",
            ],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"},
        )
        atexit.register(_end, process)
        info = _info_folder() / f"pid-{process.pid}.info"
        deadline = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            found = _read_info(info)
            if found is not None:
                return Board(logdir, int(found["port"]), process.pid, False, process)
            time.sleep(0.05)
        _end(process)
        output.seek(0)
        raise _start_error(output.read().decode(errors="replace"))


def _start_error(output: str) -> ColabTPUError:
    if "pkg_resources" in output:
        return ColabTPUError(
            "TensorBoard does not start: it imports pkg_resources, which setuptools 82 removed.",
            'Run `pip install "setuptools<82"`; this kernel need not restart.',
        )
    last_lines = "\n".join(output.strip().splitlines()[-15:]) or "it said nothing"
    return ColabTPUError(
        f"TensorBoard does not start within {START_SECONDS:.0f} s. Its output:\n{last_lines}",
        f"Try it by hand to see more: {sys.executable} -m tensorboard.main --logdir .",
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _running(logdir: Path, port: int | None) -> Board | None:
    """A live server for `logdir`; the notes that dead ones left behind are removed."""
    for path in _info_folder().glob("pid-*.info"):
        info = _read_info(path)
        if info is None:
            continue
        shown = _shown_folder(int(info["port"]))
        if shown is None:
            # Killed hard, or the machine was restarted: tensorboard's own magic would
            # "reuse" it and show an empty frame.
            path.unlink(missing_ok=True)
        elif Path(shown) == logdir and port in (None, info["port"]):
            return Board(logdir, int(info["port"]), int(info["pid"]), True)
    return None


def _shown_folder(port: int) -> str | None:
    """The folder that the TensorBoard at `port` shows, `None` when none answers there."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{HOST}:{port}/data/environment", timeout=5) as reply:
            return str(json.load(reply)["data_location"])
    except (OSError, ValueError, KeyError, urllib.error.URLError):
        return None


def _info_folder() -> Path:
    return Path(tempfile.gettempdir()) / ".tensorboard-info"


def _read_info(path: Path) -> dict[str, Any] | None:
    try:
        info = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return info if isinstance(info, dict) and {"port", "pid", "logdir"} <= info.keys() else None


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server itself does: a port that waits out its last connection is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _frontend() -> str:
    """`"colab"`, `"jupyter"` or `"none"`, by what runs this process."""
    if "IPython" not in sys.modules:
        return "none"
    shell = sys.modules["IPython"].get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return "none"
    return "colab" if "google.colab" in sys.modules else "jupyter"


def _colab_html(board: Board, height: int) -> str:
    # Colab forwards ports through its own address, which only the page can ask for.
    return f"""
<div id="colabtpu-board-{board.port}"></div>
<script>
(async () => {{
  const place = document.getElementById("colabtpu-board-{board.port}") || document.body;
  const url = new URL(await google.colab.kernel.proxyPort({board.port}, {{"cache": true}}));
  url.searchParams.set("tensorboardColab", "true");
  const link = document.createElement("a");
  link.href = url; link.target = "_blank"; link.textContent = "Open TensorBoard in a tab";
  const frame = document.createElement("iframe");
  frame.src = url; frame.width = "100%"; frame.height = "{height}"; frame.frameBorder = 0;
  place.append(link, frame);
}})();
</script>"""


def _html(board: Board, height: int) -> str:
    # Kaggle, JupyterHub and others name their forwarding address in this variable.
    proxy = os.environ.get("TENSORBOARD_PROXY_URL", "").replace("%PORT%", str(board.port))
    url = html.escape(proxy or board.url)
    return (
        f'<a href="{url}" target="_blank">{url}</a>'
        f'<iframe src="{url}" width="100%" height="{height}" frameborder="0"></iframe>'
    )
