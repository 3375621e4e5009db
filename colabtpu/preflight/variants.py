"""A model changed for the length of a lowering: what advice and search try, then undo.

    with accumulating(model, 4): ...        # the optimizer applies every 4th gradient
    with rematerialized(model) as names: ...  # repeated blocks recompute their activations
    with in_bfloat16(model): ...            # products in bfloat16, weights stay float32

Weights are not touched, so nothing needs a copy of the model, except `with_lora`.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from colabtpu.preflight import spec as specs

LORA_RANK = 8


@contextlib.contextmanager
def accumulating(model: Any, steps: int) -> Iterator[None]:
    """The same optimizer, gathering the gradients of `steps` batches (and a copy of them)."""
    before = model.optimizer
    config = {**before.get_config(), "gradient_accumulation_steps": steps if steps > 1 else None}
    model.optimizer = type(before).from_config(config)
    try:
        yield
    finally:
        model.optimizer = before


@contextlib.contextmanager
def rematerialized(model: Any) -> Iterator[list[str]]:
    """The model's repeated blocks under `keras.RematScope`; yields their names."""
    from keras.src.backend.common.remat import RematMode

    blocks = repeated_blocks(model)
    before = [block._remat_mode for block in blocks]
    for block in blocks:
        block._remat_mode = RematMode("full", 1024, [])
    try:
        yield [block.name for block in blocks]
    finally:
        for block, mode in zip(blocks, before, strict=True):
            block._remat_mode = mode


@contextlib.contextmanager
def in_bfloat16(model: Any) -> Iterator[None]:
    """Every float32 layer under `mixed_bfloat16`."""
    import keras

    layers = [layer for layer in model._flatten_layers() if layer.dtype_policy.name == "float32"]
    before = [layer.dtype_policy for layer in layers]
    for layer in layers:
        layer.dtype_policy = keras.dtype_policies.get("mixed_bfloat16")
    try:
        yield
    finally:
        for layer, policy in zip(layers, before, strict=True):
            layer.dtype_policy = policy


def with_lora(model: Any, rank: int = LORA_RANK) -> Any:
    """Returns a copy whose attention and dense kernels are frozen behind LoRA factors.

    KerasHub's own choice (query and value projections) where there is a backbone, else every
    layer whose name says query or value. `None` where no layer takes LoRA.
    """
    import keras

    copy = keras.models.clone_model(model)
    copy.compile_from_config(model.get_compile_config())
    backbone = getattr(copy, "backbone", copy)
    if hasattr(backbone, "enable_lora"):
        backbone.enable_lora(rank)
        return copy
    adapted = False
    for layer in copy._flatten_layers(include_self=False, recursive=True):
        if any(word in layer.name for word in ("query", "value")) and hasattr(layer, "enable_lora"):
            layer.enable_lora(rank)
            adapted = True
        elif not list(layer._flatten_layers(include_self=False)):
            layer.trainable = False
    return copy if adapted else None


def repeated_blocks(model: Any) -> list[Any]:
    """Returns the layers of the kind that holds most weights among those that repeat.

    A block is a layer made of layers; kinds that occur once, such as the model itself, are none.
    """
    kinds: dict[type, list[Any]] = defaultdict(list)
    for layer in model._flatten_layers(include_self=False):
        if list(layer._flatten_layers(include_self=False)):
            kinds[type(layer)].append(layer)
    repeated = [blocks for blocks in kinds.values() if len(blocks) > 1]
    return max(repeated, key=lambda blocks: sum(b.count_params() for b in blocks), default=[])


def is_float32(model: Any) -> bool:
    """Whether most of the model's layers compute in float32."""
    policies = [layer.dtype_policy.name for layer in model._flatten_layers(include_self=False)]
    return policies.count("float32") > len(policies) / 2


def smaller(structure: Any, divisor: int) -> Any:
    """Returns the spec of a batch with `divisor` times fewer rows."""
    return specs.with_batch(structure, specs.rows(structure) // divisor)
