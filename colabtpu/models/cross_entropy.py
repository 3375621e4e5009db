"""Cross-entropy from hidden states, a chunk of tokens at a time: the logits never exist at once.

    loss, hits = chunked(hidden, kernel, labels, weights, Objective(vocab_size=50257))

The gradient is computed with the loss, while a chunk's logits are at hand: the loss is a sum of
weighted tokens, so its gradient needs nothing that comes later, and nothing is computed twice
(as in Liger Kernel, Hsu et al. 2024). What is kept is the gradient of the hidden states, and of
the head in float32.
"""

import math
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from colabtpu.models import attention

# Logits of a chunk: large enough that the head's gradient is not read and written too often,
# small enough to be a small part of the memory (1,024 x 50,304 in float32 are 206 MB).
TOKENS_IN_A_CHUNK = 1024


@dataclass(frozen=True)
class Objective:
    """What is minimised.

    Attributes:
        vocab_size: logits that count; those from here on are padding.
        label_smoothing: the share of each label spread evenly over the vocabulary.
        z_loss: weight of the squared log-partition.
    """

    vocab_size: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def from_logits(logits: Any, labels: Any, objective: Objective) -> tuple[Any, Any]:
    """Returns each token's loss and whether the label was the first choice.

    Args:
        logits: `(..., vocabulary)` float32.
        labels: `(...)` int32.
        objective: the `Objective`.

    Returns:
        Two float32 tensors `(...)`: losses, and 1.0 for a hit.
    """
    losses, hits, _ = _tokens(_masked(logits, objective), labels, objective)
    return losses, hits


def chunked(
    hidden: Any, kernel: Any, labels: Any, weights: Any, objective: Objective, *,
    tied: bool, training: bool = True, chunks: int = 0,
) -> tuple[Any, Any]:  # fmt: skip
    """Returns the weighted sum of losses and of hits.

    Args:
        hidden: `(batch, seq, dim)`; the products are taken in its dtype, summed in float32.
        kernel: the head, `(vocabulary, dim)` if tied, else `(dim, vocabulary)`; float32.
        labels: `(batch, seq)` int32.
        weights: `(batch, seq)` float32.
        objective: the `Objective`.
        tied: which way round `kernel` lies.
        training: whether to compute the gradient along with the loss.
        chunks: how many, a divisor of `seq`; 0: as many as hold about 1,024 tokens each.

    Returns:
        Two float32 scalars; only the first has a gradient.
    """
    seq_len, dim = hidden.shape[1], hidden.shape[2]
    chunks = chunks or _chunks(hidden.shape[0], seq_len)
    size = seq_len // chunks
    dtype = hidden.dtype

    def part(tensor: Any, index: Any) -> Any:
        start = (0, index * size) + (0,) * (len(tensor.shape) - 2)
        batch = -1 if tensor.shape[0] is None else tensor.shape[0]
        return ops.slice(tensor, start, (batch, size, *tensor.shape[2:]))

    def measure(hidden: Any, kernel: Any, index: Any) -> tuple[Any, Any, Any, Any]:
        rows = ops.reshape(part(hidden, index), (-1, dim))
        logits = _masked(_product(rows, kernel, transpose_right=tied), objective)
        goals, weight = (ops.reshape(part(t, index), (-1,)) for t in (labels, weights))
        losses, hits, slopes = _tokens(logits, goals, objective)
        sums = ops.stack([ops.sum(losses * weight), ops.sum(hits * weight)])
        return sums, rows, ops.cast(slopes() * weight[:, None], dtype) if training else None, goals

    def value_only(hidden: Any, kernel: Any) -> Any:
        kernel = ops.cast(kernel, dtype)
        return _repeat(
            chunks, lambda index, sums: sums + measure(hidden, kernel, index)[0], ops.zeros((2,))
        )

    def with_gradient(hidden: Any, kernel: Any) -> tuple[Any, Any]:
        narrow = ops.cast(kernel, dtype)

        def step(index: Any, state: Any) -> Any:
            sums, d_hidden, d_kernel = state
            more, rows, d_logits, _ = measure(hidden, narrow, index)
            d_rows = _product(d_logits, narrow, transpose_right=not tied)
            pair = (d_logits, rows) if tied else (rows, d_logits)
            d_kernel = d_kernel + _product(*pair, transpose_left=True)
            d_rows = ops.reshape(ops.cast(d_rows, dtype), ops.shape(part(hidden, index)))
            start = (0, index * size, 0)
            return sums + more, ops.slice_update(d_hidden, start, d_rows), d_kernel

        empty = (ops.zeros((2,)), ops.zeros_like(hidden), ops.zeros(kernel.shape, "float32"))
        sums, d_hidden, d_kernel = _repeat(chunks, step, empty)

        def backward(*upstream: Any) -> tuple[Any, Any]:
            scale = upstream[-1][0]
            return d_hidden * ops.cast(scale, dtype), d_kernel * scale

        return sums, backward

    kernel = ops.cast(kernel, "float32")
    run = ops.custom_gradient(with_gradient) if training else value_only
    sums = run(hidden, kernel)
    return sums[0], sums[1]


def _tokens(logits: Any, labels: Any, objective: Objective) -> tuple[Any, Any, Any]:
    """Returns losses, hits, and a function that gives the losses' gradient by the logits."""
    width, smooth = logits.shape[-1], objective.label_smoothing
    columns = ops.arange(width, dtype="int32")
    is_label = ops.equal(columns, labels[..., None])
    top = ops.max(logits, axis=-1, keepdims=True)
    powers = ops.exp(logits - top)
    total = ops.sum(powers, axis=-1, keepdims=True)
    log_partition = (top + ops.log(total))[..., 0]
    target = ops.sum(ops.where(is_label, logits, 0.0), axis=-1)
    losses = log_partition - (1 - smooth) * target
    # The first of equal logits is the choice, as with argmax, which would be one more pass.
    choice = ops.min(ops.where(ops.equal(logits, top), columns, width), axis=-1)
    hits = ops.cast(ops.equal(choice, labels), "float32")
    counts = columns < objective.vocab_size
    if smooth:
        losses = losses - smooth * ops.sum(ops.where(counts, logits, 0.0), axis=-1) / (
            objective.vocab_size
        )
    if objective.z_loss:
        losses = losses + objective.z_loss * ops.square(log_partition)

    def slopes() -> Any:
        chances = powers / total
        if objective.z_loss:
            chances = chances * (1 + 2 * objective.z_loss * log_partition[..., None])
        slope = chances - ops.where(is_label, 1.0 - smooth, 0.0)
        if smooth:
            slope = slope - ops.where(counts, smooth / objective.vocab_size, 0.0)
        return slope

    return losses, hits, slopes


def _masked(logits: Any, objective: Objective) -> Any:
    width = logits.shape[-1]
    if width == objective.vocab_size:
        return logits
    return ops.where(ops.arange(width) < objective.vocab_size, logits, attention.MASKED)


def _chunks(batch: int | None, seq_len: int) -> int:
    """Chunks of about 1,024 tokens on each device, cut along the sequence.

    Not along the batch: that is the axis which a distribution splits over devices.
    """
    rows = max(1, (batch or 8) // _devices())
    wanted = max(1, rows * seq_len // TOKENS_IN_A_CHUNK)
    return math.gcd(seq_len, 2 ** (wanted - 1).bit_length())


def _devices() -> int:
    distribution = keras.distribution.distribution()
    if keras.backend.backend() != "jax" or distribution is None:
        return 1  # TensorFlow already shows each replica its own rows only.
    mesh = distribution.device_mesh
    return dict(zip(mesh.axis_names, mesh.shape, strict=True))[distribution.batch_dim_name]


def _repeat(times: int, step: Any, state: Any) -> Any:
    if times == 1:
        return step(0, state)
    return ops.fori_loop(0, times, step, state)


def _product(
    left: Any, right: Any, transpose_left: bool = False, transpose_right: bool = False
) -> Any:
    """Returns the matrix product, summed and returned in float32."""
    device, jax_engine = attention.device_kind(), keras.backend.backend() == "jax"
    if device == "cpu" or (device == "tpu" and not jax_engine):
        # A CPU has no bfloat16 products, or slow ones; and `tf.matmul` would round the sum to
        # bfloat16. A float32 product of widened operands keeps it, and a TPU still multiplies
        # in bfloat16.
        left, right = ops.cast(left, "float32"), ops.cast(right, "float32")
    if jax_engine:
        from jax import lax

        axes = ((0 if transpose_left else 1,), (1 if transpose_right else 0,))
        return lax.dot_general(left, right, (axes, ((), ())), preferred_element_type="float32")
    import tensorflow as tf

    product = tf.matmul(left, right, transpose_a=transpose_left, transpose_b=transpose_right)
    return tf.cast(product, tf.float32)
