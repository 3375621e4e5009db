"""Histograms of weights, gradients and activations, by one extra step on the device.

    statistics = Statistics(model)
    for tag, histogram in statistics(batch, state).items(): ...

Training steps pay nothing: at a scheduled step the current batch runs once more, forward and
backward, at the weights after that step, without an update. Layers run as in evaluation
(dropout off), so that the extra step leaves no trace: neither random state nor moving averages
nor metrics change. Only the counts leave the device. Under a TensorFlow strategy and on a JAX
mesh they are those of the global batch.

Weights and gradients are told apart by variable, activations by the model's layers.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

BINS = 30


@dataclass(frozen=True)
class Histogram:
    """Counts of a tensor's finite values in equal bins.

    Attributes:
        edges: `(BINS + 1,)` float64, from the least value to the greatest.
        counts: `(BINS,)` float64.
        nonfinite: how many values were NaN or infinite.
    """

    edges: np.ndarray
    counts: np.ndarray
    nonfinite: int


class Statistics:
    """Runs the extra step of a compiled model; traced once for each shape of batch."""

    def __init__(self, model: keras.Model) -> None:
        self._run = _jax(model) if keras.backend.backend() == "jax" else _tensorflow(model)

    def __call__(self, batch: Any, state: Any = None) -> dict[str, Histogram]:
        """Returns tag -> histogram.

        Args:
            batch: `(x, y)` or `(x, y, sample_weight)`, as the training step had it.
            state: on JAX, the training step's new state.
        """
        return {tag: _histogram(*raw) for tag, raw in sorted(self._run(batch, state).items())}


def _histogram(counts: Any, low: Any, high: Any, nonfinite: Any) -> Histogram:
    low, high = float(low), float(high)
    edges = np.linspace(low, high, BINS + 1)
    return Histogram(edges, np.asarray(counts, "float64"), int(float(nonfinite)))


def _jax(model: keras.Model) -> Callable[[Any, Any], Any]:
    import jax

    def statistics(state: Any, data: Any) -> Any:
        weights, others, optimizer_values, metric_values = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)

        def loss(weights: Any) -> Any:
            with _activations(model) as seen:
                value, _ = model.compute_loss_and_updates(
                    weights, others, metric_values, x, y, sample_weight,
                    training=False, optimizer_variables=optimizer_values,
                )  # fmt: skip
            return value, dict(seen)

        gradients, activations = jax.grad(loss, has_aux=True)(weights)
        return _count_all(model, weights, gradients, activations)

    compiled = jax.jit(statistics)
    return lambda batch, state: jax.device_get(compiled(state, batch))


def _tensorflow(model: keras.Model) -> Callable[[Any, Any], Any]:
    import tensorflow as tf

    strategy = model.distribute_strategy

    def in_replica(data: Any) -> Any:
        context = tf.distribute.get_replica_context()
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        # A loss may count for metrics as well; what it counts here must not stay.
        metric_values = [tf.identity(v.value) for v in model.metrics_variables]
        with _activations(model) as seen, tf.GradientTape() as tape:
            y_pred = model(x, training=False)
            loss = model._compute_loss(x, y, y_pred, sample_weight, training=False)
        for variable, value in zip(model.metrics_variables, metric_values, strict=True):
            variable.value.assign(value)
        weights = [tf.identity(v.value) for v in model.trainable_variables]
        gradients = [
            None if g is None else tf.convert_to_tensor(g)
            for g in tape.gradient(loss, [v.value for v in model.trainable_variables])
        ]
        if context.num_replicas_in_sync > 1:
            gradients = [None if g is None else context.all_reduce("SUM", g) for g in gradients]
            return _count_all(model, weights, gradients, seen, context)
        return _count_all(model, weights, gradients, seen)

    @tf.function(reduce_retracing=True)
    def statistics(data: Any) -> Any:
        return strategy.run(in_replica, args=(data,))

    def first(value: Any) -> Any:
        return strategy.experimental_local_results(value)[0].numpy()

    return lambda batch, _: keras.tree.map_structure(first, statistics(batch))


def _count_all(
    model: keras.Model, weights: Any, gradients: Any, activations: Any, context: Any = None
) -> dict[str, Any]:
    counted = {}
    for variable, weight, gradient in zip(
        model.trainable_variables, weights, gradients, strict=True
    ):
        counted[f"weights/{variable.path}"] = _count(weight)
        if gradient is not None:
            counted[f"gradients/{variable.path}"] = _count(gradient)
    for name, activation in activations.items():
        # Each replica has activations of its own rows only.
        counted[f"activations/{name}"] = _count(activation, context)
    return counted


def _count(tensor: Any, context: Any = None) -> tuple[Any, Any, Any, Any]:
    """Counts a tensor's values in bins; over all replicas where a `context` is given."""
    values = ops.reshape(ops.cast(tensor, "float32"), (-1,))
    finite = ops.isfinite(values)
    low = ops.min(ops.where(finite, values, np.inf))
    high = ops.max(ops.where(finite, values, -np.inf))
    nonfinite = ops.sum(ops.cast(ops.logical_not(finite), "float32"))
    if context is not None:
        # Strategies reduce by sum or mean only, so the extremes are gathered.
        low = ops.min(context.all_gather(ops.reshape(low, (1,)), axis=0))
        high = ops.max(context.all_gather(ops.reshape(high, (1,)), axis=0))
    edges = low + (high - low) * (np.arange(1, BINS, dtype="float32") / BINS)
    # Values below each edge, in one pass that compilers fuse: sorting or scattering is slow
    # on a TPU. What is not finite counts as above all edges, and is then taken off.
    above = ops.where(finite, values, np.inf)
    below = _below(above, edges)
    total = ops.sum(ops.cast(finite, "float32"))
    if context is not None:
        below, total, nonfinite = (
            context.all_reduce("SUM", part) for part in (below, total, nonfinite)
        )
    ends = ops.concatenate([ops.zeros((1,)), below, ops.reshape(total, (1,))])
    return ends[1:] - ends[:-1], low, high, nonfinite


def _below(values: Any, edges: Any) -> Any:
    """How many of `values` `(n,)` are less than each of `edges` `(m,)`, float32 `(m,)`."""
    if keras.backend.backend() == "tensorflow" and not _on_tpu():
        # Not compiled by XLA, the comparison below would hold BINS times the tensor.
        import tensorflow as tf

        bins = tf.math.bincount(
            tf.searchsorted(edges, values, side="right"), minlength=BINS, dtype=tf.float32
        )
        return tf.cumsum(bins)[:-1]
    return ops.sum(ops.cast(ops.less(values[:, None], edges[None, :]), "float32"), axis=0)


def _on_tpu() -> bool:
    import tensorflow as tf

    return bool(tf.config.list_logical_devices("TPU"))


_lock = threading.Lock()
_watchers = 0
_traced = threading.local()
_plain_call = keras.layers.Layer.__call__


@contextmanager
def _activations(model: keras.Model) -> Iterator[dict[str, Any]]:
    """Collects the outputs of the model's layers while they are called in this thread."""
    global _watchers
    _traced.layers = {id(layer): layer.name for layer in _layers(model)}
    outputs: dict[str, Any] = {}
    _traced.outputs = outputs
    with _lock:
        _watchers += 1
        keras.layers.Layer.__call__ = _watched_call
    try:
        yield outputs
    finally:
        _traced.layers = {}
        with _lock:
            _watchers -= 1
            if not _watchers:
                keras.layers.Layer.__call__ = _plain_call


def _watched_call(layer: Any, *args: Any, **kwargs: Any) -> Any:
    output = _plain_call(layer, *args, **kwargs)
    name = getattr(_traced, "layers", {}).get(id(layer))
    if name is not None and hasattr(output, "shape") and "float" in str(output.dtype):
        # A layer that is called twice, such as a tied head, is shown by its first output.
        _traced.outputs.setdefault(name, output)
    return output


def _layers(model: keras.Model) -> list[Any]:
    return [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
