"""What a training step returns beside Keras' logs, computed while the step is traced.

The loss and metrics of this batch alone (Keras' own are running means over the epoch), the
learning rate, the size of the batch, and the norms that tell whether training is healthy:
of the gradient, of the parameters, and of the update relative to the parameters.

Everything here runs at trace time, inside one compiled step; the figures come out as scalars
on the device. Under a TensorFlow strategy they are those of the global batch, not of replica 0.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras import ops

Values = dict[str, Any]
"""Name -> scalar, as a device array that nobody has read yet."""


def jax_step(
    model: keras.Model, original: Callable[..., Any], state: Any, data: Any
) -> tuple[Any, Any, Values]:
    """Runs a JAX `train_step`; returns its logs, its new state, and the values of this batch."""
    old_weights, _, optimizer_values, old_metrics = state
    values = _input_size(data)
    if model.optimizer is not None:
        mapping = list(zip(model.optimizer.variables, optimizer_values, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            values |= _learning_rate(model)
    with _watching(model) as seen:
        logs, new_state = original(state, data)
    gradients = seen.pop("gradients", None)
    values |= seen
    if gradients is not None:
        values |= _norms(gradients, old_weights, new_state[0])
    place = {id(v): i for i, v in enumerate(model.metrics_variables)}
    for metric in _additive_metrics(model, logs):
        places = [place.get(id(v)) for v in metric.variables]
        if None not in places:
            change = [new_state[3][i] - old_metrics[i] for i in places]
            values[metric.name] = _result(metric, change)
    return logs, new_state, values


def tensorflow_step(
    model: keras.Model, original: Callable[..., Any], data: Any
) -> tuple[Any, Values]:
    """Runs a TensorFlow `train_step`; returns its logs and the values of this batch."""
    import tensorflow as tf

    context = tf.distribute.get_replica_context()

    def over_replicas(how: str, value: Any) -> Any:
        return value if context.num_replicas_in_sync == 1 else context.all_reduce(how, value)

    def read(variables: list[Any]) -> list[Any]:
        return [tf.identity(tf.convert_to_tensor(v.value)) for v in variables]

    values = {name: over_replicas("SUM", size) for name, size in _input_size(data).items()}
    if model.optimizer is not None:
        values |= _learning_rate(model)
    old_metrics = {m.name: read(m.variables) for m in _additive_metrics(model)}
    old_weights = read(model.trainable_variables)
    with _watching(model) as seen:
        logs = original(data)
    gradients = seen.pop("gradients", None)
    values |= {name: over_replicas("MEAN", value) for name, value in seen.items()}
    if gradients is not None and old_weights:
        values |= _norms(gradients, old_weights, read(model.trainable_variables))
    for metric in _additive_metrics(model, logs):
        if metric.name in old_metrics:
            pairs = zip(read(metric.variables), old_metrics[metric.name], strict=True)
            change = [over_replicas("SUM", new - old) for new, old in pairs]
            values[metric.name] = _result(metric, change)
    return logs, values


def _input_size(data: Any) -> Values:
    """Examples in the batch, and tokens when an input is `(batch, seq)` of whole numbers."""
    x = keras.utils.unpack_x_y_sample_weight(data)[0]
    leaves = [leaf for leaf in keras.tree.flatten(x) if leaf is not None]
    shape = ops.shape(leaves[0])
    values: Values = {"examples": ops.cast(shape[0], "float32")}
    if len(shape) == 2 and "int" in keras.backend.standardize_dtype(leaves[0].dtype):
        values["tokens"] = values["examples"] * ops.cast(shape[1], "float32")
    return values


def _learning_rate(model: keras.Model) -> Values:
    """The rate of this step, schedules included, before the step counts itself."""
    rate = model.optimizer.learning_rate
    return {"learning_rate": ops.cast(ops.convert_to_tensor(rate), "float32")}


def _norms(gradients: list[Any], old: list[Any], new: list[Any]) -> Values:
    """Global 2-norms, in float32 over all trainable weights together."""
    weights = _norm(old)
    changes = zip(old, new, strict=True)
    update = _norm([ops.cast(b, "float32") - ops.cast(a, "float32") for a, b in changes])
    return {
        "gradient_norm": _norm([g for g in gradients if g is not None]),
        "parameter_norm": _norm(new),
        "update_ratio": ops.divide_no_nan(update, weights),
    }


def _norm(tensors: list[Any]) -> Any:
    squares = [ops.sum(ops.square(ops.cast(_dense(t), "float32"))) for t in tensors]
    return ops.sqrt(sum(squares[1:], squares[0]))


def _dense(gradient: Any) -> Any:
    # An embedding's gradient on TensorFlow lists rows, some of them twice: they must be summed
    # before they are squared.
    if hasattr(gradient, "indices") and hasattr(gradient, "dense_shape"):
        import tensorflow as tf

        rows = gradient.dense_shape[0]
        return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)
    return gradient


# What a step was given, for each thread: a strategy traces its replicas in threads of their
# own, and changes between them in the middle of a step.
_traced = threading.local()


@contextmanager
def _watching(model: keras.Model) -> Iterator[Values]:
    """Collects the batch's loss and its gradients while a step is traced."""
    tracker = next((m for m in model.metrics if m.name == "loss"), None)
    if tracker is not None:
        _watch(tracker, "update_state", _note_loss)
    if model.optimizer is not None:
        _watch_gradients(model.optimizer)
    seen: Values = {}
    _traced.values = seen
    try:
        yield seen
    finally:
        _traced.values = None


def _watch(owner: Any, name: str, note: Callable[[Values, tuple[Any, ...], Any], None]) -> None:
    """Lets `note(seen, arguments, result)` see each call of a method while a step is traced."""
    method = getattr(owner, name)
    if hasattr(method, "watched"):
        return

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if getattr(_traced, "values", None) is not None:
            note(_traced.values, args, result)
        return result

    watched.watched = True  # type: ignore[attr-defined]
    setattr(owner, name, watched)


def _watch_gradients(optimizer: Any) -> None:
    if hasattr(optimizer, "inner_optimizer"):
        return  # Loss scaling: the gradients it is given are multiplied by a changing number.
    if keras.backend.backend() == "jax":
        _watch(optimizer, "stateless_apply", _note_second_argument)
        return
    import tensorflow as tf

    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        _watch(optimizer, "apply", _note_first_argument)
    elif not optimizer.gradient_accumulation_steps:
        # Before this call a replica holds its own share only. Clipping comes earlier in Keras,
        # so with it this is the norm of the clipped gradient.
        _watch(optimizer, "_all_reduce_sum_gradients", _note_reduced)


def _note_loss(seen: Values, arguments: tuple[Any, ...], _: Any) -> None:
    seen["loss"] = ops.cast(ops.mean(arguments[0]), "float32")


def _note_first_argument(seen: Values, arguments: tuple[Any, ...], _: Any) -> None:
    seen["gradients"] = list(arguments[0])


def _note_second_argument(seen: Values, arguments: tuple[Any, ...], _: Any) -> None:
    seen["gradients"] = list(arguments[1])


def _note_reduced(seen: Values, _: tuple[Any, ...], result: Any) -> None:
    seen["gradients"] = [gradient for gradient, _ in result]


def _result(metric: Any, variables: list[Any]) -> Any:
    """What the metric would say had it seen only what changed its variables."""
    with keras.StatelessScope(state_mapping=list(zip(metric.variables, variables, strict=True))):
        return ops.cast(metric.result(), "float32")


def _additive_metrics(model: keras.Model, logs: Values | None = None) -> list[Any]:
    """Compiled metrics whose variables are sums over examples, so that one batch can be told.

    All of Keras' own and of this package are; of a user's own class that is not known.
    """
    found: list[Any] = []
    for metric in model.metrics:
        found += getattr(metric, "metrics", None) or [metric]
    return [
        m
        for m in found
        if (
            isinstance(m, keras.metrics.Mean)
            or type(m).__module__.partition(".")[0] in ("keras", "keras_hub", "colabtpu")
        )
        and m.variables
        and m.name != "loss"
        and (logs is None or m.name in logs)
    ]
