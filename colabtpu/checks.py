"""What can be seen to be wrong in an `Environment`: one function for each catalogue entry.

Each takes the environment and the engine that a run would use, and returns the value seen, or
`None` if all is well.
"""

import re
from collections.abc import Callable

from colabtpu.environment import Environment

# What was measured on a host without a chip: `import tensorflow` with each libtpu beside
# tensorflow-tpu 2.20.0 works from 0.0.14 to 0.0.30, and aborts the process with 0.0.10 and with
# 0.0.36 and later. Older wheels pin the one libtpu they were built with.
LIBTPU_FOR_TENSORFLOW: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {
    (2, 20): ((0, 0, 14), (0, 0, 30)),
    (2, 19): ((0, 0, 10), (0, 0, 10)),
}
LIBTPU_SPECIFIER = ">=0.0.14,<=0.0.30"
PYTHONS = ((3, 11), (3, 13))
OLDEST_KERAS = (3, 13, 2)
# Generations whose TensorFlow talks to libtpu through PJRT and needs its variables set first.
PJRT_CHIPS = ("v5e", "v5p", "v6e")

# What TensorFlow reads once, when it is imported.
PJRT_VARIABLES = (
    "PJRT_DEVICE",
    "NEXT_PLUGGABLE_DEVICE_USE_C_API",
    "TF_PLUGGABLE_DEVICE_LIBRARY_PATH",
)

Check = Callable[[Environment, str], str | None]


def version(text: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version, `"0.0.21.1"` -> `(0, 0, 21, 1)`."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(n) for n in numbers[0].split(".")) if numbers else ()


def stock_tensorflow(environment: Environment) -> str | None:
    """Returns the TensorFlow build without TPU kernels that is installed, as `"name version"`."""
    for name in ("tensorflow", "tensorflow-cpu", "tf-nightly"):
        if name in environment.builds:
            return f"{name} {environment.builds[name]}"
    return None


def libtpu_fits(environment: Environment) -> bool:
    """Whether the installed libtpu is one that the installed tensorflow-tpu can load."""
    wheel = version(environment.builds.get("tensorflow-tpu", ""))
    libtpu = version(environment.builds.get("libtpu", ""))
    oldest, newest = LIBTPU_FOR_TENSORFLOW.get(wheel[:2], (wheel, wheel))
    return bool(libtpu) and oldest <= libtpu and libtpu[: len(newest)] <= newest


def _has_tpu(environment: Environment) -> bool:
    return environment.accelerator == "tpu"


def outside_pythons(e: Environment, engine: str) -> str | None:
    return None if PYTHONS[0] <= version(e.python)[:2] <= PYTHONS[1] else e.python


def keras_2(e: Environment, engine: str) -> str | None:
    keras = e.builds.get("keras")
    return keras if keras and version(keras) < (3,) else None


def keras_untried(e: Environment, engine: str) -> str | None:
    keras = e.builds.get("keras")
    return keras if keras and (3,) <= version(keras) < OLDEST_KERAS else None


def keras_missing(e: Environment, engine: str) -> str | None:
    return None if "keras" in e.builds else "no keras"


def no_tensorflow_on_tpu(e: Environment, engine: str) -> str | None:
    if not _has_tpu(e) or "tensorflow-tpu" in e.builds or stock_tensorflow(e):
        return None
    return e.device


def stock_tensorflow_on_tpu(e: Environment, engine: str) -> str | None:
    if not _has_tpu(e) or "tensorflow-tpu" in e.builds or kaggle_tensorflow_cpu(e, engine):
        return None
    return stock_tensorflow(e)


def kaggle_tensorflow_cpu(e: Environment, engine: str) -> str | None:
    if e.platform != "kaggle" or not _has_tpu(e) or "tensorflow-tpu" in e.builds:
        return None
    return e.builds.get("tensorflow-cpu")


def two_tensorflows(e: Environment, engine: str) -> str | None:
    stock = stock_tensorflow(e)
    if stock is None or "tensorflow-tpu" not in e.builds:
        return None
    return f"tensorflow-tpu {e.builds['tensorflow-tpu']} and {stock}"


def pulled_by_keras_hub(e: Environment, engine: str) -> str | None:
    if two_tensorflows(e, engine) is None:
        return None
    pullers = [n for n in ("keras-hub", "keras-nlp", "tensorflow-text") if n in e.builds]
    return " and ".join(pullers) or None


def libtpu_outside(e: Environment, engine: str) -> str | None:
    if "tensorflow-tpu" not in e.builds or "libtpu" not in e.builds or libtpu_fits(e):
        return None
    return f"libtpu {e.builds['libtpu']} beside tensorflow-tpu {e.builds['tensorflow-tpu']}"


def tensorflow_without_libtpu(e: Environment, engine: str) -> str | None:
    if _has_tpu(e) and "tensorflow-tpu" in e.builds and "libtpu" not in e.builds:
        return f"tensorflow-tpu {e.builds['tensorflow-tpu']}"
    return None


def tpu7x(e: Environment, engine: str) -> str | None:
    return e.device if e.chip and e.chip.name == "tpu7x" else None


def tensorflow_missing(e: Environment, engine: str) -> str | None:
    if _has_tpu(e) or "tensorflow-tpu" in e.builds or stock_tensorflow(e):
        return None
    return e.device


def library_off(e: Environment, engine: str) -> str | None:
    value = e.variables.get("TPU_LOAD_LIBRARY")
    return f"TPU_LOAD_LIBRARY={value}" if _has_tpu(e) and value == "0" else None


def legacy_keras(e: Environment, engine: str) -> str | None:
    value = e.variables.get("TF_USE_LEGACY_KERAS", "")
    return f"TF_USE_LEGACY_KERAS={value}" if value.lower() in ("1", "true") else None


def jax_missing(e: Environment, engine: str) -> str | None:
    missing = [name for name in ("jax", "jaxlib") if name not in e.builds]
    return " and ".join(missing) or None


def jax_without_libtpu(e: Environment, engine: str) -> str | None:
    if _has_tpu(e) and "libtpu" not in e.builds:
        return f"jax {e.builds.get('jax', '(absent)')}"
    return None


def jax_held_to_cpu(e: Environment, engine: str) -> str | None:
    value = e.variables.get("JAX_PLATFORMS", "")
    wanted = {"tpu": ("tpu",), "gpu": ("cuda", "gpu")}.get(e.accelerator, ())
    if not value or not wanted or any(w in value.split(",") for w in wanted):
        return None
    return f"JAX_PLATFORMS={value}"


def gpu_without_cuda_tensorflow(e: Environment, engine: str) -> str | None:
    if e.accelerator != "gpu":
        return None
    if "tensorflow" in e.builds and e.cuda_libraries:
        return None
    if "tensorflow" in e.builds:
        return f"tensorflow {e.builds['tensorflow']} without CUDA's libraries"
    if "tensorflow-tpu" in e.builds:
        return f"tensorflow-tpu {e.builds['tensorflow-tpu']}"
    return stock_tensorflow(e)


def gpu_without_cuda_jax(e: Environment, engine: str) -> str | None:
    plugins = ("jax-cuda12-plugin", "jax-cuda13-plugin")
    if e.accelerator != "gpu" or "jax" not in e.builds or any(p in e.builds for p in plugins):
        return None
    return f"jax {e.builds['jax']}"


def gpu_without_driver(e: Environment, engine: str) -> str | None:
    return "an NVIDIA GPU on the PCI bus" if e.gpu_without_driver else None


def tensorflow_too_early(e: Environment, engine: str) -> str | None:
    """TensorFlow reads these variables when it is imported, and never again."""
    if not e.chip or e.chip.name not in PJRT_CHIPS or "tensorflow" not in e.imported:
        return None
    missing = [name for name in PJRT_VARIABLES if name not in e.variables]
    return ", ".join(missing) or None


def keras_on_other_backend(e: Environment, engine: str) -> str | None:
    if "keras" not in e.imported or e.keras_backend in (None, engine):
        return None
    return str(e.keras_backend)


def keras_variable_conflicts(e: Environment, engine: str) -> str | None:
    value = e.variables.get("KERAS_BACKEND")
    if "keras" in e.imported or value in (None, engine):
        return None
    return f"KERAS_BACKEND={value}"


def jax_beside_tensorflow(e: Environment, engine: str) -> str | None:
    if _has_tpu(e) and {"jax", "tensorflow"} <= e.imported and "tensorflow-tpu" in e.builds:
        return "jax and tensorflow"
    return None


def legacy_address(e: Environment, engine: str) -> str | None:
    for name in ("COLAB_TPU_ADDR", "XRT_TPU_CONFIG"):
        if e.variables.get(name):
            return f"{name}={e.variables[name]}"
    name = e.variables.get("TPU_NAME", "")
    return f"TPU_NAME={name}" if name.startswith("grpc://") else None


def tpu_name(value: str) -> Check:
    def check(e: Environment, engine: str) -> str | None:
        return f"TPU_NAME={value!r}" if e.variables.get("TPU_NAME") == value else None

    return check


def asks_metadata(e: Environment, engine: str) -> str | None:
    answered = e.platform == "cloud_tpu_vm" and e.on_gce
    told = e.variables.get("TPU_PROCESS_ADDRESSES") == "local"
    if "libtpu" not in e.builds or answered or told or e.variables.get("TPU_SKIP_MDS_QUERY"):
        return None
    return f"libtpu {e.builds['libtpu']}"


def tensorboard_setuptools(e: Environment, engine: str) -> str | None:
    if "tensorboard" not in e.builds or version(e.builds["tensorboard"]) >= (2, 21):
        return None
    setuptools = e.builds.get("setuptools")
    if setuptools is None:
        return "no setuptools"
    return f"setuptools {setuptools}" if version(setuptools) >= (82,) else None


def tensorboard_missing(e: Environment, engine: str) -> str | None:
    return None if "tensorboard" in e.builds else "no tensorboard"


def keras_hub_newer(e: Environment, engine: str) -> str | None:
    hub, keras = e.builds.get("keras-hub"), e.builds.get("keras")
    if not hub or not keras or version(hub) < (0, 32) or version(keras) >= (3, 15):
        return None
    return f"keras-hub {hub} beside keras {keras}"


def keras_hub_without_tensorflow(e: Environment, engine: str) -> str | None:
    hub = e.builds.get("keras-hub")
    if not hub or version(hub) >= (0, 32) or "tensorflow-tpu" in e.builds or stock_tensorflow(e):
        return None
    return f"keras-hub {hub}"


def text_mismatch(e: Environment, engine: str) -> str | None:
    stock = stock_tensorflow(e) or f"tensorflow-tpu {e.builds.get('tensorflow-tpu', '')}"
    text, tensorflow = e.builds.get("tensorflow-text", ""), stock.split(" ")[1]
    if not text or not tensorflow or version(text)[:2] == version(tensorflow)[:2]:
        return None
    return f"tensorflow-text {text} beside {stock}"


def held(e: Environment, engine: str) -> str | None:
    if not e.tpu_holders:
        return None
    return ", ".join(f"pid {h.pid} ({h.name}) holds {h.path}" for h in e.tpu_holders)


def unknown_chip(e: Environment, engine: str) -> str | None:
    return "; ".join(e.evidence) if _has_tpu(e) and e.chip is None else None


def control_service_unknown(e: Environment, engine: str) -> str | None:
    """Colab's v6e needs that address; a shell beside the kernel has none of Colab's variables."""
    if e.platform != "colab" or not e.chip or e.chip.name != "v6e":
        return None
    return None if e.variables.get("VBAR_CONTROL_SERVICE_URL") else e.device


def variable_without_device(e: Environment, engine: str) -> str | None:
    seen_on_bus = any(line.startswith("PCI bus") for line in e.evidence)
    if e.platform != "cloud_tpu_vm" or e.tpu_nodes or seen_on_bus:
        return None
    return "; ".join(e.evidence)


def no_accelerator(e: Environment, engine: str) -> str | None:
    return e.platform if e.accelerator == "cpu" else None
