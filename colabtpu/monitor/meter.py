"""Throughput that leaves out compilation and pauses.

    meter = Meter(warmup_steps=2)
    meter.resume(now); meter.step(now, tokens=4096); ...; meter.pause(now)
    meter.step_seconds, meter.tokens_per_second

The clock runs only between `resume` and `pause`, so validation, saving and histograms do
not count; the first steps, which hold tracing and compilation, are left out. Times are
handed in, so that nothing here reads a clock.
"""

from collections import deque
from typing import NamedTuple


class Meter:
    """Counts steps and tokens against a clock that can be stopped.

    Args:
        warmup_steps: finished steps to leave out at the start of a run: they compile.
        window: the figures are means over this many of the latest steps.
    """

    def __init__(self, warmup_steps: int = 2, window: int = 20) -> None:
        self._warmup_left = warmup_steps
        self._marks: deque[_Mark] = deque(maxlen=window + 1)
        self._elapsed = 0.0
        self._since: float | None = None
        self._steps = 0
        self._tokens = 0.0
        self._waited = 0.0

    def resume(self, now: float) -> None:
        """Starts the clock; does nothing when it runs already."""
        if self._since is None:
            self._since = now

    def pause(self, now: float) -> None:
        """Stops the clock; does nothing when it is stopped already."""
        if self._since is not None:
            self._elapsed += now - self._since
            self._since = None

    def wait(self, seconds: float) -> None:
        """Notes that the device had nothing to do for `seconds`, for want of a batch."""
        self._waited += seconds

    def step(self, now: float, tokens: float = 0.0, steps: int = 1) -> None:
        """Notes that `steps` steps over `tokens` tokens have finished by `now`, in seconds."""
        self._warmup_left -= steps
        if self._warmup_left > 0:
            return
        # The last warm-up step only sets the zero: its own duration is not counted.
        if self._marks:
            self._steps += steps
            self._tokens += tokens
        self._marks.append(_Mark(self._active(now), self._steps, self._tokens, self._waited))

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds a step over the window, `None` before two steps have been counted."""
        span = self._span()
        return span.seconds / span.steps if span.steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """Mean tokens a second over the window, `None` where no tokens were counted."""
        span = self._span()
        return span.tokens / span.seconds if span.tokens and span.seconds > 0 else None

    @property
    def data_wait_share(self) -> float | None:
        """Share of the window's time in which the device waited for a batch, 0 to 1."""
        span = self._span()
        return min(span.waited / span.seconds, 1.0) if span.steps and span.seconds > 0 else None

    def _active(self, now: float) -> float:
        return self._elapsed + (now - self._since if self._since is not None else 0.0)

    def _span(self) -> "_Mark":
        if len(self._marks) < 2:
            return _Mark(0.0, 0, 0.0, 0.0)
        first, last = self._marks[0], self._marks[-1]
        return _Mark(
            last.seconds - first.seconds,
            last.steps - first.steps,
            last.tokens - first.tokens,
            last.waited - first.waited,
        )


class _Mark(NamedTuple):
    """Running totals at the end of a step, without the warm-up."""

    seconds: float
    steps: int
    tokens: float
    waited: float
