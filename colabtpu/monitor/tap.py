"""A tap on a Keras model's training step: its values as the device holds them, unread.

Keras turns the logs of each step into Python floats before a callback sees them, which waits
for the device. So the tap wraps two functions of the model. `train_step`, while it is traced,
returns more than Keras asks for (see `step`). `train_function` takes those values out again
before Keras sees them, and hands them on as device arrays; it also times how long the step
waits for its batch, and can keep that batch.

Works with both engines, with `jit_compile`, `run_eagerly`, `steps_per_execution` and with a
user's own `train_step`; a step that has no such values gives Keras' own logs.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import keras

from colabtpu.monitor.step import Values, jax_step, tensorflow_step

# The key under which the extra values travel inside Keras' logs.
KEY = "_colabtpu"


class Tap:
    """Hands each training step's values to `on_step`.

    Args:
        on_step: called with the step's values right after it was enqueued, on the thread
            that trains.
        on_enqueue: called right before a step is enqueued.
        on_wait: called with the seconds that the device had nothing to do for want of a batch.

    Attributes:
        keep_batch: whether `batch` is kept.
        batch: the latest batch, `(x, y, sample_weight)` or shorter.
        state: on JAX, the model's state after the latest step.
        steps_per_call: the model's `steps_per_execution`.
    """

    def __init__(
        self,
        on_step: Callable[[Values], None],
        on_enqueue: Callable[[], None],
        on_wait: Callable[[float], None],
    ) -> None:
        self.on_step = on_step
        self.on_enqueue = on_enqueue
        self.on_wait = on_wait
        self.keep_batch = False
        self.batch: Any = None
        self.state: Any = None
        self.steps_per_call = 1
        self._latest: Values = {}
        # Only a step that `fit` announced belongs to us: after an interrupted fit, the same
        # function may serve `train_on_batch` or a fit without our callback.
        self._announced = False

    def attach(self, model: keras.Model) -> None:
        """Puts the tap on `model`; call it in `on_train_begin`."""
        if not isinstance(model.train_function, _TappedFunction):
            # New at each `compile`, because a function that was traced without the tap stays so.
            model.train_step = _tapped_step(model)
            model.train_function = None
            model.make_train_function()
            model.train_function = _TappedFunction(model.train_function)
        model.train_function.tap = self
        self.steps_per_call = model.steps_per_execution
        model.train_step.live = True

    def detach(self, model: keras.Model) -> None:
        """Stops the hand-over; the compiled function stays, so that the next fit is warm."""
        if isinstance(model.train_function, _TappedFunction):
            model.train_function.tap = None
        if hasattr(model.train_step, "live"):
            model.train_step.live = False
        self.batch = self.state = None
        self._latest = {}

    def announce(self) -> None:
        """Says that `fit` is about to run a step; call it in `on_train_batch_begin`."""
        self._announced = True

    def take(self) -> bool:
        """Whether the coming step was announced; each announcement counts once."""
        announced, self._announced = self._announced, False
        return announced

    def fetched(self, batch: Any, seconds: float, idle_before: bool) -> None:
        """Notes that a batch took `seconds` to come."""
        if self.keep_batch:
            self.batch = batch
        # A device that still works on an earlier step loses nothing. One that ran dry while
        # the batch was made did so at an unknown moment: half is the fair guess.
        if idle_before:
            self.on_wait(seconds)
        elif self.device_is_idle():
            self.on_wait(seconds / 2)

    def stepped(self, values: Values, state: Any) -> None:
        """Notes that a step was enqueued."""
        self.state = state
        self._latest = values
        self.on_step(values)

    def device_is_idle(self) -> bool:
        """Whether the latest step is done, as far as that can be told without waiting."""
        return is_ready(self._latest)


def is_ready(values: Values) -> bool:
    """Whether the device has finished these values; says yes where it cannot be told."""
    for value in values.values():
        if hasattr(value, "is_ready"):
            return bool(value.is_ready())
    # TensorFlow does not say. On a CPU its functions return when they are done; elsewhere
    # this makes the waiting for data an upper bound.
    return True


class _TappedFunction:
    """Stands where `model.train_function` stood."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.tap: Tap | None = None

    def __call__(self, *args: Any) -> Any:
        tap = self.tap
        if tap is None or not tap.take():
            return self._without_extra(self.function(*args))[0]
        tap.on_enqueue()
        *state, iterator = args
        out, values = self._without_extra(self.function(*state, _watched(iterator, tap)))
        tap.stepped(values, out[1] if state else None)
        return out

    def _without_extra(self, out: Any) -> tuple[Any, Values]:
        logs = out[0] if isinstance(out, tuple) else out
        if not isinstance(logs, dict):
            return out, {"loss": logs}
        extra = logs.pop(KEY, {})
        return out, {**logs, **extra}


def _watched(iterator: Any, tap: Tap) -> Any:
    """The iterator that `train_function` is given, with its waiting timed."""
    if keras.backend.backend() == "jax":
        return _timed(iterator, tap)
    import tensorflow as tf

    # Taken here, a batch can be timed and kept; several steps in one call take their batches
    # inside the graph, where it cannot.
    if tap.steps_per_call > 1 or not isinstance(
        iterator, tf.data.Iterator | tf.distribute.DistributedIterator
    ):
        return iterator
    return [next(_timed(iterator, tap))]


def _timed(iterator: Any, tap: Tap) -> Iterator[Any]:
    while True:
        idle, start = tap.device_is_idle(), time.perf_counter()
        try:
            batch = next(iterator)
        except StopIteration:
            return
        tap.fetched(batch, time.perf_counter() - start, idle)
        yield batch


def _tapped_step(model: keras.Model) -> Callable[..., Any]:
    """`model.train_step` that also returns this batch's own values under `KEY`."""
    original = getattr(model.train_step, "model_step", model.train_step)

    # A plain function, as TensorFlow's autograph expects; its state hangs on it.
    def train_step(*args: Any) -> Any:
        if not train_step.live:  # type: ignore[attr-defined]
            return original(*args)
        if keras.backend.backend() == "jax":
            logs, state, values = jax_step(model, original, *args)
            return {**logs, KEY: values}, state
        logs, values = tensorflow_step(model, original, *args)
        return {**logs, KEY: values}

    train_step.live = True  # type: ignore[attr-defined]
    train_step.model_step = original  # type: ignore[attr-defined]
    return train_step
