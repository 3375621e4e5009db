"""Lowers a step of a Keras model on TensorFlow, as one replica of `TPUStrategy` would run it.

Used through `lowering.lower`. The step goes through `tf.function(jit_compile=True)` and
`experimental_get_compiler_ir(stage="stablehlo_serialized", platform_name="CPU")`; variables are
arguments that the module returns in place. On several devices it is the program of one replica,
without the all-reduce, which TensorFlow adds outside of what can be lowered here.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from colabtpu.chips import Target
from colabtpu.preflight import program as roles
from colabtpu.preflight import spec as specs
from colabtpu.preflight.lowering import EVALUATE, GENERATE, TRAIN, LoweringError
from colabtpu.preflight.messages import explain
from colabtpu.preflight.program import Argument, Program


def lower(model: Any, batch: Any, target: Target, step: str) -> Program:
    """Lowers one step; see `lowering.lower`."""
    model = _off_strategy(model)
    total = specs.rows(batch)
    share = specs.with_batch(batch, total // target.num_devices)
    _build(model, share, step)
    # The lowering takes flat arguments only.
    signature = [tf.TensorSpec(s.shape, s.dtype) for s in specs.leaves(share)]
    run = _function(model, step)
    function = tf.function(
        lambda *flat: run(specs.refill(share, flat)), jit_compile=True, autograph=False
    )
    concrete = _traced(function, signature)
    module = _lowered(function, concrete, signature)
    return Program(
        module=module,
        engine="tensorflow",
        step=step,
        arguments=tuple(_arguments(model, concrete, share)),
        batch=total,
        replicas=target.num_devices,
        num_partitions=1,
        seq_len=specs.sequence_length(batch),
        notes=tuple(_notes(model, step, target)),
        identity=_identity(module),
    )


def _off_strategy(model: Any) -> Any:
    """A model on one device; one that is mirrored over several is copied from its config."""
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return model
    try:
        copy = type(model).from_config(model.get_config())
        if model.compiled:
            copy.compile_from_config(model.get_compile_config())
    except Exception as error:
        raise LoweringError(
            f"The model is mirrored over {strategy.num_replicas_in_sync} devices and cannot be "
            f"copied to one: {type(error).__name__}: {str(error)[:200]}",
            "Build and compile it outside of the scope for preflight.",
        ) from error
    return copy


def _build(model: Any, batch: Any, step: str) -> None:
    if step != GENERATE:
        model._symbolic_build(data_batch=batch)
    if step == TRAIN and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _function(model: Any, step: str) -> Callable[..., Any]:
    if step == TRAIN:
        return lambda data: model.train_step(data)
    if step == EVALUATE:
        return lambda data: model.test_step(data)
    if hasattr(model, "generate_step"):
        return lambda data: model.generate_step(data)
    return lambda data: model.predict_step(data)


def _traced(function: Any, signature: list[Any]) -> Any:
    try:
        return function.get_concrete_function(*signature)
    except Exception as error:
        words = str(error).strip()
        raise LoweringError(
            f"The step cannot be traced: {type(error).__name__}: {words[:400]}",
            "Run `model.train_on_batch` on one batch on the CPU: it fails in the same way.",
        ) from error


def _lowered(function: Any, concrete: Any, signature: list[Any]) -> bytes:
    try:
        stage = function.experimental_get_compiler_ir(*signature)
        return stage(stage="stablehlo_serialized", platform_name="CPU")
    except Exception as error:
        raise _unlowerable(error, concrete) from error


def _unlowerable(error: Exception, concrete: Any) -> LoweringError:
    text = str(error)
    meaning = explain(text)
    node = re.search(r"\{\{node ([^}]+)\}\}", text)
    op = meaning.op or (node[1].rpartition("/")[2] if node else "")
    layer, line = _place(concrete, node[1]) if node else ("", "")
    return LoweringError(
        meaning.summary if meaning.op else f"XLA cannot compile the step: {text.strip()[:400]}",
        meaning.fix,
        op=op,
        layer=layer,
        line=line,
    )


def _place(concrete: Any, node: str) -> tuple[str, str]:
    """The layer's scope, and the user's line that made the node."""
    layer = node.rpartition("/")[0]
    for graph in [concrete.graph, *(f.graph for f in _inner_functions(concrete.graph))]:
        try:
            frames = graph.get_operation_by_name(node).traceback
        except (KeyError, ValueError):
            continue
        own = [f for f in frames if not _is_library(f.filename)]
        if own:
            return layer, f"{own[-1].filename}:{own[-1].lineno} ({own[-1].name})"
    return layer, ""


def _inner_functions(graph: Any) -> list[Any]:
    functions = getattr(graph, "_functions", {})
    return [f for f in functions.values() if hasattr(f, "graph")]


def _is_library(filename: str) -> bool:
    places = ("site-packages", "dist-packages", "/colabtpu/preflight/", "/lib/python", "<frozen")
    return any(place in filename for place in places)


def _arguments(model: Any, concrete: Any, batch: Any) -> Iterator[Argument]:
    """Inputs first, then the variables that the trace captured, in its order."""
    for index, leaf in enumerate(specs.leaves(batch)):
        yield Argument(f"batch[{index}]", roles.BATCH, leaf.shape, leaf.dtype)
    known = _roles(model)
    for captured in concrete.captured_inputs:
        role, path, shape, dtype = known.get(
            id(captured), (roles.STATE, getattr(captured, "name", ""), captured.shape, "")
        )
        yield Argument(path, role, tuple(shape), dtype or captured.dtype.name)


def _roles(model: Any) -> dict[int, tuple[str, str, Any, str]]:
    groups = [(roles.WEIGHTS, model.variables)]
    if getattr(model, "optimizer", None) is not None:
        groups.append((roles.OPTIMIZER, model.optimizer.variables))
    groups.append((roles.STATE, model.metrics_variables))
    return {
        id(v.value.handle): (role, v.path, v.shape, keras.backend.standardize_dtype(v.dtype))
        for role, variables in groups
        for v in variables
    }


def _identity(module: bytes) -> str:
    """The module without source locations, where jaxlib can read it."""
    try:
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import stablehlo

        with ir.Context() as context:
            context.allow_unregistered_dialects = True
            stablehlo.register_dialect(context)
            text = ir.Module.parse(module).operation.get_asm(enable_debug_info=False)
            # TensorFlow numbers its functions as it makes them.
            return re.sub(r"^module @\S+", "module @step", text)
    except Exception:  # noqa: BLE001  (the bytes then stand for themselves)
        return ""


def _notes(model: Any, step: str, target: Target) -> Iterator[str]:
    if target.num_devices > 1:
        yield (
            f"the program of one of {target.num_devices} replicas, without its all-reduce, "
            "which TensorFlow adds when it runs"
        )
    if step == GENERATE and not hasattr(model, "generate_step"):
        yield "the model has no generation loop of its own: this is one forward pass"
    if getattr(model, "run_eagerly", False):
        yield "the model is set to run eagerly: on a TPU, `fit` would run it op by op"
