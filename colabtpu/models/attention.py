"""Causal self-attention, by the best means that the device and the shape allow.

    out = attend(query, key, value)                  # (batch, heads, seq, head_dim)
    choose(seq_len=2048)                             # Choice(kind="chunked", reason="...")
    with target_device("tpu"):                       # what a compiler without a TPU sets
        choose(seq_len=2048)                         # Choice(kind="splash", ...) under JAX

Grouped queries: `key` and `value` may have fewer heads than `query`. Local window and segments
(several documents in a row) work with every kind. Keras' own dispatch gives causal training no
kernel under `jit`: it builds the mask inside the trace, and a traced mask sends it to the plain
computation (facts in the README's table of what was verified).
"""

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

_TARGET: contextvars.ContextVar[str | None] = contextvars.ContextVar("target", default=None)

# Low enough to vanish in a softmax, and still a finite bfloat16: minus infinity would turn a
# row without any visible token into NaN.
MASKED = -1e30
LANES = 128  # the width of a TPU register: splash attention cuts sequences in multiples of it
SHORT = 256  # up to here the scores of a row are smaller than what chunking would add


@dataclass(frozen=True)
class Choice:
    """How attention is computed, and why.

    Attributes:
        kind: `"splash"`, the TPU kernel; `"chunked"`, blocks of queries whose scores are
            computed again for the gradient; or `"plain"`, all scores at once.
        reason: one sentence for a report.
    """

    kind: str
    reason: str


def choose(seq_len: int, head_dim: int = 128) -> Choice:
    """Returns how `attend` computes attention here.

    Args:
        seq_len: tokens in a row.
        head_dim: width of a head.

    Returns:
        The `Choice`.
    """
    device, engine = device_kind(), keras.backend.backend()
    if device == "tpu" and engine == "jax" and seq_len % LANES == 0:
        return Choice("splash", f"JAX on a TPU, and {seq_len} tokens are a multiple of {LANES}")
    if device == "tpu" and engine == "jax":
        cause = f"splash attention needs a multiple of {LANES} tokens, not {seq_len}"
    elif device == "tpu":
        cause = "TensorFlow cannot call the TPU kernel"
    else:
        cause = f"the TPU kernel needs a TPU, and this is a {device.upper()}"
    if seq_len <= SHORT:
        return Choice("plain", f"{cause}; {seq_len} tokens are too few to gain from chunks")
    return Choice("chunked", f"{cause}; chunks never hold the scores of a whole row")


@contextlib.contextmanager
def target_device(kind: str | None) -> Iterator[None]:
    """Says which device the program is made for, where that is not the one it is traced on.

    Args:
        kind: `"tpu"`, `"gpu"`, `"cpu"`, or None to look at the engine's own devices.
    """
    token = _TARGET.set(kind)
    try:
        yield
    finally:
        _TARGET.reset(token)


def device_kind() -> str:
    """Returns `"tpu"`, `"gpu"` or `"cpu"`: the target that was set, else the engine's device."""
    target = _TARGET.get()
    if target is not None:
        return target
    if keras.backend.backend() == "jax":
        import jax

        platform = jax.default_backend()
        return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    import tensorflow as tf

    kinds = {device.device_type for device in tf.config.list_logical_devices()}
    return "tpu" if "TPU" in kinds else "gpu" if "GPU" in kinds else "cpu"


def attend(query: Any, key: Any, value: Any, segment_ids: Any = None, window: int = 0) -> Any:
    """Returns causal attention over a row, within each of its segments.

    Args:
        query: `(batch, heads, seq, head_dim)`.
        key: `(batch, kv_heads, seq, head_dim)`; `kv_heads` divides `heads`.
        value: like `key`.
        segment_ids: `(batch, seq)` int32; tokens see only their own segment. None: one segment.
        window: how many tokens back a token sees, itself included; 0: all.

    Returns:
        `(batch, heads, seq, head_dim)`, in the dtype of `query`.
    """
    kind = choose(query.shape[2], query.shape[3]).kind
    query = query * ops.cast(query.shape[3] ** -0.5, query.dtype)
    if kind == "splash":
        from colabtpu.models import splash

        return splash.attend(query, key, value, segment_ids, window)
    if kind == "chunked":
        return attend_in_chunks(query, key, value, segment_ids, window)
    seen = visible(0, query.shape[2], 0, query.shape[2], segment_ids, window)
    return attend_where(query, key, value, seen)


def attend_where(query: Any, key: Any, value: Any, seen: Any) -> Any:
    """Returns attention over the keys that each query may see, all scores at once.

    Args:
        query: `(batch, heads, queries, head_dim)`, already scaled.
        key: `(batch, kv_heads, keys, head_dim)`.
        value: like `key`.
        seen: `(batch or 1, queries, keys)` bool.

    Returns:
        `(batch, heads, queries, head_dim)`, in the dtype of `query`. The softmax is float32.
    """
    grouped = _grouped(query, key.shape[1])
    scores = _float32("bngqd,bnkd->bngqk", grouped, key)
    weights = ops.softmax(ops.where(seen[:, None, None], scores, MASKED), axis=-1)
    out = ops.einsum("bngqk,bnkd->bngqd", ops.cast(weights, value.dtype), value)
    return _ungrouped(out)


def attend_in_chunks(
    query: Any, key: Any, value: Any, segment_ids: Any = None, window: int = 0, chunks: int = 0
) -> Any:
    """Returns what `attend` does, one block of queries at a time, over the keys it may see.

    Scores are not kept for the gradient but computed again from the log of each row's sum (Dao
    et al. 2022, FlashAttention, without its kernel). Blocks skip the keys that the mask hides,
    which halves the work of causal attention.

    Args:
        query: `(batch, heads, seq, head_dim)`, already scaled.
        key: `(batch, kv_heads, seq, head_dim)`.
        value: like `key`.
        segment_ids: `(batch, seq)` int32, or None.
        window: tokens back, or 0.
        chunks: blocks of queries, a divisor of `seq`; 0: as many as make sense.

    Returns:
        `(batch, heads, seq, head_dim)`, in the dtype of `query`.
    """
    seq_len = query.shape[2]
    size = seq_len // (chunks or _chunks(seq_len))
    blocks = [
        (start, start + size, max(0, start - window + 1) if window else 0)
        for start in range(0, seq_len, size)
    ]

    def scores(query: Any, key: Any, block: tuple[int, int, int]) -> Any:
        start, end, first = block
        raw = _float32("bngqd,bnkd->bngqk", query[..., start:end, :], key[:, :, first:end])
        seen = visible(start, end, first, end, segment_ids, window)
        return ops.where(seen[:, None, None], raw, MASKED)

    def forward(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
        outs, logs = [], []
        for block in blocks:
            raw = scores(query, key, block)
            top = ops.max(raw, axis=-1, keepdims=True)
            powers = ops.exp(raw - top)
            total = ops.sum(powers, axis=-1, keepdims=True)
            seen_values = value[:, :, block[2] : block[1]]
            mixed = _float32("bngqk,bnkd->bngqd", ops.cast(powers, value.dtype), seen_values)
            outs.append(ops.cast(mixed / total, query.dtype))
            logs.append(top + ops.log(total))
        out = _keep(ops.concatenate(outs, axis=3))
        log = _keep(ops.concatenate(logs, axis=3))

        def backward(*upstream: Any) -> tuple[Any, Any, Any]:
            up = upstream[-1]
            slope = ops.sum(
                ops.cast(up, "float32") * ops.cast(out, "float32"), axis=-1, keepdims=True
            )
            d_query, d_keys, d_values = [], [], []
            for block in blocks:
                start, end, first = block
                rows = (..., slice(start, end), slice(None))
                weights = ops.exp(scores(query, key, block) - log[rows])
                d_values.append(
                    _float32("bngqk,bngqd->bnkd", ops.cast(weights, up.dtype), up[rows])
                )
                d_weights = _float32("bngqd,bnkd->bngqk", up[rows], value[:, :, first:end])
                d_scores = ops.cast(weights * (d_weights - slope[rows]), key.dtype)
                d_query.append(ops.einsum("bngqk,bnkd->bngqd", d_scores, key[:, :, first:end]))
                d_keys.append(_float32("bngqk,bngqd->bnkd", d_scores, query[rows]))
            return (
                ops.concatenate(d_query, axis=3),
                ops.cast(_overlaid(d_keys, blocks, seq_len), key.dtype),
                ops.cast(_overlaid(d_values, blocks, seq_len), value.dtype),
            )

        return out, backward

    return _ungrouped(ops.custom_gradient(forward)(_grouped(query, key.shape[1]), key, value))


def visible(
    start: int, end: int, first: int, last: int, segment_ids: Any = None, window: int = 0
) -> Any:
    """Returns which keys `first..last` the queries `start..end` may see, `(batch or 1, q, k)`."""
    distance = np.arange(start, end)[:, None] - np.arange(first, last)[None]
    mask = distance >= 0
    if window:
        mask &= distance < window
    seen = ops.convert_to_tensor(mask)[None]
    if segment_ids is None:
        return seen
    same = ops.equal(segment_ids[:, start:end, None], segment_ids[:, None, first:last])
    return ops.logical_and(seen, same)


def rotate(x: Any, positions: Any, wavelength: float = 10_000.0) -> Any:
    """Returns `x` with each pair of features turned by its position (Su et al. 2021, RoFormer).

    Args:
        x: `(batch, heads, seq, head_dim)`; feature i pairs with feature i + head_dim / 2.
        positions: `(batch or 1, seq)` int32.
        wavelength: the longest wavelength is 2 pi times this.

    Returns:
        Like `x`. Angles are float32, since bfloat16 cannot tell position 257 from 258.
    """
    half = x.shape[-1] // 2
    frequencies = wavelength ** (-np.arange(half, dtype="float32") / half)
    angles = ops.cast(positions, "float32")[:, None, :, None] * frequencies.astype("float32")
    sine, cosine = ops.sin(angles), ops.cos(angles)
    first = ops.cast(x[..., :half], "float32")
    second = ops.cast(x[..., half:], "float32")
    turned = ops.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )
    return ops.cast(turned, x.dtype)


def _chunks(seq_len: int) -> int:
    """Blocks of 256 queries, at most 8 of them: each is one more copy of the code."""
    wanted = min(8, max(1, seq_len // 256))
    return next(n for n in range(wanted, 0, -1) if seq_len % n == 0)


def _overlaid(parts: list[Any], blocks: list[tuple[int, int, int]], seq_len: int) -> Any:
    """Sums gradients of key ranges `(batch, kv_heads, range, head_dim)` at their places."""
    total: Any = 0.0
    for part, (_, end, first) in zip(parts, blocks, strict=True):
        total = total + ops.pad(part, ((0, 0), (0, 0), (first, seq_len - end), (0, 0)))
    return total


def _grouped(query: Any, kv_heads: int) -> Any:
    batch, heads, seq_len, head_dim = query.shape
    batch = -1 if batch is None else batch
    return ops.reshape(query, (batch, kv_heads, heads // kv_heads, seq_len, head_dim))


def _ungrouped(out: Any) -> Any:
    batch, kv_heads, group, seq_len, head_dim = out.shape
    batch = -1 if batch is None else batch
    return ops.reshape(out, (batch, kv_heads * group, seq_len, head_dim))


def _float32(equation: str, left: Any, right: Any) -> Any:
    """Returns the product in float32; TensorFlow rounds it to the operands' dtype on the way."""
    if device_kind() == "cpu":  # has no bfloat16 products, or slow ones
        return ops.einsum(equation, ops.cast(left, "float32"), ops.cast(right, "float32"))
    if keras.backend.backend() == "jax":
        import jax.numpy as jnp

        return jnp.einsum(equation, left, right, preferred_element_type="float32")
    return ops.cast(ops.einsum(equation, left, right), "float32")


def _keep(x: Any) -> Any:
    """Names a tensor for the `"attention"` policy of rematerialisation, on JAX."""
    if keras.backend.backend() != "jax":
        return x
    from jax.ad_checkpoint import checkpoint_name

    return checkpoint_name(x, "attention")
