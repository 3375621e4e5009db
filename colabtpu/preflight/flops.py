"""The arithmetic that a model asks for, against which the compiled program is measured.

    count = model_flops(model, spec, step="train")
    count.total, count.formula

For models that read tokens it is the usual formula (Kaplan et al. 2020, appendix of Chowdhery et
al. 2022): 6 N D for the matrix products, forward and backward, N being the parameters that take
part in them and D the tokens, plus 12 T d D for every attention layer of width d over T positions
(scores and mixing, causal masking not deducted). Frozen parameters count 4 instead of 6, and a
forward pass alone 2. Other models (images, tables) have no such formula, and the matrix products
of the lowered step are counted instead.
"""

import re
from dataclasses import dataclass
from math import prod
from typing import Any

from colabtpu.preflight import spec as specs
from colabtpu.preflight.program import Program

_LOOKUPS = ("embedding", "embeddings")


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one step over the whole batch, and how they were counted."""

    total: float
    formula: str


def model_flops(model: Any, batch: Any, program: Program) -> ModelFlops:
    """Returns the arithmetic that the step's mathematics asks for.

    Args:
        model: the built Keras model.
        batch: the spec of its global batch.
        program: the lowered step.
    """
    seq_len = specs.sequence_length(batch)
    widths = attention_widths(model)
    if seq_len is None or not widths:
        return ModelFlops(counted_matmul_flops(program.identity) * _share(program),
                          "matrix products and convolutions of the lowered step")  # fmt: skip
    trained, frozen = matmul_parameters(model)
    tokens = specs.rows(batch) * seq_len
    attention = sum(seq_len * width for width in widths) * tokens
    if program.step != "train":
        return ModelFlops(
            2.0 * (trained + frozen) * tokens + 4.0 * attention,
            f"2 N D + 4 T d D: N={trained + frozen:,}, D={tokens:,}, T={seq_len:,}, "
            f"d={sum(widths):,} over {len(widths)} attention layers",
        )
    return ModelFlops(
        (6.0 * trained + 4.0 * frozen) * tokens + 12.0 * attention,
        f"6 N D + 12 T d D: N={trained:,}{f' (+{frozen:,} frozen, 4 N D)' if frozen else ''}, "
        f"D={tokens:,}, T={seq_len:,}, d={sum(widths):,} over {len(widths)} attention layers",
    )


def attention_widths(model: Any) -> list[int]:
    """Returns heads x size of a head for every attention layer of the model."""
    if type(model).__name__ == "LanguageModel":  # ours: the numbers are in its spec
        return [model.spec.heads * model.spec.head_dim] * model.spec.layers
    widths = []
    for layer in model._flatten_layers():
        heads = _first(layer, "num_query_heads", "num_heads", "_num_heads", "heads")
        size = _first(layer, "head_dim", "key_dim", "_key_dim", "_head_dim", "attention_head_size")
        if isinstance(heads, int) and isinstance(size, int) and "ttention" in type(layer).__name__:
            widths.append(heads * size)
    return widths


def matmul_parameters(model: Any) -> tuple[int, int]:
    """Returns how many parameters take part in matrix products: trained ones, and frozen ones.

    Vectors (biases, scales) do not; an embedding table does only where it is also the output
    layer (`ReversibleEmbedding` with tied weights).
    """
    tied = {
        id(layer._embeddings if hasattr(layer, "_embeddings") else layer.embeddings)
        for layer in model._flatten_layers()
        if "ReversibleEmbedding" in (c.__name__ for c in type(layer).__mro__)
        and getattr(layer, "tie_weights", False)
    }
    counts = {True: 0, False: 0}
    for v in {id(v): v for v in model.weights}.values():
        lookup = v.path.rpartition("/")[2] in _LOOKUPS and id(v) not in tied
        if len(v.shape) > 1 and not lookup and v.path.rpartition("/")[2] != "position_embeddings":
            counts[bool(v.trainable)] += prod(v.shape)
    return counts[True], counts[False]


def counted_matmul_flops(module: str) -> float:
    """Returns the FLOPs of every dot and convolution in a StableHLO module's text."""
    total = 0.0
    for line in module.splitlines():
        if "stablehlo.dot_general" in line or "stablehlo.dot " in line:
            total += _dot(line)
        elif "stablehlo.convolution" in line:
            total += _convolution(line)
    return total


def _share(program: Program) -> int:
    """A module of one replica's step holds its share of the batch only."""
    return program.replicas if program.num_partitions == 1 else 1


def _first(layer: Any, *names: str) -> Any:
    return next(
        (getattr(layer, n) for n in names if isinstance(getattr(layer, n, None), int)), None
    )


def _types(line: str) -> list[list[int]]:
    signature = line.rpartition(" : ")[2]
    return [[int(d) for d in dims.split("x") if d.isdigit()]
            for dims in re.findall(r"tensor<((?:\d+x)*)[a-z]\w*>", signature)]  # fmt: skip


def _dot(line: str) -> float:
    shapes = _types(line)
    contracting = re.search(r"contracting_dims = \[([\d, ]*)\]", line)
    if len(shapes) != 3:
        return 0.0
    # `dot`, TensorFlow's plain product, sums over the last dimension and does not say so.
    dims = contracting[1].split(",") if contracting else [str(len(shapes[0]) - 1)]
    reduced = [int(i) for i in dims if i.strip()]
    return 2.0 * prod(shapes[2]) * prod(shapes[0][i] for i in reduced)


def _convolution(line: str) -> float:
    shapes = _types(line)
    labels = re.search(r"dim_numbers = \[[^\]]*\]x\[([^\]]*)\]->", line)
    if len(shapes) != 3 or labels is None:
        return 0.0
    kernel = [label.strip() for label in labels[1].split(",")]
    reduced = prod(s for s, label in zip(shapes[1], kernel, strict=True) if label != "o")
    dilated = re.search(r"lhs_dilate = \[([\d, ]*)\]", line)
    waste = prod(int(d) for d in dilated[1].split(",")) if dilated else 1
    return 2.0 * prod(shapes[2]) * reduced / waste
