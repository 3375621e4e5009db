"""A model changed for the length of a lowering: what advice and search try, then undo.

    with accumulating(model, 4): ...        # the optimizer applies every 4th gradient
    with rematerialized(model) as names: ...  # repeated blocks recompute their activations
    with chunked_loss(model): ...           # no logits of the whole batch
    with in_bfloat16(model): ...            # products in bfloat16, weights stay float32

Weights are not touched, so nothing needs a copy of the model, except `with_lora`.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
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

    # Our own blocks have a switch of their own, in the numbers that they are made from.
    own = own_blocks(model)
    blocks = own or repeated_blocks(model)
    name = "spec" if own else "_remat_mode"
    before = [getattr(block, name) for block in blocks]
    for block in blocks:
        new = replace(block.spec, remat="full") if own else RematMode("full", 1024, [])
        setattr(block, name, new)
    try:
        yield [block.name for block in blocks]
    finally:
        for block, kept in zip(blocks, before, strict=True):
            setattr(block, name, kept)


@contextlib.contextmanager
def chunked_loss(model: Any) -> Iterator[None]:
    """One of our language models under our loss, which never holds all logits at once."""
    from keras.src.trainers.compile_utils import CompileLoss

    from colabtpu.models import losses

    names = ("loss", "_compile_loss", "_compile_metrics")
    before = {name: getattr(model, name) for name in names}
    model.loss = losses.next_token(model)
    model._compile_loss = CompileLoss(model.loss)
    model._compile_metrics = None  # another's metric would read the logits
    try:
        yield
    finally:
        for name, kept in before.items():
            setattr(model, name, kept)


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


def own_blocks(model: Any) -> list[Any]:
    """Returns the blocks of one of our own language models, none of another."""
    blocks = getattr(model, "blocks", [])
    return [b for b in blocks if hasattr(getattr(b, "spec", None), "remat")]


def lends_its_head(model: Any) -> bool:
    """Whether the model is one of ours whose loss could work without logits, and does not yet."""
    able = hasattr(getattr(model, "embedding", None), "hidden_behind")
    return able and not hasattr(getattr(model, "loss", None), "bind")


def is_float32(model: Any) -> bool:
    """Whether most of the model's layers compute in float32."""
    policies = [layer.dtype_policy.name for layer in model._flatten_layers(include_self=False)]
    return policies.count("float32") > len(policies) / 2


def smaller(structure: Any, divisor: int) -> Any:
    """Returns the spec of a batch with `divisor` times fewer rows."""
    return specs.with_batch(structure, specs.rows(structure) // divisor)
