"""Splash attention: JAX's flash attention kernel for TPUs, with masks it never has to read.

    out = attend(query, key, value, segment_ids, window)     # (batch, heads, seq, head_dim)

Imported only under JAX, and used through `attention.attend`. The causal and the local mask are
given as rules, so that the kernel skips blocks that are hidden and computes the mask of the
rest. A kernel is not split over devices by the compiler, so under a `keras.distribution` each
device runs it on its share of the batch, and of the heads where a mesh has a "model" axis.
"""

from collections.abc import Callable
from typing import Any

import jax
import keras
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec


def attend(
    query: Any, key: Any, value: Any, segment_ids: Any = None, window: int = 0,
    interpret: bool = False,
) -> Any:  # fmt: skip
    """Returns causal attention by the kernel.

    Args:
        query: `(batch, heads, seq, head_dim)`, already scaled; `seq` a multiple of 128.
        key: `(batch, kv_heads, seq, head_dim)`.
        value: like `key`.
        segment_ids: `(batch, seq)` int32, or None.
        window: tokens back, or 0 for all.
        interpret: run the kernel's steps on any device, slowly, to test it.

    Returns:
        `(batch, heads, seq, head_dim)`, in the dtype of `query`.
    """

    def run(query: Any, key: Any, value: Any, *segments: Any) -> Any:
        kernel = _kernel(query.shape[1], query.shape[2], window, interpret)
        if not segments:
            return jax.vmap(kernel)(query, key, value)
        ids = kernels.SegmentIds(q=segments[0], kv=segments[0])
        return jax.vmap(kernel)(query, key, value, ids)

    inputs = (query, key, value) if segment_ids is None else (query, key, value, segment_ids)
    return _on_each_device(run, key.shape[1])(*inputs)


def _kernel(heads: int, seq_len: int, window: int, interpret: bool) -> Any:
    block = next(b for b in (512, 256, 128) if seq_len % b == 0)
    # One backward kernel instead of two, unless its partial sums, one for each block of keys,
    # would cost more than it saves.
    fused = seq_len // block <= 4
    separate = None if fused else block
    sizes = kernels.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block,
        block_q_dq=separate, block_kv_dq=separate, use_fused_bwd_kernel=fused,
    )  # fmt: skip
    shape = (seq_len, seq_len)
    rule = masks.LocalMask(shape, (window - 1, 0), 0) if window else masks.CausalMask(shape)
    return kernels.make_splash_mha(
        masks.MultiHeadMask([rule] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="attention",
        interpret=interpret,
    )


def _on_each_device(run: Callable[..., Any], kv_heads: int) -> Callable[..., Any]:
    distribution = keras.distribution.distribution()
    if distribution is None or distribution.device_mesh.devices.size == 1:
        return run
    mesh = distribution.device_mesh.backend_mesh
    model = mesh.shape.get("model", 1)
    heads = "model" if model > 1 and kv_heads % model == 0 else None
    rows = PartitionSpec(distribution.batch_dim_name, heads, None, None)
    ids = PartitionSpec(distribution.batch_dim_name, None)

    def on_each(*inputs: Any) -> Any:
        specs = (rows, rows, rows, ids)[: len(inputs)]
        return jax.shard_map(
            run, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False
        )(*inputs)  # fmt: skip

    return on_each
