"""Notebooks outside a browser: form values from the environment, and headless runs.

    python -m colabtpu train                     # 02_train_transformer.ipynb, into runs/<time>/
    CT_SIZE=tiny python -m colabtpu train        # the same cells, less work

A run leaves the executed notebook, its HTML and whatever the notebook itself wrote.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from colabtpu.errors import ColabTPUError, InvalidArgumentError

PREFIX = "CT_"
_BAR = re.compile(r"(\d+)/(\d+) .*?\bloss: ([0-9.e+-]+|nan|inf)")
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m|\x08")


def from_environment(
    form: Mapping[str, Any], env: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Returns the form fields that the environment overrides, each with its field's type.

    A notebook calls `globals().update(ct.notebook.from_environment(globals()))` under its
    form, so that CI can shrink the work by `CT_EPOCHS=1` without touching a cell.

    Args:
        form: names to values; only names in capitals with a str, int, float or bool count.
        env: the environment; a field `EPOCHS` is read from `CT_EPOCHS`.

    Returns:
        Field name -> new value, only for fields that are overridden.

    Raises:
        InvalidArgumentError: a value that its field's type cannot hold.
    """
    fields = {k: v for k, v in form.items() if k.isupper() and isinstance(v, str | int | float)}
    return {k: _as_type_of(v, env[PREFIX + k], k) for k, v in fields.items() if PREFIX + k in env}


def _as_type_of(default: Any, text: str, name: str) -> Any:
    if isinstance(default, bool):
        if text.lower() in ("true", "1", "false", "0"):
            return text.lower() in ("true", "1")
    elif isinstance(default, str):
        return text
    else:
        try:
            return type(default)(text)
        except ValueError:
            pass
    raise InvalidArgumentError(
        f"The form field `{name}` holds a {type(default).__name__}. "
        f"Received: {PREFIX}{name}={text!r}",
        f"Set {PREFIX}{name} to a value like {default!r}, or unset it.",
    )


@dataclass
class Progress:
    """Where a headless run stands; the figures come from the notebook's own output.

    Attributes:
        cell: number of the running code cell, from 1; `cells` of them.
        title: the heading above that cell.
        step: step within the epoch, of `steps`; `loss` is Keras' running mean.
        tokens_per_second: the newest value in the event files, 0 before the first.
    """

    cells: int
    cell: int = 0
    title: str = ""
    step: int = 0
    steps: int = 0
    loss: float | None = None
    tokens_per_second: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def line(self) -> str:
        """One line for a terminal or a log."""
        parts = [f"cell {self.cell}/{self.cells}", self.title]
        if self.steps:
            parts.append(f"step {self.step}/{self.steps}")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3f}")
        if self.tokens_per_second:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        parts.append(f"{time.monotonic() - self.started:.0f} s")
        return "  ".join(parts)

    def read(self, text: str) -> None:
        """Takes step and loss from a line of Keras' progress bar, where `text` holds one."""
        for done, of, loss in _BAR.findall(_TERMINAL_CODES.sub("", text)):
            self.step, self.steps, self.loss = int(done), int(of), float(loss)


def execute(path: Path, out: Path, env: Mapping[str, str], show: Callable[[Progress], None]) -> Any:
    """Runs a notebook from top to bottom and writes it, and its HTML, under `out`.

    Args:
        path: the notebook.
        out: an existing folder; gets `notebook.ipynb`, `notebook.html` and `kernel.log`, also
            when a cell fails.
        env: variables for the kernel, on top of this process's.
        show: called with the `Progress` whenever it changed.

    Returns:
        The executed notebook.

    Raises:
        ColabTPUError: a cell failed; names the cell and carries its error.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(path, as_version=4)
    titles = _titles(notebook)
    progress = Progress(cells=len(titles))
    rate = _Rate(out / "logs")

    def on_start(cell: Any, cell_index: int) -> None:
        progress.cell = (
            1 + list(titles).index(cell_index) if cell_index in titles else progress.cell
        )
        progress.title = titles.get(cell_index, progress.title)
        show(progress)

    class Client(NotebookClient):
        """Watches the stream that a running cell prints."""

        def output(self, outs: Any, msg: Any, display_id: str, cell_index: int) -> Any:
            if msg["msg_type"] == "stream":
                progress.read(msg["content"]["text"])
                progress.tokens_per_second = rate.latest()
                show(progress)
            return super().output(outs, msg, display_id, cell_index)

    client = Client(
        notebook,
        timeout=None,
        startup_timeout=300,  # a busy or cold machine takes its time
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_execute=on_start,
    )
    try:
        # What the kernel's process itself says, such as TensorFlow's chatter, would tear the
        # display apart; it is kept, not lost.
        with (out / "kernel.log").open("w") as log:
            client.execute(env={**os.environ, **env}, stderr=log)
    except CellExecutionError as error:
        raise ColabTPUError(
            f"Cell {progress.cell} of {path.name} ({progress.title}) failed: "
            f"{error.ename}: {error.evalue}",
            f"Open {out / 'notebook.html'} to read the cell's output.",
        ) from error
    finally:
        _write(notebook, out)
    return notebook


def _titles(notebook: Any) -> dict[int, str]:
    """Index of each code cell -> the nearest heading above it."""
    titles, heading = {}, ""
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            for line in cell.source.splitlines():
                if line.startswith("#"):
                    heading = line.lstrip("# ").strip()
        elif cell.cell_type == "code":
            titles[index] = heading
    return titles


class _Rate:
    """Follows the tokens-per-second scalar in the newest event file under a folder."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._loader: Any = None
        self._checked = 0.0
        self._value = 0.0

    def latest(self) -> float:
        """The newest value, 0 before the first; looks at the disk once a second at most."""
        if time.monotonic() - self._checked < 1:
            return self._value
        self._checked = time.monotonic()
        if self._loader is None:
            self._loader = self._open()
        for event in self._loader.Load() if self._loader else ():
            for value in event.summary.value:
                if value.tag.endswith("tokens_per_second"):
                    self._value = value.tensor.float_val[0]
        return self._value

    def _open(self) -> Any:
        # tensorboard takes this name's presence to mean "do without TensorFlow", which would
        # take half a minute to import here, in a process that only watches.
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        paths = sorted(self._logs.glob("**/train/events.out.tfevents.*"), key=os.path.getmtime)
        return EventFileLoader(str(paths[-1])) if paths else None


def _write(notebook: Any, out: Path) -> None:
    import nbformat
    from nbconvert import HTMLExporter

    nbformat.write(notebook, out / "notebook.ipynb")
    html, _ = HTMLExporter().from_notebook_node(notebook)
    (out / "notebook.html").write_text(html)


@contextmanager
def _display() -> Iterator[Callable[[Progress], None]]:
    """A live line on a terminal; in a log, a line when the cell changes and every ten seconds."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        with console.status("starting the kernel") as status:
            yield lambda progress: status.update(progress.line())
        return
    last = {"cell": -1, "time": 0.0}

    def show(progress: Progress) -> None:
        if progress.cell != last["cell"] or time.monotonic() - last["time"] > 10:
            last["cell"], last["time"] = progress.cell, time.monotonic()
            print(progress.line(), flush=True)

    yield show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `python -m colabtpu train`."""
    parser.add_argument(
        "notebook",
        nargs="?",
        type=Path,
        default=Path("notebooks/02_train_transformer.ipynb"),
        help="the notebook to run; default: %(default)s",
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="parent of the run's folder; default: runs"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the notebook headless and says how to open what it left."""
    if not args.notebook.is_file():
        raise InvalidArgumentError(
            f"There is no notebook at {args.notebook}.",
            "Run this from the repository's top folder, or pass the notebook's path.",
        )
    out = (args.runs / time.strftime("%Y%m%d-%H%M%S")).resolve()
    out.mkdir(parents=True)
    with _display() as show:
        execute(args.notebook.resolve(), out, {PREFIX + "RUN_DIR": str(out)}, show)
    _tell(out)
    return 0


def _tell(out: Path) -> None:
    try:
        folder = out.relative_to(Path.cwd())
    except ValueError:
        folder = out
    print(f"\nLeft in {folder}:")
    for name, how in (
        ("notebook.html", "the executed notebook; open it in a browser"),
        ("notebook.ipynb", f"jupyter lab {folder}/notebook.ipynb"),
        ("logs", f"tensorboard --logdir {folder}/logs"),
        ("model.keras", f'keras.saving.load_model("{folder}/model.keras") after `import colabtpu`'),
        ("tokenizer.json", f'ct.data.Tokenizer.load("{folder}/tokenizer.json")'),
        ("summary.json", "the figures below"),
    ):
        if (out / name).exists():
            print(f"  {name:15} {how}")
    if (out / "summary.json").exists():
        for key, value in json.loads((out / "summary.json").read_text()).items():
            print(
                f"    {key:28} {value:,.4g}"
                if isinstance(value, float)
                else f"    {key:28} {value}"
            )
