"""Interruptions that can wait for the end of a step: SIGTERM, and the first Ctrl-C or stop.

    with Interruptions() as interrupted: ...
    if interrupted.number: save, then interrupted.deliver()

The second Ctrl-C is not held back. Imports no ML framework.
"""

import os
import signal
import threading
from types import FrameType
from typing import Any

CAUGHT = (signal.SIGTERM, signal.SIGINT)


class Interruptions:
    """Holds a signal back until somebody asks for it.

    Attributes:
        number: the signal that came, None if none did.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def catch(self) -> None:
        """Begins to hold signals back; in other threads than the main one there are none."""
        if threading.current_thread() is threading.main_thread() and not self._before:
            self.number = None
            self._before = {number: signal.signal(number, self._hold) for number in CAUGHT}

    @property
    def caught(self) -> bool:
        """Whether signals are held back now: between `catch` and `release`."""
        return bool(self._before)

    def release(self) -> None:
        """Gives the signals back to whoever handled them before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def deliver(self) -> None:
        """Lets the signal that was held back do what it would have done."""
        number, self.number = self.number, None
        self.release()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number is not None:
            os.kill(os.getpid(), number)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self.number == signal.SIGINT == number:
            self.deliver()
        self.number = number
        name = signal.Signals(number).name
        print(f"\n{name}: saving after this step, then stopping …", flush=True)
