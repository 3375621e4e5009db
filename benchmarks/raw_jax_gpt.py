"""The yardstick: a GPT training step in plain JAX, as a careful person would write it by hand.

    step, state = train_step(spec, remat=False, chunks=8), shapes(spec)
    jax.jit(step, donate_argnums=0).lower(state, tokens, labels)

Splash attention, cross-entropy in chunks that are computed again for the gradient, bfloat16
products with float32 weights, AdamW. No Keras, nothing of colabtpu but the model's numbers, so
that it measures what Keras and we add.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from colabtpu.models.spec import Spec

Tree = dict[str, Any]


def shapes(spec: Spec) -> Tree:
    """Returns the shapes of weights, both AdamW moments and the step count.

    Args:
        spec: the model's numbers.

    Returns:
        A tree of `jax.ShapeDtypeStruct`.
    """
    weights = jax.eval_shape(functools.partial(weights_of, spec), jax.random.key(0))
    return {
        "weights": weights,
        "first": weights,
        "second": weights,
        "count": jax.ShapeDtypeStruct((), "int32"),
    }


def weights_of(spec: Spec, key: Any) -> Tree:
    """Returns random float32 weights."""
    d, h, k, f = spec.dim, spec.heads, spec.head_dim, spec.mlp_dim

    def normal(*shape: int) -> Any:
        return 0.02 * jax.random.normal(key, shape)

    def norm() -> Tree:
        return {"scale": jnp.ones(d)} | ({"bias": jnp.zeros(d)} if spec.norm == "layer" else {})

    def block() -> Tree:
        return {
            "norm1": norm(), "query": normal(d, h, k), "key": normal(d, h, k),
            "value": normal(d, h, k), "out": normal(h, k, d),
            "norm2": norm(), "up": normal(d, f), "down": normal(f, d),
        }  # fmt: skip

    tree = {"table": normal(spec.padded_vocab_size, d), "final": norm()}
    if spec.positions == "learned":
        tree["positions"] = normal(spec.seq_len, d)
    return tree | {"blocks": [block() for _ in range(spec.layers)]}


def train_step(spec: Spec, remat: bool = False, chunks: int = 8, interpret: bool = False) -> Any:
    """Returns `step(state, tokens, labels) -> (state, loss)`.

    Args:
        spec: the model's numbers.
        remat: whether each block is computed again for its gradient.
        chunks: of the cross-entropy, along the sequence.
        interpret: run splash attention anywhere, slowly.
    """
    attend = _splash(spec, interpret)

    def block(x: Any, w: Tree) -> Any:
        w = _bfloat16(w)
        h = _norm(x, w["norm1"])
        q, k, v = (jnp.einsum("btd,dhk->bhtk", h, w[n]) for n in ("query", "key", "value"))
        if spec.positions == "rotary":
            q, k = _rotate(q), _rotate(k)
        x = x + jnp.einsum("bhtk,hkd->btd", attend(q, k, v), w["out"])
        return x + jax.nn.gelu(_norm(x, w["norm2"]) @ w["up"]) @ w["down"]

    def loss(weights: Tree, tokens: Any, labels: Any) -> Any:
        x = weights["table"].astype(jnp.bfloat16)[tokens]
        if spec.positions == "learned":
            x = x + weights["positions"].astype(jnp.bfloat16)
        for w in weights["blocks"]:
            x = (jax.checkpoint(block) if remat else block)(x, w)
        return _cross_entropy(_norm(x, weights["final"]), weights["table"], labels, chunks, spec)

    def step(state: Tree, tokens: Any, labels: Any) -> tuple[Tree, Any]:
        value, gradient = jax.value_and_grad(loss)(state["weights"], tokens, labels)
        return _adamw(state, gradient), value

    return step


def _splash(spec: Spec, interpret: bool) -> Any:
    size = min(spec.seq_len, 512)
    fused = spec.seq_len <= 2048  # beyond, the fused kernel's partial sums cost more than it saves
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((spec.seq_len, spec.seq_len))] * spec.heads),
        block_sizes=splash.BlockSizes(
            block_q=size, block_kv=size, block_q_dkv=size, block_kv_dkv=size,
            block_q_dq=None if fused else size, block_kv_dq=None if fused else size,
            use_fused_bwd_kernel=fused,
        ),
        head_shards=1, q_seq_shards=1, interpret=interpret,
    )  # fmt: skip
    return lambda q, k, v: jax.vmap(kernel)(q * spec.head_dim**-0.5, k, v)


def _cross_entropy(x: Any, table: Any, labels: Any, chunks: int, spec: Spec) -> Any:
    def chunk(total: Any, pair: Any) -> tuple[Any, None]:
        rows, goals = pair
        logits = jnp.einsum("btd,vd->btv", rows, narrow, preferred_element_type="float32")
        logits = jnp.where(jnp.arange(logits.shape[-1]) < spec.vocab_size, logits, -1e30)
        is_goal = jnp.arange(logits.shape[-1]) == goals[..., None]  # a gather compiles slowly
        goal = jnp.sum(jnp.where(is_goal, logits, 0.0), axis=-1)
        return total + jnp.sum(jax.nn.logsumexp(logits, axis=-1) - goal), None

    narrow = table.astype(jnp.bfloat16)
    batch, seq_len = labels.shape
    rows = x.reshape(batch, chunks, seq_len // chunks, -1).swapaxes(0, 1)
    goals = labels.reshape(batch, chunks, seq_len // chunks).swapaxes(0, 1)
    total, _ = jax.lax.scan(jax.checkpoint(chunk), 0.0, (rows, goals))
    return total / labels.size


def _norm(x: Any, w: Tree) -> Any:
    y = x.astype(jnp.float32)
    if "bias" in w:
        y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5) * w["scale"]
    return (y + w["bias"] if "bias" in w else y).astype(jnp.bfloat16)


def _rotate(x: Any) -> Any:
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[2])[:, None] * frequencies
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _bfloat16(tree: Tree) -> Tree:
    """Casts the matrices; the scales of norms stay float32."""
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16) if w.ndim > 1 else w, tree)


def _adamw(
    state: Tree, gradient: Tree, rate: float = 3e-4, decay: float = 0.004, tiny: float = 1e-7
) -> Tree:
    count = state["count"] + 1
    first = jax.tree.map(lambda m, g: m + (g - m) * 0.1, state["first"], gradient)
    second = jax.tree.map(lambda v, g: v + (g * g - v) * 0.001, state["second"], gradient)
    scale = rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)

    def update(w: Any, m: Any, v: Any) -> Any:
        return w - rate * decay * w - scale * m / (jnp.sqrt(v) + tiny)

    weights = jax.tree.map(update, state["weights"], first, second)
    return {"weights": weights, "first": first, "second": second, "count": count}
