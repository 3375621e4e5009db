"""Identical decoder blocks with their weights stacked, so that one block is compiled, not all.

    transformer_lm(..., scan=True)         # model.blocks is then [BlockStack]

Under JAX the stack is a `lax.scan`: the program has the size of one block, however deep the
model, and compiles as fast. TensorFlow's loops keep every layer's weights alive for the gradient,
so there the blocks follow one another; weights and results are the same. Separate blocks (the
default) are easier for adapters, layer hooks and pipelines, which is why this is a choice.
"""

from dataclasses import asdict
from typing import Any

import keras
from keras import ops

from colabtpu.models.decoder import DecoderBlock, rematerialised
from colabtpu.models.spec import Spec


@keras.saving.register_keras_serializable("colabtpu")
class BlockStack(keras.layers.Layer):
    """All decoder blocks of a model.

    Args:
        spec: the model's numbers, as a `Spec` or its dict.
    """

    def __init__(self, spec: Spec | dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.spec = spec if isinstance(spec, Spec) else Spec(**spec)
        # Past Keras' attribute tracking: the template has the block's code, not its weights.
        self.__dict__["_template"] = DecoderBlock(self.spec, dtype=self.dtype_policy, name="block")

    def build(self, hidden_shape: Any, *_: Any) -> None:
        self._template.build(hidden_shape)
        self.stacked = [
            self.add_weight(
                shape=(self.spec.layers, *variable.shape),
                initializer=initializer,
                name="_".join(variable.path.split("/")[-2:]),
            )
            for variable, initializer in self._template.initializers()
        ]

    def call(self, hidden: Any, segment_ids: Any = None, positions: Any = None) -> Any:
        def run(hidden: Any, *weights: Any) -> Any:
            with self._holding(weights):
                return self._template.run(hidden, segment_ids, positions)

        again = rematerialised(run, self.spec.remat)

        def block(hidden: Any, weights: Any) -> tuple[Any, None]:
            return again(hidden, *weights), None

        return _scan(block, hidden, self._values(), self.spec.layers)[0]

    def decode(self, hidden: Any, cache: tuple[Any, Any], position: Any) -> tuple[Any, Any]:
        """Returns the blocks' output for one new token, and the cache with it.

        Args:
            hidden: `(batch, 1, dim)`, the new token.
            cache: keys and values, each `(layers, batch, kv_heads, seq, head_dim)`.
            position: int32 scalar, where the token stands.

        Returns:
            `(batch, 1, dim)` and the new cache.
        """

        def block(hidden: Any, slices: Any) -> tuple[Any, Any]:
            *weights, keys, values = slices
            with self._holding(weights):
                return self._template.decode(hidden, (keys, values), position)

        return _scan(block, hidden, [*self._values(), *cache], self.spec.layers)

    def empty_cache(self, batch: int, dtype: str) -> tuple[Any, Any]:
        """Returns keys and values of no token, for `decode`."""
        shape = (self.spec.layers, *self._template.cache_shape(batch))
        return ops.zeros(shape, dtype), ops.zeros(shape, dtype)

    def compute_output_spec(self, hidden: Any, *_: Any, **__: Any) -> Any:
        return keras.KerasTensor(hidden.shape, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "spec": asdict(self.spec)}

    def _values(self) -> list[Any]:
        return [ops.convert_to_tensor(weight) for weight in self.stacked]

    def _holding(self, weights: Any) -> Any:
        return keras.StatelessScope(
            state_mapping=list(zip(self._template.weights, weights, strict=True))
        )


def _scan(block: Any, hidden: Any, stacked: list[Any], layers: int) -> tuple[Any, Any]:
    """Runs `block(hidden, slices) -> (hidden, extra)` layer by layer; stacks the extras."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.lax.scan(block, hidden, stacked)
    # Unstacked at once: the gradient of `unstack` is one `stack`, that of slices one sum each.
    slices = [ops.unstack(values, layers, axis=0) for values in stacked]
    extras = []
    for layer in range(layers):
        hidden, extra = block(hidden, [values[layer] for values in slices])
        extras.append(extra)
    if extras[0] is None:
        return hidden, None
    return hidden, tuple(ops.stack(parts) for parts in zip(*extras, strict=True))
