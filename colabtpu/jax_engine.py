"""JAX's devices under `keras.distribution.DataParallel`: TPU cores, GPUs, or CPU devices.

    device, names, distribution = jax_engine.open_local(environment, 8, notes)

`connect()` is the way in; nothing here imports JAX or Keras before the variables are set.
"""

import os
import sys
from typing import Any

from colabtpu import probe
from colabtpu.environment import Environment
from colabtpu.failures import (
    INSTALL,
    RESTART,
    AcceleratorError,
    MissingEngineError,
    TooLateError,
    recognise,
    too_many,
)

_COUNT_FLAG = "--xla_force_host_platform_device_count"


def open_tpu(count: int | None, notes: list[str]) -> tuple[tuple[str, ...], Any]:
    """Opens this machine's TPU and returns its devices and a `DataParallel` over them.

    Args:
        count: devices to use, all of them by default.
        notes: lines for the card are added here.

    Returns:
        The devices' names, as Keras writes them (`"tpu:0"`), and the distribution, which is set.

    Raises:
        AcceleratorError: one of its subclasses, for every way this is known to fail.
    """
    if live_platform() is None:
        outcome = probe.run("jax", "local", os.environ)
        if outcome.answer is None:
            raise recognise(outcome, "jax", "local")
        notes.append(f"JAX: a probe in its own process found {outcome.answer['cores']} cores")
    import jax

    try:
        devices = jax.devices("tpu")
    except RuntimeError as error:
        raise TooLateError(
            f"JAX was already in use without the TPU in this process: {error}.", f"{RESTART}."
        ) from error
    return _distribute(devices, count, "TPU cores")


def open_local(
    environment: Environment, count: int | None, notes: list[str]
) -> tuple[str, tuple[str, ...], Any]:
    """Returns the GPUs, or else CPU devices, and a `DataParallel` over them.

    Args:
        environment: where this process runs.
        count: devices to use; by default every GPU, or 8 CPU devices.
        notes: lines for the card are added here.

    Returns:
        `"gpu"` or `"cpu"`, the devices' names, and the distribution, which is set.

    Raises:
        TooLateError: JAX was already in use with fewer CPU devices.
    """
    wanted = 8 if count is None else count
    if live_platform() is None:
        _ask_for_cpus(wanted)
        if environment.accelerator != "gpu":
            _use_cpu_only(notes)
    try:
        import jax
    except ImportError as error:
        raise MissingEngineError(
            f"JAX cannot be imported: {error}.", f"{INSTALL} --engine jax"
        ) from error
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise AcceleratorError(
            f"JAX finds no device: {error}",
            f"JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS', '')!r}: unset it, restart the "
            "kernel, and call connect() again.",
        ) from error
    if devices[0].platform == "gpu":
        return "gpu", *_distribute(devices, count, "GPUs")
    if environment.accelerator == "gpu":
        notes.append("GPU: one is attached, but this JAX sees none (pip install 'jax[cuda12]')")
    if len(devices) < wanted:
        raise TooLateError(
            f"JAX already runs with {len(devices)} CPU device{'s' * (len(devices) > 1)}, and "
            f"{wanted} were asked for: their number is fixed at first use.",
            f"{RESTART}; or take what is there with connect(devices={len(devices)}).",
        )
    keep_tensorflow_off(environment, notes)
    return "cpu", *_distribute(devices, wanted, "CPU devices")


def keep_tensorflow_off(environment: Environment, notes: list[str]) -> None:
    """Keeps a later `import tensorflow`, say for tf.data, from the libtpu that JAX holds.

    The variable forbids libtpu to JAX too, and to child processes: it is set once JAX is done.
    """
    if "tensorflow-tpu" in environment.builds and "tensorflow" not in sys.modules:
        os.environ["TPU_LOAD_LIBRARY"] = "0"
        os.environ.pop("TF_PLUGGABLE_DEVICE_LIBRARY_PATH", None)
        notes.append("TPU_LOAD_LIBRARY=0: an import of tensorflow-tpu leaves the chip to JAX")


def live_platform() -> str | None:
    """The platform of JAX's devices if this process has opened them already, else `None`."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    # Not in JAX's public API: asking jax.devices() would open what we only want to ask about.
    opened = getattr(bridge, "backends_are_initialized", None)
    if opened is None or not opened():
        return None
    return str(sys.modules["jax"].default_backend())


def mesh(distribution: Any) -> Any:
    """The `jax.sharding.Mesh` that a Keras distribution runs on."""
    return distribution.device_mesh.backend_mesh


def _ask_for_cpus(count: int) -> None:
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(_COUNT_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"{_COUNT_FLAG}={count}"])


def _use_cpu_only(notes: list[str]) -> None:
    # An installed libtpu would otherwise be asked first, and wait for a metadata server.
    before = os.environ.get("JAX_PLATFORMS", "")
    if before not in ("", "cpu"):
        notes.append(f"JAX_PLATFORMS was {before!r}, set to 'cpu'")
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", "cpu")


def _distribute(devices: Any, count: int | None, what: str) -> tuple[tuple[str, ...], Any]:
    os.environ["KERAS_BACKEND"] = "jax"
    from keras import distribution

    if count is not None and count > len(devices):
        raise too_many(count, len(devices), what)
    names = tuple(f"{d.platform}:{d.id}" for d in devices[:count])
    parallel = distribution.DataParallel(devices=list(names))
    distribution.set_distribution(parallel)
    return names, parallel
