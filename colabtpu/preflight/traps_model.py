"""Traps in the model, its optimizer and its loss; `check.py` runs them.

Each function looks for one thing and yields a `Trap` or nothing.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import keras

from colabtpu.preflight.check import RISK, SLOW, WRONG, Setting, Trap

Found = Iterator[Trap]
LOW_PRECISION = ("bfloat16", "float16")
WORTH_SAYING = 0.02  # a layer's share of the model's weights, and its waste, below which silent


def outside_scope(setting: Setting) -> Found:
    """A model built outside of the scope trains on one device and says nothing."""
    if setting.engine == "tensorflow" and setting.replicas > 1:
        own = getattr(setting.model, "_distribute_strategy", None)
        if own is not setting.strategy:
            yield Trap(
                "outside-scope", WRONG, f"model `{setting.model.name}`",
                "It was built outside of the strategy's scope, so `fit` would use one of the "
                f"{setting.replicas} replicas.",
                "Build and compile it inside `with tpu.scope():`.",
            )  # fmt: skip
    if setting.engine == "jax" and setting.replicas > 1:
        alone = [v.path for v in setting.model.variables if _devices(v) < setting.replicas]
        if alone:
            yield Trap(
                "outside-scope", WRONG, f"`{alone[0]}` and {len(alone) - 1} more variables",
                f"They lie on one device while the distribution spans {setting.replicas}: the "
                "model was built before the distribution was set.",
                "Build and compile it inside `with tpu.scope():`.",
            )  # fmt: skip


def nothing_sharded(setting: Setting) -> Found:
    """A layout whose patterns match nothing replicates everything, silently."""
    layout = getattr(setting.strategy, "_layout_map", None)
    if setting.engine != "jax" or not layout:
        return
    if all(getattr(v.value.sharding, "is_fully_replicated", False) for v in setting.model.weights):
        yield Trap(
            "layout-matches-nothing", WRONG, "the distribution's `LayoutMap`",
            "Every weight is replicated: its patterns match no variable. Keras 3.14 matches the "
            "whole path where 3.13 searched in it.",
            f"Write patterns for whole paths, such as `.*{setting.model.weights[0].path[-12:]}`.",
        )  # fmt: skip


def ignored_distribution(setting: Setting) -> Found:
    """`keras.distribution` on TensorFlow does nothing."""
    if setting.engine == "tensorflow" and keras.distribution.distribution() is not None:
        yield Trap(
            "distribution-on-tensorflow", WRONG, "`keras.distribution.set_distribution`",
            "On TensorFlow it is accepted and ignored: the model trains on one device.",
            "Use `with tpu.scope():`, which is a `tf.distribute` strategy there, or JAX.",
        )  # fmt: skip


def clipping(setting: Setting) -> Found:
    """Clipping happens before the replicas' gradients are summed."""
    optimizer = setting.model.optimizer
    if not _mirrored(setting) or optimizer is None:
        return
    for name in ("clipnorm", "global_clipnorm", "clipvalue"):
        if getattr(optimizer, name, None) is not None:
            yield Trap(
                "clip-before-all-reduce", WRONG, f"optimizer `{optimizer.name}`, `{name}`",
                f"Each of the {setting.replicas} replicas clips its own share of the gradient "
                "before they are summed, so the update is not that of one device.",
                "Leave clipping out, or use the JAX engine, where it is right.",
            )  # fmt: skip


def accumulation(setting: Setting) -> Found:
    """Accumulation fails under several replicas, and runs schedules too fast everywhere."""
    optimizer = setting.model.optimizer
    steps = getattr(optimizer, "gradient_accumulation_steps", None)
    if not steps or steps == 1:
        return
    if _mirrored(setting):
        yield Trap(
            "accumulation-under-strategy", WRONG,
            f"optimizer `{optimizer.name}`, `gradient_accumulation_steps={steps}`",
            "Under several TensorFlow replicas `fit` fails: 'merge_call called while defining a "
            "new graph'.",
            "Use a smaller model or batch without accumulation, or the JAX engine.",
        )  # fmt: skip
    if isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        yield Trap(
            "schedule-runs-fast", WRONG, f"optimizer `{optimizer.name}`, its learning rate",
            f"The schedule counts batches, not updates: with {steps} batches an update it runs "
            f"{steps} times too fast.",
            f"Multiply the schedule's step counts by {steps}.",
        )  # fmt: skip


def ema_overwrite(setting: Setting) -> Found:
    """Overwriting weights with their average fails under several replicas."""
    optimizer = setting.model.optimizer
    if _mirrored(setting) and getattr(optimizer, "ema_overwrite_frequency", None):
        yield Trap(
            "ema-overwrite-under-strategy", WRONG,
            f"optimizer `{optimizer.name}`, `ema_overwrite_frequency`",
            "Under several TensorFlow replicas `fit` fails when it first overwrites.",
            "Leave it `None` and use `keras.callbacks.SwapEMAWeights`, or the JAX engine.",
        )  # fmt: skip


def steps_per_execution(setting: Setting) -> Found:
    """More than one step an execution fails under several replicas."""
    steps = getattr(setting.model, "steps_per_execution", 1)
    if _mirrored(setting) and steps > 1:
        yield Trap(
            "steps-per-execution-under-strategy", WRONG, f"`steps_per_execution={steps}`",
            "Under several TensorFlow replicas `fit` fails: 'You must feed a value for "
            "placeholder tensor' (keras-team/keras#19246).",
            "Compile with `steps_per_execution=1`, or use the JAX engine.",
        )  # fmt: skip


def own_train_step(setting: Setting) -> Found:
    """A train step of one's own must scale the loss."""
    if not _mirrored(setting):
        return
    step = type(setting.model).train_step
    if not step.__module__.startswith("keras."):
        yield Trap(
            "own-train-step", RISK, f"`{type(setting.model).__name__}.train_step`",
            f"Gradients of the {setting.replicas} replicas are summed, and only Keras' own losses "
            "divide by their number.",
            "Divide your loss by `tf.distribute.get_strategy().num_replicas_in_sync`.",
        )  # fmt: skip


def eager(setting: Setting) -> Found:
    """Op by op, a TPU is slower than a CPU."""
    if setting.model.run_eagerly or (setting.engine == "jax" and not setting.model.jit_compile):
        yield Trap(
            "eager", SLOW, f"model `{setting.model.name}`",
            "It is compiled to run op by op, with a trip to the TPU for each.",
            "Compile with `run_eagerly=False, jit_compile='auto'`.",
        )  # fmt: skip


def loss_precision(setting: Setting) -> Found:
    """A loss in bfloat16 rounds its labels: token 1001 becomes 1000."""
    for loss in _losses(setting.model):
        dtype = str(getattr(loss, "dtype", ""))
        if dtype in LOW_PRECISION:
            yield Trap(
                "loss-in-low-precision", WRONG, f"loss `{loss.name}`, dtype {dtype}",
                "The loss casts its labels too: token 1001 becomes 1000, and the loss is that of "
                "another token.",
                "Leave `dtype` out of the loss, and `keras.config.floatx()` at 'float32'; the "
                "policy 'mixed_bfloat16' is what makes products fast.",
            )  # fmt: skip


def float16(setting: Setting) -> Found:
    """TPUs multiply bfloat16."""
    names = {layer.dtype_policy.name for layer in setting.model._flatten_layers()}
    halves = [name for name in names if name in ("float16", "mixed_float16")]
    if halves:
        yield Trap(
            "float16", SLOW, f"dtype policy `{halves[0]}`",
            "A TPU's matrix unit takes bfloat16; float16 is converted, and needs loss scaling.",
            "Use 'mixed_bfloat16'.",
        )  # fmt: skip


def batch_norm(setting: Setting) -> Found:
    """Batch statistics of one replica's share."""
    if not _mirrored(setting):
        return
    for layer in setting.model._flatten_layers():
        if type(layer) is keras.layers.BatchNormalization and not layer.synchronized:
            yield Trap(
                "batch-norm-per-replica", WRONG, f"layer `{layer.name}`",
                f"Each of the {setting.replicas} replicas normalises by its own share of the "
                "batch.",
                "BatchNormalization(synchronized=True), or the JAX engine, where it is.",
            )  # fmt: skip
            return


def widths(setting: Setting) -> Found:
    """Dimensions that do not fill the matrix unit are padded to it, and the padding is paid for."""
    side = setting.chip.mxu
    total = sum(prod(v.shape) for v in setting.model.weights if len(v.shape) > 1) or 1
    worst: list[tuple[float, str, tuple[int, ...], list[int]]] = []
    for v in setting.model.weights:
        dims = [d for d in _flat_matrix(v) if d >= side and d % side]
        waste = prod(-(-d // side) * side for d in dims) / prod(dims) - 1 if dims else 0.0
        if waste >= WORTH_SAYING and prod(v.shape) / total >= WORTH_SAYING:
            worst.append((waste, v.path, tuple(v.shape), dims))
    if worst:
        waste, path, shape, dims = max(worst)
        wide = ", ".join(f"{d:,} -> {-(-d // side) * side:,}" for d in dims)
        yield Trap(
            "width-off-the-matrix-unit", SLOW,
            f"`{path}` {shape}" + (f" and {len(worst) - 1} more" if len(worst) > 1 else ""),
            f"{setting.chip.name} multiplies in tiles of {side}: {wide}, {waste:.0%} of the "
            "products are padding.",
            f"Choose multiples of {side}; pad a vocabulary up.",
        )  # fmt: skip


def _flat_matrix(variable: Any) -> tuple[int, ...]:
    """The two sides of a kernel as a product sees them; heads of a projection count together."""
    shape = tuple(variable.shape)
    if len(shape) < 2 or variable.path.rpartition("/")[2] == "position_embeddings":
        return ()
    if len(shape) == 3:
        first = shape[0] > shape[2] or shape[1] * shape[2] == shape[0]
        return (shape[0], shape[1] * shape[2]) if first else (shape[0] * shape[1], shape[2])
    return shape[-2:]


def _mirrored(setting: Setting) -> bool:
    return setting.engine == "tensorflow" and setting.replicas > 1


def _devices(variable: Any) -> int:
    return len(getattr(getattr(variable.value, "sharding", None), "device_set", "x"))


def _losses(model: Any) -> list[Any]:
    given = keras.tree.flatten(getattr(model, "loss", None))
    container = getattr(model, "_compile_loss", None)
    built = [entry.fn for entry in getattr(container, "_flat_losses", None) or []
             if hasattr(entry, "fn")]  # fmt: skip
    losses = [loss for loss in [*given, *built] if isinstance(loss, keras.losses.Loss)]
    if not losses and keras.config.floatx() in LOW_PRECISION:
        losses = [keras.losses.MeanSquaredError(name=str(given[0] if given else "loss"))]
    return list({id(loss): loss for loss in losses}.values())


TRAPS: tuple[Callable[[Setting], Found], ...] = (
    outside_scope, nothing_sharded, ignored_distribution, clipping, accumulation, ema_overwrite,
    steps_per_execution, own_train_step, eager, loss_precision, float16, batch_norm, widths,
)  # fmt: skip
