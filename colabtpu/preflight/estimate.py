"""A rough figure where no TPU compiler can run: weights, optimizer, gradients, activations.

    print(ct.preflight.estimate(model, data, "v5e-1"))

Weights and optimizer state are exact. Gradients are as large as the trained weights. Activations
are the outputs of every layer of the graph (kept for the backward pass), plus scores for every
attention layer and, for logits, their float32 copy and gradient. XLA fuses much of it away and
pads some of it, so the true figure may be half or twice this. It is marked as an estimate.
"""

from math import prod
from typing import Any

from colabtpu import chips
from colabtpu.chips import Target
from colabtpu.preflight import spec as specs
from colabtpu.preflight.flops import attention_widths
from colabtpu.preflight.messages import size
from colabtpu.preflight.report import Report


def estimate(
    model: Any,
    data: Any,
    target: str = "v5e-1",
    *,
    batch: int | None = None,
    seq_len: int | None = None,
) -> Report:
    """Estimates the memory of a training step by formula, without a compiler.

    Args:
        model: a built Keras model.
        data: one batch or its spec, as in `preflight`.
        target: the slice.
        batch: the global batch, where it should not be that of `data`.
        seq_len: the sequences' length, where `data` leaves it open.

    Returns:
        A `Report` with `status="estimated"`; `compiles` is `None`, for nobody asked a compiler.
    """
    structure = specs.batch_spec(data, batch=batch, seq_len=seq_len)
    return without_compiler(model, structure, chips.target(target), "train", "")


def without_compiler(model: Any, structure: Any, target: Target, step: str, why: str) -> Report:
    """The estimate, with the reason why there is no more than that."""
    from colabtpu.preflight import lowering

    rows = specs.rows(structure)
    seq_len = specs.sequence_length(structure)
    share = max(rows // target.num_devices, 1)
    weights = sum(_bytes(v) for v in model.weights)
    trained = sum(_bytes(v) for v in model.trainable_weights)
    training = step == "train"
    parts = (
        ("weights", weights),
        ("optimizer", _optimizer_bytes(model, trained) if training else 0),
        ("batch", sum(leaf.nbytes for leaf in specs.leaves(structure)) // target.num_devices),
        ("activations", trained + _activation_bytes(model, share, seq_len) if training else 0),
    )
    needed, usable = sum(count for _, count in parts), target.chip.hbm_usable_bytes
    fits = needed <= usable
    return Report(
        model=model.name,
        engine=lowering.engine(),
        target=target.name,
        step=step,
        batch=rows,
        replicas=target.num_devices,
        seq_len=seq_len,
        status="estimated",
        compiles=None,
        fits=fits,
        summary=f"Estimated, not compiled: about {size(needed)} of {size(usable)} of HBM"
        f"{', which would fit' if fits else ', which would not fit'}. It can be off by a factor "
        "of two.",
        fix=why,
        hbm_parts=parts,
        hbm_needed_bytes=needed,
        hbm_usable_bytes=usable,
        temp_bytes=dict(parts)["activations"],
        argument_bytes=weights + dict(parts)["optimizer"] + dict(parts)["batch"],
        notes=("an estimate by formula: no TPU compiler ran",),
    )


def _bytes(variable: Any) -> int:
    import keras

    return prod(variable.shape) * specs.item_bytes(keras.backend.standardize_dtype(variable.dtype))


def _optimizer_bytes(model: Any, trained: int) -> int:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return 0
    if optimizer.built:
        return sum(_bytes(v) for v in optimizer.variables)
    # Moments a weight keeps, by kind; two for what is not listed, as Adam.
    kept = {"SGD": 0, "Adafactor": 0, "Lion": 1, "RMSprop": 1, "Adagrad": 1, "Muon": 1}
    return trained * kept.get(type(optimizer).__name__, 2)


def _activation_bytes(model: Any, rows: int, seq_len: int | None) -> int:
    total = 0
    for layer in model._flatten_layers(include_self=False):
        compute = specs.item_bytes(layer.compute_dtype or "float32")
        for shape in _output_shapes(layer):
            total += prod(_known(shape, rows, seq_len)) * compute
    if seq_len:
        # Scores and probabilities, (rows, heads, seq, seq) each; a head is taken as 64 wide.
        total += sum(2 * rows * max(w // 64, 1) * seq_len**2 * 2 for w in attention_widths(model))
    for output in getattr(model, "outputs", None) or []:
        total += 2 * prod(_known(output.shape, rows, seq_len)) * 4
    return total


def _output_shapes(layer: Any) -> list[Any]:
    try:
        outputs = layer.output
    except (AttributeError, ValueError):
        return []
    import keras

    return [tensor.shape for tensor in keras.tree.flatten(outputs)]


def _known(shape: Any, rows: int, seq_len: int | None) -> list[int]:
    return [rows if i == 0 else (d or seq_len or 1) for i, d in enumerate(shape)]
