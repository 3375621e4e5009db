"""The inline TensorBoard, against real servers on loopback and real Jupyter kernels."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from colabtpu import ColabTPUError, InvalidArgumentError
from colabtpu.monitor import EventWriter, tensorboard


@pytest.fixture
def temporary_folder(tmp_path, monkeypatch) -> Path:
    """A tempdir of the test's own, so that no TensorBoard of this machine is seen."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture(scope="module")
def logdir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    writer = EventWriter(folder / "run" / "train")
    writer.scalars(1, {"loss": 3.5})
    writer.scalars(2, {"loss": 2.5})
    writer.close()
    return folder


@pytest.fixture(scope="module")
def board(logdir) -> Iterator:
    """One server for the tests that only look at it."""
    board = tensorboard(logdir)
    yield board
    board.stop()


def get(board, path: str, **query: str):
    url = board.url + path + ("?" + urllib.parse.urlencode(query) if query else "")
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.load(reply)


def until(condition: Callable[[], object], seconds: float = 30.0) -> object:
    deadline = time.monotonic() + seconds
    while not (result := condition()) and time.monotonic() < deadline:
        threading.Event().wait(0.1)
    return result


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_real_server_shows_what_was_written(board):
    tags = until(lambda: get(board, "data/plugin/scalars/tags"))
    assert list(tags) == ["run/train"]
    assert list(tags["run/train"]) == ["loss"]
    points = get(board, "data/plugin/scalars/scalars", run="run/train", tag="loss")
    assert [(step, value) for _, step, value in points] == [(1, 3.5), (2, 2.5)]


def test_server_listens_on_loopback_only(board):
    table = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    listening = [
        line.split()[1]
        for line in table.splitlines()[1:]
        if f":{board.port:04X} " in line and line.split()[3] == "0A"
    ]
    assert listening == [f"0100007F:{board.port:04X}"]


def test_live_server_of_the_same_folder_is_reused(board, logdir, capsys):
    again = tensorboard(logdir)
    assert (again.port, again.pid, again.reused) == (board.port, board.pid, True)
    assert "already running" in capsys.readouterr().out
    again.stop()  # it is not the caller's to stop
    assert is_running(board.pid)


def test_another_folder_gets_another_server(board, tmp_path):
    other = tensorboard(tmp_path / "other")
    try:
        assert other.port != board.port
        assert get(other, "data/environment")["data_location"] == str(tmp_path / "other")
    finally:
        other.stop()


def test_note_of_a_dead_server_is_cleared_and_a_new_one_started(temporary_folder, logdir):
    first = tensorboard(logdir)
    note = temporary_folder / ".tensorboard-info" / f"pid-{first.pid}.info"
    os.kill(first.pid, signal.SIGKILL)
    first.stop()
    assert note.exists(), "a hard kill leaves the note behind"
    second = tensorboard(logdir)
    try:
        assert not second.reused
        assert not note.exists()
        assert get(second, "data/environment")["data_location"] == str(logdir)
    finally:
        second.stop()


def test_stopped_server_is_gone(temporary_folder, logdir):
    board = tensorboard(logdir)
    board.stop()
    assert not is_running(board.pid)
    assert not list((temporary_folder / ".tensorboard-info").glob("*.info"))


def test_server_ends_when_its_parent_is_killed_hard(temporary_folder, logdir):
    program = f"""
from colabtpu.monitor import tensorboard
print(tensorboard({str(logdir)!r}).pid, flush=True)
input()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    lines = [parent.stdout.readline() for _ in range(3)]
    pid = int(lines[-1])
    assert is_running(pid)
    parent.kill()
    parent.communicate()
    assert until(lambda: not is_running(pid))


def test_without_a_notebook_the_link_is_printed(board, logdir, capsys):
    tensorboard(logdir)
    assert capsys.readouterr().out.splitlines() == [
        f"TensorBoard for {logdir} (already running)",
        f"  http://127.0.0.1:{board.port}/",
    ]


def test_taken_port_is_refused(temporary_folder, logdir):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InvalidArgumentError, match=rf"Port {port} is taken[^$]*port=None"):
            tensorboard(logdir, port=port)


@pytest.mark.parametrize("port", [0, -1, 70000])
def test_port_out_of_range_is_refused(logdir, port):
    with pytest.raises(InvalidArgumentError, match=f"port={port}"):
        tensorboard(logdir, port=port)


def broken_tensorboard(folder: Path, line: str) -> Path:
    """A tensorboard package that is installed and dies with `line` at its start."""
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "tensorboard" / "__init__.py").write_text("")
    (folder / "tensorboard" / "main.py").write_text(line)
    return folder


def test_setuptools_without_pkg_resources_is_named(temporary_folder, tmp_path, monkeypatch):
    line = "raise ModuleNotFoundError(\"No module named 'pkg_resources'\")"
    monkeypatch.setenv("PYTHONPATH", str(broken_tensorboard(tmp_path / "site", line)))
    with pytest.raises(ColabTPUError, match=r'pip install "setuptools<82"'):
        tensorboard(tmp_path / "logs")


def test_failing_start_shows_the_servers_own_words(temporary_folder, tmp_path, monkeypatch):
    line = "raise RuntimeError('the sky fell')"
    monkeypatch.setenv("PYTHONPATH", str(broken_tensorboard(tmp_path / "site", line)))
    with pytest.raises(ColabTPUError, match="the sky fell"):
        tensorboard(tmp_path / "logs")


def run_in_kernel(*cells: str) -> list[str]:
    """Executes cells in a real Jupyter kernel; returns what each displayed, as one text."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    shown = []
    for cell in notebook.cells:
        texts = [o.get("text", "") + o.get("data", {}).get("text/html", "") for o in cell.outputs]
        shown.append("".join(texts))
    return shown


def test_notebooks_get_a_frame_a_link_and_the_usual_reasons(temporary_folder, logdir):
    show = f"board = monitor.tensorboard({str(logdir)!r}, height=500)"
    jupyter, proxied, colab, pid = run_in_kernel(
        f"from colabtpu import monitor\n{show}",
        f"import os\nos.environ['TENSORBOARD_PROXY_URL'] = '/k/1/proxy/%PORT%/'\n{show}",
        f"import sys, types\nsys.modules['google.colab'] = types.ModuleType('colab')\n{show}",
        "print(board.pid, board.port)",
    )
    pid, port = map(int, pid.split())
    assert f'<iframe src="http://127.0.0.1:{port}/" width="100%" height="500"' in jupyter
    assert f'<a href="http://127.0.0.1:{port}/" target="_blank">' in jupyter
    assert "third-party cookies" in jupyter
    assert "incognito" in jupyter
    assert f'<iframe src="/k/1/proxy/{port}/"' in proxied
    assert f"google.colab.kernel.proxyPort({port}" in colab
    assert "127.0.0.1" not in colab, "Colab's browser cannot reach the machine's own address"
    assert until(lambda: not is_running(pid)), "the server outlives the kernel"
