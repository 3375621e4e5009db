"""One decoder block: what a language model repeats.

    block = DecoderBlock(spec)
    hidden = block(hidden, segment_ids, positions)           # (batch, seq, dim)
    token, cache = block.decode(token, cache, position)      # one new token

Pre-norm, without biases: attention and a GELU feed-forward part, each added to the residual
stream.
"""

from dataclasses import asdict
from typing import Any

import keras
from keras import ops

from colabtpu.models import attention
from colabtpu.models.spec import Spec


@keras.saving.register_keras_serializable("colabtpu")
class DecoderBlock(keras.layers.Layer):
    """One pre-norm decoder block: causal attention, then a GELU feed-forward part.

    Args:
        spec: the model's numbers, as a `Spec` or its dict.
    """

    def __init__(self, spec: Spec | dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.spec = spec = spec if isinstance(spec, Spec) else Spec(**spec)
        # GPT-2's scaling: what is added to the residual stream starts smaller in deep models.
        residual = 0.02 * (2 * spec.layers) ** -0.5
        self.attention_norm = self._norm("attention_norm")
        self.query = self._heads("query", spec.heads)
        self.key = self._heads("key", spec.kv_heads)
        self.value = self._heads("value", spec.kv_heads)
        self.attention_output = keras.layers.EinsumDense(
            "bhtk,hkd->btd", (None, spec.dim), kernel_initializer=_normal(residual),
            dtype=self.dtype_policy, name="attention_output",
        )  # fmt: skip
        self.mlp_norm = self._norm("mlp_norm")
        self.mlp_up = self._dense("mlp_up", spec.mlp_dim, 0.02)
        self.mlp_down = self._dense("mlp_down", spec.dim, residual)

    def build(self, hidden_shape: Any, *_: Any) -> None:
        spec = self.spec
        shape = (None, spec.seq_len, spec.dim)
        for layer in (self.attention_norm, self.query, self.key, self.value, self.mlp_norm):
            layer.build(shape)
        self.attention_output.build((None, spec.heads, spec.seq_len, spec.head_dim))
        self.mlp_up.build(shape)
        self.mlp_down.build((None, spec.seq_len, spec.mlp_dim))

    def call(self, hidden: Any, segment_ids: Any = None, positions: Any = None) -> Any:
        def run(hidden: Any) -> Any:
            return self.run(hidden, segment_ids, positions)

        return rematerialised(run, self.spec.remat)(hidden)

    def run(self, hidden: Any, segment_ids: Any = None, positions: Any = None) -> Any:
        """Returns what `call` does, with nothing computed again for the gradient."""
        if positions is None:
            positions = ops.arange(self.spec.seq_len, dtype="int32")[None]
        query, key, value = self._project(hidden, positions)
        mixed = attention.attend(query, key, value, segment_ids, self.spec.window)
        return self._finish(hidden, mixed)

    def decode(self, hidden: Any, cache: tuple[Any, Any], position: Any) -> tuple[Any, Any]:
        """Returns the block's output for one new token, and the cache with it.

        Args:
            hidden: `(batch, 1, dim)`, the new token.
            cache: keys and values, each `(batch, kv_heads, seq, head_dim)`.
            position: int32 scalar, where the token stands.

        Returns:
            `(batch, 1, dim)` and the new cache.
        """
        query, key, value = self._project(hidden, ops.reshape(position, (1, 1)))
        start = (0, 0, position, 0)
        keys = ops.slice_update(cache[0], start, key)
        values = ops.slice_update(cache[1], start, value)
        distance = position - ops.arange(self.spec.seq_len, dtype="int32")
        seen = distance >= 0
        if self.spec.window:
            seen = ops.logical_and(seen, distance < self.spec.window)
        query = query * ops.cast(self.spec.head_dim**-0.5, query.dtype)
        mixed = attention.attend_where(query, keys, values, seen[None, None])
        return self._finish(hidden, mixed), (keys, values)

    def cache_shape(self, batch: int) -> tuple[int, int, int, int]:
        """Returns the shape of a cache of keys, and of values."""
        return (batch, self.spec.kv_heads, self.spec.seq_len, self.spec.head_dim)

    def empty_cache(self, batch: int, dtype: str) -> tuple[Any, Any]:
        """Returns keys and values of no token, for `decode`."""
        shape = self.cache_shape(batch)
        return ops.zeros(shape, dtype), ops.zeros(shape, dtype)

    def initializers(self) -> list[tuple[Any, Any]]:
        """Returns each weight with its initializer, in the order of `weights`."""
        kinds = {id(layer.kernel): layer.kernel_initializer for layer in self._matrices()}
        plain = {"scale": "ones", "gamma": "ones", "beta": "zeros"}
        return [(w, kinds.get(id(w)) or plain[w.name]) for w in self.weights]

    def compute_output_spec(self, hidden: Any, *_: Any, **__: Any) -> Any:
        return keras.KerasTensor(hidden.shape, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "spec": asdict(self.spec)}

    def _matrices(self) -> tuple[Any, ...]:
        return (self.query, self.key, self.value, self.attention_output, self.mlp_up, self.mlp_down)

    def _project(self, hidden: Any, positions: Any) -> tuple[Any, Any, Any]:
        normed = self.attention_norm(hidden)
        query, key, value = self.query(normed), self.key(normed), self.value(normed)
        if self.spec.positions == "rotary":
            query = attention.rotate(query, positions)
            key = attention.rotate(key, positions)
        return query, key, value

    def _finish(self, hidden: Any, mixed: Any) -> Any:
        hidden = hidden + self.attention_output(mixed)
        inner = ops.gelu(self.mlp_up(self.mlp_norm(hidden)), approximate=True)
        return hidden + self.mlp_down(inner)

    def _norm(self, name: str) -> Any:
        return norm_layer(self.spec, self.dtype_policy, name)

    def _heads(self, name: str, heads: int) -> Any:
        return keras.layers.EinsumDense(
            "btd,dhk->bhtk", (heads, None, self.spec.head_dim), kernel_initializer=_normal(0.02),
            dtype=self.dtype_policy, name=name,
        )  # fmt: skip

    def _dense(self, name: str, width: int, stddev: float) -> Any:
        return keras.layers.Dense(
            width, use_bias=False, kernel_initializer=_normal(stddev),
            dtype=self.dtype_policy, name=name,
        )  # fmt: skip


def rematerialised(run: Any, policy: str) -> Any:
    """Returns `run` such that its gradient computes again what the policy does not keep.

    Args:
        run: a function of tensors. On TensorFlow its gradient reaches its arguments and the
            variables it reads, but no tensor that it closes over.
        policy: `Spec.remat`.
    """
    if policy == "none":
        return run
    if keras.backend.backend() == "tensorflow":
        return keras.remat(run)
    import jax

    policies = jax.checkpoint_policies
    kept = {
        "full": None,
        "attention": policies.save_only_these_names("attention"),
        "dots": policies.dots_with_no_batch_dims_saveable,
    }
    return jax.checkpoint(run, policy=kept[policy])


def norm_layer(spec: Spec, policy: Any, name: str) -> Any:
    """Returns the kind of normalisation that `spec` asks for."""
    kind = keras.layers.RMSNormalization if spec.norm == "rms" else keras.layers.LayerNormalization
    return kind(epsilon=1e-5, dtype=policy, name=name)


def _normal(stddev: float) -> Any:
    return keras.initializers.RandomNormal(stddev=stddev)
