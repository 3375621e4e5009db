"""A tap on a Keras model's training step: its values as the device holds them, unread.

Keras turns the logs of each step into Python floats before a callback sees them, which waits
for the device, and they are running means over the epoch. So the tap wraps two functions of
the model. `train_step`, while it is traced, also returns what Keras does not: the loss of
this batch alone, its metrics, the learning rate, the number of tokens. `train_function` takes
those values out again before Keras sees them, and hands them on as device arrays.

Works with both engines, with `jit_compile`, `run_eagerly`, `steps_per_execution` and with a
user's own `train_step`; a step that has no such values gives Keras' own logs.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

# The key under which the extra values travel inside Keras' logs.
KEY = "_colabtpu"

Values = dict[str, Any]
"""Name -> scalar, as a device array that nobody has read yet."""


class Tap:
    """Hands each training step's values to `on_step(values)`.

    Args:
        on_step: called right after a step was enqueued, on the thread that trains.
        on_enqueue: called right before a step is enqueued.
    """

    def __init__(self, on_step: Callable[[Values], None], on_enqueue: Callable[[], None]) -> None:
        self.on_step = on_step
        self.on_enqueue = on_enqueue
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
        model.train_step.live = True

    def detach(self, model: keras.Model) -> None:
        """Stops the hand-over; the compiled function stays, so that the next fit is warm."""
        if isinstance(model.train_function, _TappedFunction):
            model.train_function.tap = None
        if hasattr(model.train_step, "live"):
            model.train_step.live = False

    def announce(self) -> None:
        """Says that `fit` is about to run a step; call it in `on_train_batch_begin`."""
        self._announced = True

    def take(self) -> bool:
        """Whether the coming step was announced; each announcement counts once."""
        announced, self._announced = self._announced, False
        return announced


class _TappedFunction:
    """Stands where `model.train_function` stood."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.tap: Tap | None = None

    def __call__(self, *args: Any) -> Any:
        tap = self.tap if self.tap is not None and self.tap.take() else None
        if tap is not None:
            tap.on_enqueue()
        out = self.function(*args)
        logs = out[0] if isinstance(out, tuple) else out
        extra = logs.pop(KEY, {}) if isinstance(logs, dict) else {}
        if tap is not None:
            tap.on_step({**logs, **extra} if isinstance(logs, dict) else {"loss": logs})
        return out


def _tapped_step(model: keras.Model) -> Callable[..., Any]:
    """`model.train_step` that also returns this batch's own values under `KEY`."""
    original = getattr(model.train_step, "model_step", model.train_step)
    step = _jax_step if keras.backend.backend() == "jax" else _tensorflow_step

    # A plain function, as TensorFlow's autograph expects; its state hangs on it.
    def train_step(*args: Any) -> Any:
        if not train_step.live:  # type: ignore[attr-defined]
            return original(*args)
        return step(model, original, *args)

    train_step.live = True  # type: ignore[attr-defined]
    train_step.model_step = original  # type: ignore[attr-defined]
    return train_step


def _jax_step(model: keras.Model, original: Callable[..., Any], state: Any, data: Any) -> Any:
    optimizer_values, metric_values = state[2], state[3]
    values = _input_size(data)
    if model.optimizer is not None:
        mapping = list(zip(model.optimizer.variables, optimizer_values, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            values |= _learning_rate(model)
    with _watch_loss(model) as seen:
        logs, new_state = original(state, data)
    values |= seen
    index = {id(v): i for i, v in enumerate(model.metrics_variables)}
    for metric in _mean_metrics(model, logs):
        pair = [index.get(id(metric.total)), index.get(id(metric.count))]
        if None not in pair:
            total, count = (new_state[3][i] - metric_values[i] for i in pair)
            values[metric.name] = keras.ops.divide_no_nan(total, count)
    return {**logs, KEY: values}, new_state


def _tensorflow_step(model: keras.Model, original: Callable[..., Any], data: Any) -> Any:
    import tensorflow as tf

    def read(variable: Any) -> Any:
        return tf.identity(tf.convert_to_tensor(variable.value))

    values = _input_size(data)
    if model.optimizer is not None:
        values |= _learning_rate(model)
    before = {m.name: (read(m.total), read(m.count)) for m in _mean_metrics(model)}
    with _watch_loss(model) as seen:
        logs = original(data)
    # A replica sees its own share of the batch; Keras would report replica 0 or a mean.
    context = tf.distribute.get_replica_context()
    for name in ("tokens", "examples"):
        if name in values:
            values[name] = context.all_reduce("SUM", tf.cast(values[name], tf.float32))
    values |= {name: context.all_reduce("MEAN", loss) for name, loss in seen.items()}
    for metric in _mean_metrics(model, logs):
        if metric.name in before:
            old_total, old_count = before[metric.name]
            total = context.all_reduce("SUM", read(metric.total) - old_total)
            count = context.all_reduce("SUM", read(metric.count) - old_count)
            values[metric.name] = tf.math.divide_no_nan(total, count)
    return {**logs, KEY: values}


def _input_size(data: Any) -> Values:
    """Examples in the batch, and tokens when the input is `(batch, seq)` of whole numbers."""
    x = keras.utils.unpack_x_y_sample_weight(data)[0]
    leaves = [leaf for leaf in keras.tree.flatten(x) if leaf is not None]
    shape = keras.ops.shape(leaves[0])
    values: Values = {"examples": keras.ops.cast(shape[0], "float32")}
    if len(shape) == 2 and "int" in keras.backend.standardize_dtype(leaves[0].dtype):
        values["tokens"] = values["examples"] * keras.ops.cast(shape[1], "float32")
    return values


def _learning_rate(model: keras.Model) -> Values:
    """The rate of this step, schedules included, before the step counts itself."""
    rate = model.optimizer.learning_rate
    return {"learning_rate": keras.ops.cast(keras.ops.convert_to_tensor(rate), "float32")}


# What the loss tracker was given, for each thread: a strategy traces its replicas in threads
# of their own, and changes between them in the middle of a step.
_traced = threading.local()


@contextmanager
def _watch_loss(model: keras.Model) -> Iterator[Values]:
    """Collects the value that the loss tracker is given while a step is traced."""
    tracker = next((m for m in model.metrics if m.name == "loss"), None)
    if tracker is not None and not hasattr(tracker.update_state, "watched"):
        tracker.update_state = _watched(tracker.update_state)
    seen: Values = {}
    _traced.values = seen
    try:
        yield seen
    finally:
        _traced.values = None


def _watched(update: Callable[..., Any]) -> Callable[..., Any]:
    def update_state(values: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(_traced, "values", None) is not None:
            _traced.values["loss"] = keras.ops.cast(keras.ops.mean(values), "float32")
        return update(values, *args, **kwargs)

    update_state.watched = update  # type: ignore[attr-defined]
    return update_state


def _mean_metrics(model: keras.Model, logs: Values | None = None) -> list[Any]:
    """The compiled metrics that are a total over a count, so that one batch can be told apart."""
    found: list[Any] = []
    for metric in model.metrics:
        found += getattr(metric, "metrics", None) or [metric]
    return [
        m
        for m in found
        if isinstance(m, keras.metrics.Mean)
        and m.name != "loss"
        and (logs is None or m.name in logs)
    ]
