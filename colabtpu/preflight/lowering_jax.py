"""Lowers a step of a Keras model on JAX, as Keras' JAX trainer jits it.

Used through `lowering.lower`. The trainer jits `train_step(state, data)` with the state donated;
so do we, with shapes in the place of values, for the platform "tpu". On several devices the
arguments carry the shardings of `keras.distribution.DataParallel` (or the model's own
distribution, if it spans as many devices), so that libtpu adds the real all-reduce.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding, PartitionSpec

from colabtpu.chips import Target
from colabtpu.errors import InvalidArgumentError
from colabtpu.preflight import program as roles
from colabtpu.preflight import spec as specs
from colabtpu.preflight.lowering import EVALUATE, GENERATE, TRAIN, LoweringError
from colabtpu.preflight.messages import explain, layer_of
from colabtpu.preflight.program import Argument, Program

Place = Callable[[Any], Any]  # a variable, or an array's spec -> its sharding, or None


def lower(model: Any, batch: Any, target: Target, step: str) -> Program:
    """Lowers one step; see `lowering.lower`."""
    batch = specs.map_structure(_canonical, batch)
    _build(model, batch, step)
    with _distribution(target.num_devices) as (place_variable, place_batch):
        groups = _state(model, step)
        state = tuple(
            [_shape(v.shape, v.dtype, place_variable(v)) for v in variables]
            for _, variables in groups
        )
        data = specs.map_structure(lambda s: _shape(s.shape, s.dtype, place_batch(s)), batch)
        function, out = _function(model, step)
        placed = target.num_devices > 1 and out is not None
        jitted = jax.jit(
            function,
            donate_argnums=0,
            keep_unused=True,  # they lie in memory all the same
            out_shardings=out(state) if placed and out else None,
        )
        module = _lowered(jitted, state, data)
    return Program(
        module=_bytecode(module),
        engine="jax",
        step=step,
        arguments=tuple(_arguments(groups, batch)),
        batch=specs.rows(batch),
        replicas=target.num_devices,
        num_partitions=target.num_devices,
        seq_len=specs.sequence_length(batch),
        notes=tuple(_notes(model, step, target)),
        identity=module.operation.get_asm(enable_debug_info=False),
    )


def _canonical(leaf: specs.ArraySpec) -> specs.ArraySpec:
    """JAX puts 64-bit numbers on the device as 32-bit ones."""
    return specs.ArraySpec(leaf.shape, str(jax.dtypes.canonicalize_dtype(leaf.dtype)))


def _build(model: Any, batch: Any, step: str) -> None:
    """Builds what the first batch of `fit` would build: layers, losses, metrics, optimizer."""
    if step != GENERATE:
        model._symbolic_build(data_batch=batch)
    if step == TRAIN and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _state(model: Any, step: str) -> list[tuple[str, list[Any]]]:
    groups = [
        (roles.WEIGHTS, list(model.trainable_variables)),
        (roles.WEIGHTS, list(model.non_trainable_variables)),
    ]
    if step == TRAIN:
        groups.append((roles.OPTIMIZER, list(model.optimizer.variables)))
    if step != GENERATE:
        groups.append((roles.STATE, list(model.metrics_variables)))
    return groups


def _function(model: Any, step: str) -> tuple[Callable[..., Any], Callable[[Any], Any] | None]:
    """The function that Keras jits, and its output shardings given the state's."""

    def as_the_state(state: Any) -> Any:
        return (None, jax.tree.map(lambda s: s.sharding, state))

    if step == TRAIN:
        return model.train_step, as_the_state
    if step == EVALUATE:
        return model.test_step, as_the_state
    if hasattr(model, "generate_step"):
        return _generate(model), None
    return lambda state, data: model.predict_step(state, data), as_the_state


def _generate(model: Any) -> Callable[..., Any]:
    """KerasHub's whole generation loop over a padded prompt, as `generate()` compiles it."""

    def generate(state: Any, data: Any) -> Any:
        variables = list(model.trainable_variables) + list(model.non_trainable_variables)
        values = [value for group in state for value in group]
        with keras.StatelessScope(list(zip(variables, values, strict=True))):
            return model.generate_step(data)

    return generate


@contextlib.contextmanager
def _distribution(devices: int) -> Iterator[tuple[Place, Place]]:
    """Where variables and batches lie; Keras' distribution is set to match, then put back."""
    own = keras.distribution.distribution()
    if devices == 1:
        with _as_distribution(None):
            yield (lambda v: None), (lambda s: None)
        return
    if own is not None and own.device_mesh.devices.size == devices:
        yield (lambda v: v.value.sharding), _batch_place(own.device_mesh.backend_mesh, own)
        return
    if isinstance(own, keras.distribution.ModelParallel):
        raise InvalidArgumentError(
            f"The model is laid out over {own.device_mesh.devices.size} devices, and the target "
            f"has {devices}.",
            "Set a distribution of the target's size before building the model.",
        )
    new = _data_parallel(devices)
    mesh = new.device_mesh.backend_mesh
    with _as_distribution(new):
        yield (lambda v: NamedSharding(mesh, PartitionSpec())), _batch_place(mesh, new)


def _data_parallel(devices: int) -> Any:
    """The distribution that a user of the slice would set, over devices that need not be here.

    It must be set while tracing: kernels that the compiler cannot split look at its mesh.
    """
    names = [f"cpu:{index}" for index in range(devices)]
    mesh = keras.distribution.DeviceMesh((devices,), ["batch"], names)
    mesh._backend_mesh = jax.sharding.AbstractMesh((devices,), ("batch",))
    return keras.distribution.DataParallel(device_mesh=mesh, auto_shard_dataset=False)


def _batch_place(mesh: Any, distribution: Any) -> Place:
    axis = distribution.batch_dim_name
    return lambda s: NamedSharding(mesh, PartitionSpec(*([axis] if s.shape else [])))


@contextlib.contextmanager
def _as_distribution(distribution: Any) -> Iterator[None]:
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(distribution)
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


def _shape(shape: Any, dtype: str, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


def _lowered(jitted: Any, state: Any, data: Any) -> Any:
    try:
        traced = jitted.trace(state, data)
    except Exception as error:
        raise _untraceable(error) from error
    try:
        with warnings.catch_warnings():  # Keras donates the same, and says the same
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return traced.lower(lowering_platforms=("tpu",)).compiler_ir("stablehlo")
    except Exception as error:
        raise _unlowerable(error, traced.jaxpr) from error


def _untraceable(error: Exception) -> LoweringError:
    words = str(error).strip()
    layer = _between(words, "when calling ", ".call()")
    name = type(error).__name__
    dynamic = any(w in name + words for w in ("Tracer", "Concretization", "NonConcrete"))
    return LoweringError(
        f"The step cannot be traced: {name}: {words.splitlines()[0] if words else ''}",
        "Use operations whose shapes do not depend on values (`keras.ops.where` instead of "
        "boolean indexing), and no `if` on a tensor's value."
        if dynamic
        else "Run `model.train_on_batch` on one batch on the CPU: it fails in the same way.",
        layer=layer,
        line=_user_line(error),
    )


def _between(text: str, start: str, end: str) -> str:
    return text.partition(start)[2].partition(end)[0] if start in text and end in text else ""


def _user_line(error: BaseException) -> str:
    """The last line of the traceback that is neither Keras' nor JAX's."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not _is_library(f.filename)]
    return f"{own[-1].filename}:{own[-1].lineno} ({own[-1].name})" if own else ""


def _is_library(filename: str) -> bool:
    places = ("site-packages", "dist-packages", "/colabtpu/preflight/", "/lib/python", "<frozen")
    return any(place in filename for place in places)


def _unlowerable(error: Exception, jaxpr: Any) -> LoweringError:
    meaning = explain(error)
    if meaning.op is None:
        return LoweringError(
            f"JAX cannot lower the step for a TPU: {str(error).strip()[:400]}", meaning.fix
        )
    equation = _find(jaxpr.jaxpr, meaning.op)
    layer = line = ""
    if equation is not None:
        layer = layer_of(f"{equation.source_info.name_stack}/{meaning.op}")
        line = _line_of(equation)
    return LoweringError(meaning.summary, meaning.fix, op=meaning.op, layer=layer, line=line)


def _find(jaxpr: Any, primitive: str) -> Any:
    from jax._src import core

    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            return equation
        for inner in core.jaxprs_in_params(equation.params):
            found = _find(inner, primitive)
            if found is not None:
                return found
    return None


def _line_of(equation: Any) -> str:
    from jax._src import source_info_util

    for frame in source_info_util.user_frames(equation.source_info.traceback):
        if not _is_library(frame.file_name):
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    return ""


def _bytecode(module: Any) -> bytes:
    from jax._src.interpreters import mlir

    return mlir.module_to_bytecode(module)


def _arguments(groups: list[tuple[str, list[Any]]], batch: Any) -> Iterator[Argument]:
    for role, variables in groups:
        for v in variables:
            yield Argument(v.path, role, tuple(v.shape), str(v.dtype))
    for index, leaf in enumerate(specs.leaves(batch)):
        yield Argument(f"batch[{index}]", roles.BATCH, leaf.shape, leaf.dtype)


def _notes(model: Any, step: str, target: Target) -> Iterator[str]:
    if target.num_devices > 1:
        yield (
            f"one program over {target.num_devices} devices, its all-reduce included; "
            "figures are per device"
        )
    if step == GENERATE and not hasattr(model, "generate_step"):
        yield "the model has no generation loop of its own: this is one forward pass"
    if getattr(model, "run_eagerly", False) or not getattr(model, "jit_compile", True):
        yield "the model is set not to be jitted: on a TPU, `fit` would run it op by op"
