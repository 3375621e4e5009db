"""Where a session's time went: install, compile, train, evaluate, checkpoint, lost.

    ledger = Ledger("checkpoints/run-0003/ledger.json")
    with ledger.span("install"): ...
    print(ledger)

`resume` keeps one for each run. Imports no ML framework.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from colabtpu.data.storage import write_atomically

KINDS = ("install", "compile", "train", "evaluate", "checkpoint", "lost")


class Ledger:
    """Seconds by kind, over all sessions of a run.

    Args:
        path: a JSON file; what it holds already is added to. None keeps it in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        with contextlib.suppress(OSError, ValueError):  # none yet, or torn
            self.seconds |= json.loads(path.read_bytes()) if path else {}

    def add(self, kind: str, seconds: float) -> None:
        """Adds time to a kind."""
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Adds the time that the block takes."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(kind, time.monotonic() - start)

    def save(self) -> None:
        """Writes it, if it has a file that can be written."""
        if self._path is not None and self._path.parent.is_dir():
            try:
                write_atomically(self._path, json.dumps(self.seconds).encode())
            except OSError:
                return  # a disk that is full; the checkpoints say so

    def __str__(self) -> str:
        whole = sum(self.seconds.values()) or 1.0
        rows = []
        for kind, seconds in self.seconds.items():
            share = seconds / whole
            rows.append(f"{kind:<11}{_clock(seconds):>10} {share:>6.1%} {'█' * round(30 * share)}")
        return "\n".join([*rows, f"{'in all':<11}{_clock(whole):>10}"])


def release_runtime() -> bool:
    """Gives a Colab runtime back, which ends this process; False elsewhere."""
    try:
        from google.colab import runtime
    except ImportError:
        return False
    _unassign(runtime)
    return True


def _unassign(runtime: Any) -> None:
    print("Releasing the runtime: what is not on Drive or downloaded is gone.", flush=True)
    runtime.unassign()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
