"""TensorFlow's devices as a `tf.distribute` strategy: a TPU, the GPUs, or logical CPU devices.

    devices, strategy = tensorflow_engine.open_local(environment, 8, notes)

`connect()` is the way in; nothing here imports TensorFlow before the variables are set.
"""

import importlib
import importlib.util
import os
import socket
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from colabtpu import jax_engine, probe
from colabtpu.chips import Chip
from colabtpu.environment import Environment
from colabtpu.failures import (
    INSTALL,
    RESTART,
    AcceleratorError,
    MissingEngineError,
    TooLateError,
    UnreachableError,
    recognise,
    too_many,
)

# These run TensorFlow through libtpu's older StreamExecutor interface; all later ones through
# PJRT (keras-io's distributed_embedding_tf example, run on a v6e-1; "TPUv4 does not support PJRT").
_WITHOUT_PJRT = ("v2", "v3", "v4")
_XLA_FLAGS = (
    "--tf_mlir_enable_mlir_bridge=true",
    "--tf_mlir_enable_convert_control_to_data_outputs_pass=true",
    "--tf_mlir_enable_merge_control_flow_pass=true",
)
_TCP_SECONDS = 10.0
_REMOTE_SECONDS = 60.0


def open_tpu(
    environment: Environment, address: str, count: int | None, notes: list[str]
) -> tuple[tuple[str, ...], Any]:
    """Initialises a TPU once and returns its replicas' devices and a `TPUStrategy`.

    Args:
        environment: where this process runs.
        address: `"local"`, `grpc://HOST:PORT`, or the name of a Cloud TPU.
        count: replicas to use, all of them by default.
        notes: lines for the card are added here.

    Returns:
        The devices' names and the strategy.

    Raises:
        AcceleratorError: one of its subclasses, for every way this is known to fail.
    """
    variables = _check_local(environment) if address == "local" else {}
    if address.startswith("grpc://"):
        _check_answers(address)
    allowed = probe.SECONDS_ALLOWED if address == "local" else _REMOTE_SECONDS
    outcome = probe.run("tensorflow", address, {**os.environ, **variables}, seconds_allowed=allowed)
    if outcome.answer is None:
        raise recognise(outcome, "tensorflow", address)
    if count is not None and count > outcome.answer["cores"]:
        raise too_many(count, outcome.answer["cores"], "TPU cores")
    notes.append(f"TensorFlow: a probe in its own process found {outcome.answer['cores']} cores")
    os.environ.update(variables, KERAS_BACKEND="tensorflow")
    if "jax" not in sys.modules:
        os.environ["JAX_PLATFORMS"] = "cpu"  # the chip has one owner
    return _initialise(address, count)


def open_local(
    environment: Environment, count: int | None, notes: list[str]
) -> tuple[str, tuple[str, ...], Any]:
    """Returns the GPUs, or else logical CPU devices, and a strategy over them.

    Args:
        environment: where this process runs.
        count: devices to use; by default every GPU, or 8 logical CPU devices.
        notes: lines for the card are added here.

    Returns:
        `"gpu"` or `"cpu"`, the devices' names and the strategy.

    Raises:
        TooLateError: TensorFlow's CPU was already in use with fewer logical devices.
    """
    os.environ["KERAS_BACKEND"] = "tensorflow"
    tf = _import(environment)
    gpus = tf.config.list_physical_devices("GPU")
    if environment.accelerator == "gpu" and not gpus:
        notes.append("GPU: one is attached, but this TensorFlow sees none (no CUDA libraries?)")
    if gpus:
        if count is not None and count > len(gpus):
            raise too_many(count, len(gpus), "GPUs")
        names = tuple(d.name for d in tf.config.list_logical_devices("GPU"))[:count]
        return "gpu", names, _strategy(names)
    names = _logical_cpus(8 if count is None else count)
    return "cpu", names, _strategy(names)


def pjrt_variables(chip: Chip | None, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that TensorFlow needs before its import to drive `chip`.

    Source: keras-io's `distributed_embedding_tf` example, which ran on a one-core v6e.

    Args:
        chip: the generation; `None` (unknown) is taken for a recent one.
        variables: the environment to add them to; what it holds already is kept.

    Returns:
        The variables to set, none for v2, v3 and v4.
    """
    if chip is not None and chip.name in _WITHOUT_PJRT:
        return {}
    flags = variables.get("TF_XLA_FLAGS", "").split()
    set_already = {flag.partition("=")[0] for flag in flags}
    flags += [flag for flag in _XLA_FLAGS if flag.partition("=")[0] not in set_already]
    library = variables.get("TF_PLUGGABLE_DEVICE_LIBRARY_PATH") or _libtpu_path()
    return {
        "PJRT_DEVICE": "TPU",
        "NEXT_PLUGGABLE_DEVICE_USE_C_API": "true",
        "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": library,
        "TF_XLA_FLAGS": " ".join(flags),
    }


def _import(environment: Environment) -> Any:
    """Imports TensorFlow, without libtpu: no TPU is wanted here.

    tensorflow-tpu would load it all the same, show a phantom TPU, and abort the process if
    libtpu is too new. The variable goes away again: it would keep JAX and the preflight's child
    processes from libtpu too.
    """
    off = "tensorflow-tpu" in environment.builds and "TPU_LOAD_LIBRARY" not in os.environ
    if off:
        os.environ["TPU_LOAD_LIBRARY"] = "0"
    try:
        return importlib.import_module("tensorflow")
    except ImportError as error:
        raise MissingEngineError(
            f"TensorFlow cannot be imported: {error}.", f"{INSTALL} --engine tensorflow"
        ) from error
    finally:
        if off:
            del os.environ["TPU_LOAD_LIBRARY"]


def _check_local(environment: Environment) -> dict[str, str]:
    if "tensorflow" in environment.imported:
        raise TooLateError(
            "TensorFlow was imported before connect(): on a TPU its variables must be set first, "
            "and the import itself takes hold of the chip.",
            f"{RESTART}, before `import tensorflow` or `import keras`.",
        )
    if jax_engine.live_platform() == "tpu":
        raise TooLateError(
            "JAX has opened the TPU in this process; TensorFlow cannot share it.",
            f"{RESTART}, or go on with connect(engine='jax').",
        )
    return pjrt_variables(environment.chip, os.environ)


def _libtpu_path() -> str:
    # libtpu's own get_library_path() says the same, but importing the package sets variables.
    spec = importlib.util.find_spec("libtpu")
    if spec is not None and spec.origin is not None:
        return str(Path(spec.origin).with_name("libtpu.so"))
    path = os.environ.get("TPU_LIBRARY_PATH")
    if path:
        return path
    raise MissingEngineError("libtpu is not installed.", f"{INSTALL} --engine tensorflow")


def _check_answers(address: str) -> None:
    worker = urlsplit(address)
    try:
        socket.create_connection((worker.hostname, worker.port), timeout=_TCP_SECONDS).close()
    except OSError as error:
        raise UnreachableError(
            f"Nothing answers at {address} within {_TCP_SECONDS:g} s: {error}.",
            "Check the address, or leave `tpu` out and unset TPU_NAME, COLAB_TPU_ADDR and "
            "XRT_TPU_CONFIG: TPU Nodes ended in April 2025, today's TPUs are local.",
        ) from error


def _initialise(address: str, count: int | None) -> tuple[tuple[str, ...], Any]:
    import tensorflow as tf

    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=address)
        if address != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        topology = tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        raise AcceleratorError(
            f"TensorFlow opened the TPU ({address}) in a probe but not in this process: {error}",
            f"{RESTART}.",
        ) from error
    names = tuple(d.name for d in tf.config.list_logical_devices("TPU"))
    replicas = len(names) if count is None else count
    assignment = tf.tpu.experimental.DeviceAssignment.build(topology, num_replicas=replicas)
    strategy = tf.distribute.TPUStrategy(resolver, experimental_device_assignment=assignment)
    return names[:replicas], strategy


def _logical_cpus(count: int) -> tuple[str, ...]:
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu) or []
    if count > max(1, len(configured)):
        try:
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * count
            )
        except RuntimeError as error:
            there = max(1, len(configured))
            raise TooLateError(
                f"TensorFlow already runs with {there} CPU device{'s' * (there > 1)}, and "
                f"{count} were asked for: their number is fixed at first use.",
                f"{RESTART}; or take what is there with connect(devices={there}).",
            ) from error
    return tuple(d.name for d in tf.config.list_logical_devices("CPU"))[:count]


@cache
def _strategy(names: tuple[str, ...]) -> Any:
    """One strategy for the same devices: two in a process break each other's all-reduce.

    Each numbers its collectives from 1, and TensorFlow keeps a number's shape for good
    ("Collective ops is aborted", "Function was cancelled before it was started").
    """
    import tensorflow as tf

    # Keras cannot run steps_per_execution > 1 nor gradient accumulation under MirroredStrategy,
    # and can under OneDeviceStrategy.
    if len(names) == 1:
        return tf.distribute.OneDeviceStrategy(names[0])
    return tf.distribute.MirroredStrategy(list(names))
