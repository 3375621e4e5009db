"""Causal self-attention and rotary positions, on either engine.

    out = attend(query, key, value)                       # (batch, seq, heads, head_dim)
    with target_device("tpu"):                            # what a compiler without a TPU sets
        choose(seq_len=2048, head_dim=128)

Grouped queries: `key` and `value` may have fewer heads than `query`.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

_TARGET: contextvars.ContextVar[str | None] = contextvars.ContextVar("target", default=None)

# Low enough to vanish in a softmax, and still a finite bfloat16: minus infinity would turn a
# row without any visible token into NaN.
MASKED = -1e30


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


def attend(query: Any, key: Any, value: Any, segment_ids: Any = None) -> Any:
    """Returns causal attention over one row, within each of its segments.

    Args:
        query: `(batch, seq, heads, head_dim)`.
        key: `(batch, seq, kv_heads, head_dim)`; `kv_heads` divides `heads`.
        value: like `key`.
        segment_ids: `(batch, seq)` int32; tokens see only their own segment. None: one segment.

    Returns:
        `(batch, seq, heads, head_dim)`, in the dtype of `query`.
    """
    seq_len = query.shape[1]
    visible = ops.convert_to_tensor(np.tri(seq_len, dtype=bool))[None]
    if segment_ids is not None:
        visible = ops.logical_and(
            visible, ops.equal(segment_ids[:, :, None], segment_ids[:, None, :])
        )
    return attend_where(query, key, value, visible)


def attend_where(query: Any, key: Any, value: Any, visible: Any) -> Any:
    """Returns attention over the keys that each query may see.

    Args:
        query: `(batch, queries, heads, head_dim)`.
        key: `(batch, keys, kv_heads, head_dim)`.
        value: like `key`.
        visible: `(batch or 1, queries, keys)` bool.

    Returns:
        `(batch, queries, heads, head_dim)`, in the dtype of `query`. The softmax is float32.
    """
    batch, queries, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    batch = -1 if batch is None else batch
    query = query * ops.cast(head_dim**-0.5, query.dtype)
    grouped = ops.reshape(query, (batch, queries, kv_heads, heads // kv_heads, head_dim))
    scores = ops.cast(ops.einsum("bqngd,bknd->bngqk", grouped, key), "float32")
    scores = ops.where(visible[:, None, None], scores, MASKED)
    weights = ops.cast(ops.softmax(scores, axis=-1), query.dtype)
    out = ops.einsum("bngqk,bknd->bqngd", weights, value)
    return ops.reshape(out, (batch, queries, heads, head_dim))


def rotate(x: Any, positions: Any, wavelength: float = 10_000.0) -> Any:
    """Returns `x` with each pair of features turned by its position (Su et al. 2021, RoFormer).

    Args:
        x: `(batch, seq, heads, head_dim)`; feature i pairs with feature i + head_dim / 2.
        positions: `(batch or 1, seq)` int32.
        wavelength: the longest wavelength is 2 pi times this.

    Returns:
        Like `x`. Angles are float32, since bfloat16 cannot tell position 257 from 258.
    """
    half = x.shape[-1] // 2
    frequencies = wavelength ** (-np.arange(half, dtype="float32") / half)
    angles = ops.cast(positions, "float32")[:, :, None, None] * frequencies.astype("float32")
    sine, cosine = ops.sin(angles), ops.cos(angles)
    first = ops.cast(x[..., :half], "float32")
    second = ops.cast(x[..., half:], "float32")
    turned = ops.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )
    return ops.cast(turned, x.dtype)
