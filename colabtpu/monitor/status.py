"""What the program is doing right now, for whoever shows it: one phase at a time.

    with phase("saving"):
        ...                     # the live panel shows "saving" for as long as this takes
    note_checkpoint(step=1200)

Any room may call these; nothing here imports a framework, and nothing happens when no panel
looks.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """What goes on, such as `"saving"`, and since when on `time.monotonic()`."""

    name: str
    since: float


@dataclass(frozen=True)
class Checkpoint:
    """The last checkpoint: the step it holds, and when it was written on `time.time()`."""

    step: int
    at: float


_lock = threading.Lock()
_phases: list[Phase] = []
_checkpoint: Checkpoint | None = None


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Says that the program is `name` ("installing", "saving", ...) until the block ends."""
    entered = Phase(name, time.monotonic())
    with _lock:
        _phases.append(entered)
    try:
        yield
    finally:
        with _lock:
            _phases.remove(entered)


def current() -> Phase | None:
    """Returns the innermost phase that was announced, `None` when there is none."""
    with _lock:
        return _phases[-1] if _phases else None


def note_checkpoint(step: int) -> None:
    """Says that a checkpoint of `step` has just been written."""
    global _checkpoint
    _checkpoint = Checkpoint(step, time.time())


def last_checkpoint() -> Checkpoint | None:
    """Returns the last checkpoint that was noted, `None` when there is none."""
    return _checkpoint
