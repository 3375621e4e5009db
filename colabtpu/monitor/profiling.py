"""A trace of a few steps after warm-up, and what it says, without the Profile tab.

    model.fit(..., callbacks=callbacks("logs", tpu, profile_steps=3))
    model.fit(..., callbacks=[profile("logs", steps=3)])             # by itself

The trace goes to `<run>/plugins/profile/<time>/`, where the Profile tab looks for it. The tab
needs the xprof package; the verdict does not.
"""

import importlib.util
import os
from pathlib import Path

import keras

from colabtpu.errors import ColabTPUError, InvalidArgumentError
from colabtpu.monitor.training import TrainingLog
from colabtpu.monitor.xplane import TraceShares, analyse

# The first steps compile and fill caches.
AFTER_STEPS = 5
INPUT_BOUND = 0.2
IDLE = 0.2


def profile(logdir: str | os.PathLike[str], steps: int = 3, after: int = AFTER_STEPS) -> "Profile":
    """Returns a callback that traces `steps` steps after the first `after`, for the Profile tab.

    Args:
        logdir: the folder that TensorBoard shows.
        steps: how many steps to trace.
        after: how many to leave out first: they compile.

    Raises:
        InvalidArgumentError: `steps` is less than 1, or `after` is negative.
    """
    if steps < 1 or after < 0:
        raise InvalidArgumentError(
            f"`steps` must be 1 or more, `after` 0 or more. Received: {steps=}, {after=}",
            "Leave `after` out, and trace 3 steps.",
        )
    return Profile(Path(logdir).expanduser(), None, steps, after)


class Profile(keras.callbacks.Callback):
    """Traces some steps of a fit, and prints a verdict.

    Args:
        folder: where the trace goes.
        log: the callback that measures the waiting for data, if there is one.
        steps: how many steps to trace.
        after: how many steps to leave out first.

    Attributes:
        shares: where the time went, once the trace is done.
    """

    async_safe = True

    def __init__(
        self, folder: Path, log: TrainingLog | None, steps: int, after: int = AFTER_STEPS
    ) -> None:
        super().__init__()
        self.shares: TraceShares | None = None
        self._folder = folder
        self._log = log
        self._steps = steps
        self._after = after
        self._begun: int | None = None
        self._seen = 0
        self._done = False

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        if self._done:
            return
        self._seen += 1
        if self._begun is None and self._seen > self._after:
            self._settle()
            self._begun = self._seen
            _start(self._folder)
        elif self._begun is not None and self._seen >= self._begun + self._steps:
            self._finish()

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        self._finish()

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        self._finish()
        if not self._done:
            self._done = True
            print(f"No trace: the fit ended before step {self._after + 1}.")

    def _finish(self) -> None:
        if self._begun is None or self._done:
            return
        self._done = True
        self._settle()
        _stop()
        try:
            self.shares = analyse(self._folder)
        except (ColabTPUError, OSError) as error:
            print(f"The trace was written, but could not be read: {error}")
            return
        waited = self._log.latest.get("speed/data_wait_share") if self._log else None
        text = verdict(self.shares, waited)
        print(text)
        if self._log is not None:
            self._log.files.text(self._log.step, "run/profile", text.replace("\n", "\n\n"))

    def _settle(self) -> None:
        """Waits until the steps so far are done, so that the trace holds whole steps."""
        if self._log is not None:
            self._log.pause()


def verdict(shares: TraceShares, data_wait_share: float | None = None) -> str:
    """Returns what a trace says, in words.

    Args:
        shares: where the time went.
        data_wait_share: share of the time in which the device waited for a batch, 0 to 1; `None`
            when that was not measured.
    """
    if data_wait_share is not None and data_wait_share > INPUT_BOUND:
        judgement = (
            f"Input-bound: the device waits for data {data_wait_share:.0%} of the time. "
            "Prefetch, cache, or prepare batches ahead."
        )
    elif shares.collective_share > shares.matrix_share:
        judgement = "Communication-bound: more time between devices than in matrix products."
    elif shares.idle_share > IDLE:
        judgement = (
            f"The device idles {shares.idle_share:.0%} of the time: larger "
            "batches or more steps_per_execution give the host less to do."
        )
    else:
        judgement = "Compute-bound: the device is kept busy."
    waiting = "not measured" if data_wait_share is None else f"{data_wait_share:.0%}"
    top = ", ".join(f"{name} {share:.0%}" for name, share in shares.top)
    return (
        f"Profile of {shares.seconds:.2f} s on {shares.device}: matrix products "
        f"{shares.matrix_share:.0%}, collectives {shares.collective_share:.0%} of the busy time; "
        f"idle {shares.idle_share:.0%}; waiting for data {waiting}.\n"
        f"{judgement}\nLongest: {top}.\n{_tab_hint()}"
    )


def _tab_hint() -> str:
    if any(importlib.util.find_spec(name) for name in ("xprof", "tensorboard_plugin_profile")):
        return "Details: the Profile tab of TensorBoard."
    return "For details in TensorBoard's Profile tab: `pip install xprof`, then start it again."


def _start(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if keras.backend.backend() == "jax":
        import jax

        jax.profiler.start_trace(str(folder))
    else:
        import tensorflow as tf

        tf.profiler.experimental.start(str(folder))


def _stop() -> None:
    if keras.backend.backend() == "jax":
        import jax

        jax.profiler.stop_trace()
    else:
        import tensorflow as tf

        tf.profiler.experimental.stop()
