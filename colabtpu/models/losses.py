"""The loss and the metrics of next-token prediction.

    model.compile("adamw", loss=next_token(model), metrics=metrics(model))
    model.fit(batches)                  # (x, y) or (x, y, weights): logs `loss` and `accuracy`

Labels are already shifted: `y[:, t]` is the token after `x[:, t]`. The loss is the mean over
valid tokens, those whose weight is not zero, over all replicas together; Keras' own default
divides by all positions, padding included, and under a TensorFlow strategy averages the
replicas' averages.

The loss feeds the accuracy: on JAX a metric cannot reach the model's weights, and a metric that
read the logits would keep the compiler from dropping them.
"""

from typing import Any

import keras
from keras import ops

from colabtpu.models.cross_entropy import Objective, chunked, from_logits

_PACKAGE = "colabtpu"


def next_token(model: keras.Model | None = None, **options: Any) -> "NextToken":
    """Returns the loss to give to `compile`.

    Args:
        model: the model that is compiled; one of `transformer_lm` lends its head, any other
            that returns logits `(batch, seq, vocabulary)` works too.
        **options: `label_smoothing`, `z_loss`, `ignore_index`: see `NextToken`.

    Returns:
        A Keras loss. It saves and loads with a compiled model.
    """
    loss = NextToken(**options)
    if model is not None:
        loss.bind(model)
    return loss


def metrics(model: keras.Model | None = None) -> list[keras.metrics.Metric]:
    """Returns the metrics to give to `compile(metrics=...)`: the accuracy over valid tokens.

    Args:
        model: the model that is compiled.

    Returns:
        `[TokenAccuracy]`, named `accuracy`.
    """
    del model  # The loss finds the metric among the model's own when it is first computed.
    return [TokenAccuracy()]


@keras.saving.register_keras_serializable(_PACKAGE)
class NextToken(keras.losses.Loss):
    """Cross-entropy of the next token, averaged over the valid tokens of all replicas.

    Args:
        label_smoothing: the share of each label that is spread evenly over the vocabulary.
        z_loss: weight of the squared log-partition term that keeps logits from drifting
            (Chowdhery et al. 2022, PaLM, section 5: 1e-4).
        ignore_index: a label whose positions do not count, such as -100; None: every one does.
        name: the Keras name.
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        ignore_index: int | None = None,
        name: str = "next_token",
        **_: Any,
    ) -> None:
        super().__init__(name=name, reduction="mean_with_sample_weight")
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.ignore_index = ignore_index
        self._embedding: Any = None
        self._training = True
        self._fed: list[TokenAccuracy] = []

    def bind(self, model: Any, training: bool = True) -> None:
        """Takes note of the head that lends its weights and of the metrics to feed.

        Args:
            model: the model whose loss is computed.
            training: whether a gradient will be asked for.
        """
        embedding = getattr(model, "embedding", None)
        self._embedding = embedding if hasattr(embedding, "hidden_behind") else None
        self._training = training
        self._fed = [metric for metric in _compiled(model) if isinstance(metric, TokenAccuracy)]
        for metric in self._fed:
            metric.fed = True

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Returns the mean loss over valid tokens.

        Args:
            y_true: `(batch, seq)` int, the next tokens.
            y_pred: `(batch, seq, vocabulary)` logits.
            sample_weight: `(batch, seq)` or `(batch,)`; 0 for padding. None: all count.

        Returns:
            A float32 scalar. Under a TensorFlow strategy it is this replica's share of the
            mean, since gradients are summed over replicas.
        """
        labels = ops.cast(y_true, "int32")
        weights = self._weights(labels, sample_weight)
        labels = ops.where(weights > 0, labels, 0)  # an ignored label need not be a token
        weight = ops.sum(weights)
        share = weights / ops.maximum(_sum_over_replicas(weight), 1e-8)
        loss, hits = self._sums(y_pred, labels, share)
        for metric in self._fed:
            # `share` is in parts of the replicas' total, which need not be this replica's.
            metric.add(hits * ops.maximum(_sum_over_replicas(weight), 1e-8), weight)
        return loss

    def get_config(self) -> dict[str, Any]:
        return {
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
            "ignore_index": self.ignore_index,
            "name": self.name,
        }

    def _weights(self, labels: Any, sample_weight: Any) -> Any:
        weights = ops.ones_like(labels, dtype="float32")
        if sample_weight is not None:
            given = ops.cast(sample_weight, "float32")
            weights = weights * (given if len(given.shape) == 2 else ops.reshape(given, (-1, 1)))
        if self.ignore_index is not None:
            weights = ops.where(ops.equal(labels, self.ignore_index), 0.0, weights)
        return weights

    def _sums(self, y_pred: Any, labels: Any, weights: Any) -> tuple[Any, Any]:
        """Returns the weighted sums of losses and hits, from hidden states where they are known."""
        head = self._embedding
        hidden = None if head is None else head.hidden_behind(y_pred)
        vocab_size = y_pred.shape[-1] if head is None else head.vocab_size
        objective = Objective(vocab_size, self.label_smoothing, self.z_loss)
        if hidden is None:
            losses, hits = from_logits(ops.cast(y_pred, "float32"), labels, objective)
            return ops.sum(losses * weights), ops.sum(hits * weights)
        return chunked(
            hidden, head.kernel, labels, weights, objective,
            tied=head.tie_weights, training=self._training,
        )  # fmt: skip


@keras.saving.register_keras_serializable(_PACKAGE)
class TokenAccuracy(keras.metrics.Metric):
    """The share of valid tokens that were the model's first choice.

    Attributes:
        fed: whether `NextToken` updates it, so that `update_state` need not read the logits.
    """

    def __init__(self, name: str = "accuracy", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)
        self.hits = self.add_variable(shape=(), initializer="zeros", name="hits")
        self.total = self.add_variable(shape=(), initializer="zeros", name="total")
        self.fed = False

    def add(self, hits: Any, total: Any) -> None:
        """Counts `hits` (float32 scalar) of `total` (float32 scalar) tokens."""
        self.hits.assign_add(hits)
        self.total.assign_add(total)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Counts from labels `(batch, seq)` and logits, unless the loss has done so already."""
        if self.fed:
            return
        labels = ops.cast(y_true, "int32")
        hits = ops.cast(ops.equal(ops.cast(ops.argmax(y_pred, -1), "int32"), labels), "float32")
        weights = ops.ones_like(hits)
        if sample_weight is not None:
            weights = weights * ops.cast(sample_weight, "float32")
        self.add(ops.sum(hits * weights), ops.sum(weights))

    def result(self) -> Any:
        return ops.divide_no_nan(self.hits, self.total)

    def reset_state(self) -> None:
        self.hits.assign(0.0)
        self.total.assign(0.0)


def _compiled(model: Any) -> list[Any]:
    """Returns the metrics that `compile` was given.

    `model.metrics` lists them only once they are built, which on TensorFlow happens after the
    first loss; Keras offers no public way to see them before.
    """
    container = getattr(model, "_compile_metrics", None)
    given = [getattr(container, f"_user_{kind}", None) for kind in ("metrics", "weighted_metrics")]
    return keras.tree.flatten(given)


def _sum_over_replicas(value: Any) -> Any:
    if keras.backend.backend() != "tensorflow":
        return value  # On JAX arrays are global: a sum already spans the devices.
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return value
    return context.all_reduce(tf.distribute.ReduceOp.SUM, value)
