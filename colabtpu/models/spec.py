"""The numbers that define a language model, and what follows from them: parameters, FLOPs.

    spec = named_spec("gpt2-small")
    spec.parameters                          # 124,373,760, counted by hand, no model built
    flops_per_token(spec)                    # 6 N + 12 L H Q T

Imports no framework, so that preflight and monitoring can reckon before any is loaded.
"""

from dataclasses import dataclass
from typing import Any

from colabtpu.errors import InvalidArgumentError


@dataclass(frozen=True)
class Spec:
    """What a causal transformer language model is made of.

    Attributes:
        vocab_size: tokens that the tokenizer knows.
        seq_len: tokens in a row; the only length the model takes.
        layers: decoder blocks.
        dim: width of the residual stream.
        heads: query heads; 0 lets `head_dim` be 128, the width of the matrix unit.
        kv_heads: key and value heads, a divisor of `heads`; 0 means as many as `heads`.
        mlp_dim: inner width of the feed-forward part; 0 means 4 x `dim`.
        positions: `"rotary"` or `"learned"`.
        norm: `"rms"` or `"layer"`.
        tied: whether the output head is the embedding table.
        vocab_multiple: the table is padded to a multiple of this (128; 256 on v6e), because
            the matrix unit pads to it anyway. The extra logits are masked.
        packed: whether rows hold several documents, told apart by `segment_ids`.
        window: how many tokens back a token sees, itself included; 0: all.
        remat: what a block computes again for its gradient instead of keeping it. `"none"`:
            nothing; `"full"`: everything but the block's input; `"attention"`: all but the
            attention's output; `"dots"`: all but the matrix products. TensorFlow has no such
            choice: there the last two act as `"full"`.
        scan: whether the blocks' weights are stacked, so that one block is compiled, not all.
    """

    vocab_size: int
    seq_len: int
    layers: int = 6
    dim: int = 512
    heads: int = 0
    kv_heads: int = 0
    mlp_dim: int = 0
    positions: str = "rotary"
    norm: str = "rms"
    tied: bool = True
    vocab_multiple: int = 128
    packed: bool = False
    window: int = 0
    remat: str = "none"
    scan: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "seq_len", "layers", "dim", "vocab_multiple"):
            _require_positive(name, getattr(self, name))
        heads = self.heads or default_heads(self.dim)
        object.__setattr__(self, "heads", heads)
        object.__setattr__(self, "kv_heads", self.kv_heads or heads)
        object.__setattr__(self, "mlp_dim", self.mlp_dim or 4 * self.dim)
        _require_choice("positions", self.positions, ("rotary", "learned"))
        _require_choice("norm", self.norm, ("rms", "layer"))
        _require_choice("remat", self.remat, ("none", "full", "attention", "dots"))
        _require_divisor("heads", heads, "dim", self.dim)
        _require_divisor("kv_heads", self.kv_heads, "heads", heads)
        if self.positions == "rotary" and self.head_dim % 2:
            raise InvalidArgumentError(
                f"Rotary positions turn pairs, so `dim / heads` must be even. "
                f"Received: dim={self.dim}, heads={heads}, head_dim={self.head_dim}",
                f"Pass heads={default_heads(self.dim)}, or positions='learned'.",
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table, and logits of the head."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def block_parameters(self) -> int:
        """Weights of one decoder block."""
        attention = self.dim * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + 2 * self.dim * self.mlp_dim + 2 * self._norm_parameters

    @property
    def parameters(self) -> int:
        """All weights, embedding tables and padding rows included."""
        tables = self.padded_vocab_size * self.dim * (1 if self.tied else 2)
        positions = self.seq_len * self.dim if self.positions == "learned" else 0
        return tables + positions + self.layers * self.block_parameters + self._norm_parameters

    @property
    def non_embedding_parameters(self) -> int:
        """All weights but the token and position tables and the head."""
        return self.layers * self.block_parameters + self._norm_parameters

    @property
    def _norm_parameters(self) -> int:
        return self.dim * (2 if self.norm == "layer" else 1)


# gpt2-small: Radford et al. 2019, without the biases of its dense layers (as nanoGPT trains it).
# 160m: the model that a tuned public JAX notebook trains at 148,829 tokens/s on v5e-1 (163.6 M
# weights, 130 M of them outside the table, 8 layers of width 1,024, heads of 256, length 2,048);
# its feed-forward width is not published, 5,888 gives both sums.
NAMED: dict[str, dict[str, Any]] = {
    "gpt2-small": {
        "vocab_size": 50257, "seq_len": 1024, "layers": 12, "dim": 768, "heads": 12,
        "positions": "learned", "norm": "layer",
    },
    "gpt2-medium": {
        "vocab_size": 50257, "seq_len": 1024, "layers": 24, "dim": 1024, "heads": 16,
        "positions": "learned", "norm": "layer",
    },
    "160m": {
        "vocab_size": 32768, "seq_len": 2048, "layers": 8, "dim": 1024, "heads": 4,
        "mlp_dim": 5888,
    },
    "tiny": {"vocab_size": 8192, "seq_len": 256, "layers": 4, "dim": 256, "heads": 4},
}  # fmt: skip


def named_spec(name: str, **changes: Any) -> Spec:
    """Returns the numbers of a known model.

    Args:
        name: `"gpt2-small"`, `"gpt2-medium"`, `"160m"` or `"tiny"`.
        **changes: attributes of `Spec` to change, such as `seq_len=2048`.

    Returns:
        The `Spec`.

    Raises:
        InvalidArgumentError: no such name, or no such attribute.
    """
    _require_choice("name", name, tuple(NAMED))
    unknown = sorted(set(changes) - set(Spec.__dataclass_fields__))
    if unknown:
        raise InvalidArgumentError(
            f"Unknown model arguments. Received: {', '.join(unknown)}",
            f"Choose from {', '.join(Spec.__dataclass_fields__)}.",
        )
    return Spec(**{**NAMED[name], **changes})


def default_heads(dim: int) -> int:
    """Returns how many heads suit a width: heads of 128 where it has four of them, else of 64."""
    for head_dim in (128, 64, 32, 16):
        if dim % head_dim == 0 and (dim // head_dim >= 4 or head_dim == 16):
            return dim // head_dim
    return 1


def flops_per_token(model: Any, seq_len: int | None = None) -> float:
    """Returns the FLOPs that training spends on one token, forward and backward.

    6 N + 12 L H Q T: N weights that multiply (a table that is only looked up does not), L
    layers, H heads of width Q, T tokens of context (Chowdhery et al. 2022, PaLM, appendix B;
    like there, causal attention counts in full and rematerialisation does not count).

    Args:
        model: a `Spec`, a model of `transformer_lm`, or any built Keras model. Of a foreign
            model only the weights are known, so its attention term is left out.
        seq_len: tokens of context; the model's own length where None.

    Returns:
        FLOPs a token.
    """
    spec = model if isinstance(model, Spec) else getattr(model, "spec", None)
    if not isinstance(spec, Spec):
        return 6.0 * model.count_params()
    head = spec.padded_vocab_size * spec.dim
    weights = spec.non_embedding_parameters + head
    return 6.0 * weights + 12.0 * spec.layers * spec.dim * (seq_len or spec.seq_len)


def _require_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(
            f"`{name}` must be a positive whole number. Received: {name}={value!r}",
            f"Pass an int of 1 or more as `{name}`.",
        )


def _require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidArgumentError(
            f"`{name}` must be one of {', '.join(choices)}. Received: {name}={value!r}",
            f"Pass {choices[0]!r}.",
        )


def _require_divisor(name: str, value: int, whole_name: str, whole: int) -> None:
    _require_positive(name, value)
    if whole % value:
        raise InvalidArgumentError(
            f"`{name}` must divide `{whole_name}`. Received: {name}={value}, {whole_name}={whole}",
            f"Pass a divisor of {whole}.",
        )
