"""A causal transformer language model in Keras 3, one definition for both engines.

    model = transformer_lm(vocab_size=8192, seq_len=512, layers=6, dim=512)
    model(tokens)                          # (batch, seq) int32 -> (batch, seq, vocabulary) float32
    model.save("model.keras")              # and keras.saving.load_model("model.keras")

The layers are plain Keras (`decoder.py`), so LoRA, layouts and layer hooks find them by name.

The model returns logits, as any Keras model would. `losses.next_token` does not read them where
it can avoid it: it asks `embedding.hidden_behind(logits)` for the hidden states they were made
of and works in chunks; the compiler then drops the logits, which nothing else uses. So user
code, foreign losses and foreign metrics see an ordinary model, and nobody pays for the logits
unless somebody reads them.
"""

from dataclasses import asdict
from typing import Any

import keras
from keras import ops

from colabtpu.models import attention
from colabtpu.models.decoder import DecoderBlock, norm_layer
from colabtpu.models.spec import Spec, named_spec
from colabtpu.models.stack import BlockStack

_PACKAGE = "colabtpu"


def transformer_lm(
    vocab_size: int,
    seq_len: int,
    layers: int = 6,
    dim: int = 512,
    heads: int | None = None,
    *,
    dtype: Any = None,
    name: str = "transformer_lm",
    **options: Any,
) -> "LanguageModel":
    """Builds a causal transformer language model.

    Args:
        vocab_size: tokens that the tokenizer knows.
        seq_len: tokens in a row; shapes are static, so it is the only length the model takes.
        layers: decoder blocks.
        dim: width of the residual stream; multiples of 128 (256 on v6e) fill the matrix unit.
        heads: query heads; None makes them 128 wide where `dim` holds four such heads.
        dtype: a Keras dtype policy. None: the global policy if it was set to anything but
            float32, else `"mixed_bfloat16"` on a TPU or GPU and `"float32"` on a CPU, where
            bfloat16 is emulated and slow.
        name: the Keras name of the model.
        **options: any other attribute of `Spec`: `kv_heads`, `mlp_dim`, `positions`, `norm`,
            `tied`, `vocab_multiple`, `packed`, `window`, `remat`, `scan`.

    Returns:
        A `LanguageModel`: tokens `(batch, seq)` int32 to logits `(batch, seq, padded
        vocabulary)` float32. With `packed=True` it takes a dict of `tokens`, `segment_ids`
        and `positions`, each `(batch, seq)` int32: attention stays within a segment.

    Raises:
        InvalidArgumentError: a value that cannot work.
    """
    spec = Spec(vocab_size, seq_len, layers, dim, heads or 0, **options)
    return LanguageModel(spec, dtype=dtype, name=name)


def named(name: str, *, dtype: Any = None, **changes: Any) -> "LanguageModel":
    """Builds a known model, such as `"gpt2-small"`, with random weights.

    Args:
        name: `"gpt2-small"`, `"gpt2-medium"`, `"160m"` or `"tiny"`.
        dtype: as in `transformer_lm`.
        **changes: attributes of `Spec` to change, such as `seq_len=2048`.

    Returns:
        The `LanguageModel`.

    Raises:
        InvalidArgumentError: no such name, or no such attribute.
    """
    spec = named_spec(name, **changes)
    return LanguageModel(spec, dtype=dtype, name=name.replace("-", "_"))


def default_dtype() -> str:
    """Returns the dtype policy that a model gets when none is asked for."""
    policy = keras.config.dtype_policy().name
    if policy != "float32":
        return policy
    return "float32" if attention.device_kind() == "cpu" else "mixed_bfloat16"


@keras.saving.register_keras_serializable(_PACKAGE)
class LanguageModel(keras.Model):
    """The model that `transformer_lm` builds.

    Attributes:
        spec: the `Spec` it was built from.
        embedding: the `TokenEmbedding`, which is also the head.
        blocks: the `DecoderBlock`s, first to last; with `scan=True` one `BlockStack`.
    """

    def __init__(self, spec: Spec, dtype: Any = None, **kwargs: Any) -> None:
        policy = keras.dtype_policies.get(default_dtype() if dtype is None else dtype)
        embedding = TokenEmbedding(
            spec.vocab_size, spec.padded_vocab_size, spec.dim, spec.tied,
            dtype=policy, name="embedding",
        )  # fmt: skip
        blocks: list[Any] = (
            [BlockStack(spec, dtype=policy, name="blocks")]
            if spec.scan
            else [DecoderBlock(spec, dtype=policy, name=f"block_{i}") for i in range(spec.layers)]
        )
        norm = norm_layer(spec, policy, "final_norm")
        inputs = _inputs(spec)
        tokens, segment_ids, positions = _unpack(inputs)
        hidden = embedding(tokens)
        position_table = None
        if spec.positions == "learned":
            position_table = PositionTable(spec, dtype=policy, name="position_embedding")
            hidden = position_table(hidden, positions)
        for block in blocks:
            hidden = block(hidden, segment_ids, positions)
        logits = embedding(norm(hidden), reverse=True)
        super().__init__(inputs=inputs, outputs=logits, **kwargs)
        self.dtype_policy = policy
        self.spec = spec
        self.embedding = embedding
        self.position_table = position_table
        self.blocks = blocks
        self.final_norm = norm

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Computes the compiled loss, after showing it the head and the metrics it feeds."""
        bind = getattr(self.loss, "bind", None)
        if bind is not None:
            bind(self, training)
        return super().compute_loss(x, y, y_pred, sample_weight, training)

    def get_config(self) -> dict[str, Any]:
        policy = keras.dtype_policies.serialize(self.dtype_policy)
        return {**asdict(self.spec), "dtype": policy, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "LanguageModel":
        config = dict(config)
        dtype = keras.dtype_policies.deserialize(config.pop("dtype"))
        config.pop("trainable", None)
        name = config.pop("name")
        return cls(Spec(**config), dtype=dtype, name=name)


@keras.saving.register_keras_serializable(_PACKAGE)
class TokenEmbedding(keras.layers.ReversibleEmbedding):
    """Token vectors, and with `reverse=True` the logits of a masked, padded vocabulary.

    Args:
        vocab_size: logits that count.
        padded_vocab_size: rows of the table; logits from `vocab_size` on are masked.
        dim: width of a vector.
        tied: whether the head shares the table.
    """

    def __init__(
        self, vocab_size: int, padded_vocab_size: int, dim: int, tied: bool = True, **kwargs: Any
    ) -> None:
        kwargs.setdefault("embeddings_initializer", keras.initializers.RandomNormal(stddev=0.02))
        super().__init__(padded_vocab_size, dim, tie_weights=tied, **kwargs)
        self.vocab_size = vocab_size
        self.__dict__["_latest"] = (None, None)

    def call(self, inputs: Any, reverse: bool = False) -> Any:
        if not reverse:
            return super().call(inputs)
        logits = self.mask_padding(ops.cast(super().call(inputs, reverse=True), "float32"))
        # Past Keras' attribute tracking: this is a note about one trace, not state to save.
        self.__dict__["_latest"] = (logits, inputs)
        return logits

    def compute_output_spec(self, inputs: Any, reverse: bool = False) -> Any:
        output = super().compute_output_spec(inputs, reverse=reverse)
        return keras.KerasTensor(output.shape, "float32") if reverse else output

    def hidden_behind(self, logits: Any) -> Any:
        """Returns the hidden states that `logits` were computed from, or None.

        Args:
            logits: the very tensor that the latest `reverse=True` call returned.

        Returns:
            `(batch, seq, dim)` of the same trace; None for any other tensor.
        """
        latest, hidden = self.__dict__["_latest"]
        self.__dict__["_latest"] = (None, None)
        return hidden if latest is logits else None

    @property
    def kernel(self) -> Any:
        """The head's weights: `(vocabulary, dim)` where tied, else `(dim, vocabulary)`."""
        return self.embeddings if self.tie_weights else self.reverse_embeddings

    def mask_padding(self, logits: Any) -> Any:
        """Returns float32 logits `(..., padded vocabulary)` with those of no token made tiny."""
        if self.vocab_size == self.input_dim:
            return logits
        return ops.where(ops.arange(self.input_dim) < self.vocab_size, logits, attention.MASKED)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        for inherited in ("input_dim", "output_dim", "tie_weights", "mask_zero"):
            config.pop(inherited, None)
        return {
            **config,
            "vocab_size": self.vocab_size,
            "padded_vocab_size": self.input_dim,
            "dim": self.output_dim,
            "tied": self.tie_weights,
        }


@keras.saving.register_keras_serializable(_PACKAGE)
class PositionTable(keras.layers.Layer):
    """Adds a learned vector for each position (Radford et al. 2019)."""

    def __init__(self, spec: Spec | dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.spec = spec if isinstance(spec, Spec) else Spec(**spec)

    def build(self, *_: Any) -> None:
        self.embeddings = self.add_weight(
            shape=(self.spec.seq_len, self.spec.dim),
            initializer=keras.initializers.RandomNormal(stddev=0.02),
            name="embeddings",
        )

    def call(self, hidden: Any, positions: Any = None) -> Any:
        table = ops.convert_to_tensor(self.embeddings)
        vectors = table if positions is None else ops.take(table, positions, axis=0)
        return hidden + ops.cast(vectors, hidden.dtype)

    def compute_output_spec(self, hidden: Any, positions: Any = None) -> Any:
        return keras.KerasTensor(hidden.shape, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "spec": asdict(self.spec)}


def _inputs(spec: Spec) -> Any:
    def row(name: str) -> Any:
        return keras.Input((spec.seq_len,), dtype="int32", name=name)

    if spec.packed:
        return {name: row(name) for name in ("tokens", "segment_ids", "positions")}
    return row("tokens")


def _unpack(inputs: Any) -> tuple[Any, Any, Any]:
    if isinstance(inputs, dict):
        return inputs["tokens"], inputs["segment_ids"], inputs["positions"]
    return inputs, None, None
