"""From a compiled Keras model and the shape of a batch to a `Program`: the step `fit` would run.

    program = lower(model, batch_spec(data), chips.target("v5e-1"))

Nothing is computed and no batch is read: Keras' own `train_step`, `test_step` or generation step
is traced as its trainer would trace it, donation and all. The engine is Keras' backend.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from colabtpu.chips import Target
from colabtpu.errors import ColabTPUError, InvalidArgumentError
from colabtpu.preflight import spec as specs
from colabtpu.preflight.program import Program

TRAIN, EVALUATE, GENERATE = "train", "evaluate", "generate"
STEPS = (TRAIN, EVALUATE, GENERATE)


class LoweringError(ColabTPUError):
    """The step cannot become a TPU program, whatever its size.

    Attributes:
        op: the operation at fault, if known.
        layer: the layer that uses it, if known.
        line: where in the user's code, as `file:line (function)`, if known.
    """

    def __init__(self, what: str, fix: str, op: str = "", layer: str = "", line: str = "") -> None:
        where = "".join([f" in layer `{layer}`" if layer else "", f" at {line}" if line else ""])
        super().__init__(what + (f" It is used{where}." if where else ""), fix)
        self.op, self.layer, self.line = op, layer, line


def lower(model: Any, batch: Any, target: Target, step: str = TRAIN) -> Program:
    """Lowers one step of a model.

    Args:
        model: a Keras model; compiled, unless `step` is `"generate"`.
        batch: `ArraySpec` leaves in the structure that `fit` sees, with the global batch.
        target: the slice; its devices share the batch.
        step: `"train"`, `"evaluate"` or `"generate"`.

    Returns:
        The `Program`.

    Raises:
        LoweringError: the step holds what no TPU program can.
        InvalidArgumentError: the model is not compiled, or the batch does not divide.
    """
    _check(model, batch, target, step)
    backend = engine()
    with aimed_at_tpu():
        home = importlib.import_module(f"colabtpu.preflight.lowering_{backend}")
        return home.lower(model, batch, target, step)


def engine() -> str:
    """Returns Keras' backend, `"jax"` or `"tensorflow"`."""
    import keras

    backend = keras.backend.backend()
    if backend not in ("jax", "tensorflow"):
        raise InvalidArgumentError(
            f"Keras' backend must be 'jax' or 'tensorflow'. Received: {backend!r}",
            "Set KERAS_BACKEND=jax before Keras is imported.",
        )
    return backend


@contextlib.contextmanager
def aimed_at_tpu() -> Iterator[None]:
    """Lets our own attention choose the kernel that a TPU would run, on whatever host this is."""
    if importlib.util.find_spec("colabtpu.models.attention") is None:
        yield
        return
    attention = importlib.import_module("colabtpu.models.attention")
    with attention.target_device("tpu"):
        yield


def _check(model: Any, batch: Any, target: Target, step: str) -> None:
    if step not in STEPS:
        raise InvalidArgumentError(
            f"`step` must be one of {', '.join(STEPS)}. Received: step={step!r}", "Pass 'train'."
        )
    if step != GENERATE and not getattr(model, "compiled", False):
        raise InvalidArgumentError(
            f"`model` is not compiled, so it has no training step. Received: {model.name!r}",
            "Call `model.compile(optimizer=…, loss=…)` first.",
        )
    for leaf in specs.leaves(batch):
        _check_leaf(leaf)
    total = specs.rows(batch)
    if total % target.num_devices:
        raise InvalidArgumentError(
            f"The global batch must divide by the {target.num_devices} devices of {target.name}. "
            f"Received: batch={total}",
            f"Pass {max(total // target.num_devices, 1) * target.num_devices}.",
        )


def _check_leaf(leaf: specs.ArraySpec) -> None:
    if leaf.ragged:
        raise LoweringError(
            "A ragged array reaches the model; rows of different length have no TPU program.",
            "Pad in the pipeline, `.to_tensor(shape=(None, seq_len))`, or pack: "
            "`ct.data.lm_batches`.",
        )
    if leaf.dtype == "string":
        raise LoweringError(
            "Strings reach the model; a TPU knows numbers only.",
            "Tokenize in the pipeline, `dataset.map(…)`, so that the model sees ids.",
        )
