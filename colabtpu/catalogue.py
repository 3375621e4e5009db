"""What goes wrong on these runtimes, as data: how it is seen, why it happens, the exact fix.

`doctor.diagnose` runs every check below against an `Environment`; `doctor.choose_engine` takes
the first engine that none of its own errors stands against. An entry that belongs to one engine
is an error for that engine alone and a mere note for the other.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

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

INSTALL = "python -m colabtpu install"
RESTART = "restart the kernel (Colab: Runtime > Restart session)"

Check = Callable[[Environment, str], str | None]


@dataclass(frozen=True)
class Entry:
    """One thing that goes wrong.

    Attributes:
        code: its short name, stable between releases.
        severity: `"error"` where a training run cannot start, `"warning"` where something will
            bite later, `"note"` where it is merely good to know.
        what: what is wrong; `{seen}` stands for the value that was seen.
        why: the cause.
        fix: the exact next step.
        engine: the engine it belongs to, `None` for both.
        check: takes the environment and the engine; returns the value seen, or `None` if all
            is well.
    """

    code: str
    severity: str
    what: str
    why: str
    fix: str
    engine: str | None = None
    check: Check | None = None


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


def _outside_pythons(e: Environment, engine: str) -> str | None:
    return None if PYTHONS[0] <= version(e.python)[:2] <= PYTHONS[1] else e.python


def _keras_2(e: Environment, engine: str) -> str | None:
    keras = e.builds.get("keras")
    return keras if keras and version(keras) < (3,) else None


def _keras_untried(e: Environment, engine: str) -> str | None:
    keras = e.builds.get("keras")
    return keras if keras and (3,) <= version(keras) < OLDEST_KERAS else None


def _keras_missing(e: Environment, engine: str) -> str | None:
    return None if "keras" in e.builds else "no keras"


def _no_tensorflow_on_tpu(e: Environment, engine: str) -> str | None:
    if not _has_tpu(e) or "tensorflow-tpu" in e.builds or stock_tensorflow(e):
        return None
    return e.device


def _stock_tensorflow_on_tpu(e: Environment, engine: str) -> str | None:
    if not _has_tpu(e) or "tensorflow-tpu" in e.builds or _kaggle_tensorflow_cpu(e, engine):
        return None
    return stock_tensorflow(e)


def _kaggle_tensorflow_cpu(e: Environment, engine: str) -> str | None:
    if e.platform != "kaggle" or not _has_tpu(e) or "tensorflow-tpu" in e.builds:
        return None
    return e.builds.get("tensorflow-cpu")


def _two_tensorflows(e: Environment, engine: str) -> str | None:
    stock = stock_tensorflow(e)
    if stock is None or "tensorflow-tpu" not in e.builds:
        return None
    return f"tensorflow-tpu {e.builds['tensorflow-tpu']} and {stock}"


def _pulled_by_keras_hub(e: Environment, engine: str) -> str | None:
    if _two_tensorflows(e, engine) is None:
        return None
    pullers = [n for n in ("keras-hub", "keras-nlp", "tensorflow-text") if n in e.builds]
    return " and ".join(pullers) or None


def _libtpu_outside(e: Environment, engine: str) -> str | None:
    if "tensorflow-tpu" not in e.builds or "libtpu" not in e.builds or libtpu_fits(e):
        return None
    return f"libtpu {e.builds['libtpu']} beside tensorflow-tpu {e.builds['tensorflow-tpu']}"


def _tensorflow_without_libtpu(e: Environment, engine: str) -> str | None:
    if _has_tpu(e) and "tensorflow-tpu" in e.builds and "libtpu" not in e.builds:
        return f"tensorflow-tpu {e.builds['tensorflow-tpu']}"
    return None


def _tpu7x(e: Environment, engine: str) -> str | None:
    return e.device if e.chip and e.chip.name == "tpu7x" else None


def _tensorflow_missing(e: Environment, engine: str) -> str | None:
    if _has_tpu(e) or "tensorflow-tpu" in e.builds or stock_tensorflow(e):
        return None
    return e.device


def _library_off(e: Environment, engine: str) -> str | None:
    value = e.variables.get("TPU_LOAD_LIBRARY")
    return f"TPU_LOAD_LIBRARY={value}" if _has_tpu(e) and value == "0" else None


def _legacy_keras(e: Environment, engine: str) -> str | None:
    value = e.variables.get("TF_USE_LEGACY_KERAS", "")
    return f"TF_USE_LEGACY_KERAS={value}" if value.lower() in ("1", "true") else None


def _jax_missing(e: Environment, engine: str) -> str | None:
    missing = [name for name in ("jax", "jaxlib") if name not in e.builds]
    return " and ".join(missing) or None


def _jax_without_libtpu(e: Environment, engine: str) -> str | None:
    if _has_tpu(e) and "libtpu" not in e.builds:
        return f"jax {e.builds.get('jax', '(absent)')}"
    return None


def _jax_held_to_cpu(e: Environment, engine: str) -> str | None:
    value = e.variables.get("JAX_PLATFORMS", "")
    wanted = {"tpu": ("tpu",), "gpu": ("cuda", "gpu")}.get(e.accelerator, ())
    if not value or not wanted or any(w in value.split(",") for w in wanted):
        return None
    return f"JAX_PLATFORMS={value}"


def _gpu_without_cuda_tensorflow(e: Environment, engine: str) -> str | None:
    if e.accelerator != "gpu":
        return None
    if "tensorflow" in e.builds and e.cuda_libraries:
        return None
    if "tensorflow" in e.builds:
        return f"tensorflow {e.builds['tensorflow']} without CUDA's libraries"
    if "tensorflow-tpu" in e.builds:
        return f"tensorflow-tpu {e.builds['tensorflow-tpu']}"
    return stock_tensorflow(e)


def _gpu_without_cuda_jax(e: Environment, engine: str) -> str | None:
    plugins = ("jax-cuda12-plugin", "jax-cuda13-plugin")
    if e.accelerator != "gpu" or "jax" not in e.builds or any(p in e.builds for p in plugins):
        return None
    return f"jax {e.builds['jax']}"


def _gpu_without_driver(e: Environment, engine: str) -> str | None:
    return "an NVIDIA GPU on the PCI bus" if e.gpu_without_driver else None


def _tensorflow_too_early(e: Environment, engine: str) -> str | None:
    """TensorFlow reads these variables when it is imported, and never again."""
    if not e.chip or e.chip.name not in PJRT_CHIPS or "tensorflow" not in e.imported:
        return None
    missing = [
        name
        for name in ("PJRT_DEVICE", "NEXT_PLUGGABLE_DEVICE_USE_C_API", _PLUGIN_PATH)
        if name not in e.variables
    ]
    return ", ".join(missing) or None


_PLUGIN_PATH = "TF_PLUGGABLE_DEVICE_LIBRARY_PATH"


def _keras_on_other_backend(e: Environment, engine: str) -> str | None:
    if "keras" not in e.imported or e.keras_backend in (None, engine):
        return None
    return str(e.keras_backend)


def _keras_variable_conflicts(e: Environment, engine: str) -> str | None:
    value = e.variables.get("KERAS_BACKEND")
    if "keras" in e.imported or value in (None, engine):
        return None
    return f"KERAS_BACKEND={value}"


def _jax_beside_tensorflow(e: Environment, engine: str) -> str | None:
    if _has_tpu(e) and {"jax", "tensorflow"} <= e.imported and "tensorflow-tpu" in e.builds:
        return "jax and tensorflow"
    return None


def _legacy_address(e: Environment, engine: str) -> str | None:
    for name in ("COLAB_TPU_ADDR", "XRT_TPU_CONFIG"):
        if e.variables.get(name):
            return f"{name}={e.variables[name]}"
    name = e.variables.get("TPU_NAME", "")
    return f"TPU_NAME={name}" if name.startswith("grpc://") else None


def _tpu_name(value: str) -> Check:
    def check(e: Environment, engine: str) -> str | None:
        return f"TPU_NAME={value!r}" if e.variables.get("TPU_NAME") == value else None

    return check


def _asks_metadata(e: Environment, engine: str) -> str | None:
    answered = e.platform == "cloud_tpu_vm" and e.on_gce
    told = e.variables.get("TPU_PROCESS_ADDRESSES") == "local"
    if "libtpu" not in e.builds or answered or told or e.variables.get("TPU_SKIP_MDS_QUERY"):
        return None
    return f"libtpu {e.builds['libtpu']}"


def _tensorboard_setuptools(e: Environment, engine: str) -> str | None:
    if "tensorboard" not in e.builds or version(e.builds["tensorboard"]) >= (2, 21):
        return None
    setuptools = e.builds.get("setuptools")
    if setuptools is None:
        return "no setuptools"
    return f"setuptools {setuptools}" if version(setuptools) >= (82,) else None


def _tensorboard_missing(e: Environment, engine: str) -> str | None:
    return None if "tensorboard" in e.builds else "no tensorboard"


def _keras_hub_newer(e: Environment, engine: str) -> str | None:
    hub, keras = e.builds.get("keras-hub"), e.builds.get("keras")
    if not hub or not keras or version(hub) < (0, 32) or version(keras) >= (3, 15):
        return None
    return f"keras-hub {hub} beside keras {keras}"


def _text_mismatch(e: Environment, engine: str) -> str | None:
    stock = stock_tensorflow(e) or f"tensorflow-tpu {e.builds.get('tensorflow-tpu', '')}"
    text, tensorflow = e.builds.get("tensorflow-text", ""), stock.split(" ")[1]
    if not text or not tensorflow or version(text)[:2] == version(tensorflow)[:2]:
        return None
    return f"tensorflow-text {text} beside {stock}"


def _held(e: Environment, engine: str) -> str | None:
    if not e.tpu_holders:
        return None
    return ", ".join(f"pid {h.pid} ({h.name}) holds {h.path}" for h in e.tpu_holders)


def _unknown_chip(e: Environment, engine: str) -> str | None:
    return "; ".join(e.evidence) if _has_tpu(e) and e.chip is None else None


def _variable_without_device(e: Environment, engine: str) -> str | None:
    seen_on_bus = any(line.startswith("PCI bus") for line in e.evidence)
    if e.platform != "cloud_tpu_vm" or e.tpu_nodes or seen_on_bus:
        return None
    return "; ".join(e.evidence)


def _no_accelerator(e: Environment, engine: str) -> str | None:
    return e.platform if e.accelerator == "cpu" else None


ENTRIES = (
    Entry(
        "python-unsupported", "error",
        "Python {seen} is outside 3.11 to 3.13.",
        "tensorflow-tpu 2.20.0 has wheels up to Python 3.13, and this package uses what "
        "Python 3.11 brought.",
        "Take another runtime version (Colab: Runtime > Change runtime type > Runtime version), "
        "or make a virtual environment with Python 3.11, 3.12 or 3.13.",
        check=_outside_pythons,
    ),
    Entry(
        "keras-missing", "error",
        "Keras is not installed ({seen}).",
        "Both engines run the same Keras model.",
        INSTALL,
        check=_keras_missing,
    ),
    Entry(
        "keras-2", "error",
        "Keras {seen} is Keras 2.",
        "Models here are Keras 3, which runs on TensorFlow and on JAX.",
        f"{INSTALL}; then {RESTART}",
        check=_keras_2,
    ),
    Entry(
        "keras-untried", "warning",
        "Keras {seen} is older than 3.13.2.",
        "3.13.2 is the oldest release this package was tried with; up to 3.9.2 training on more "
        "than one replica gave NaN (keras#21061).",
        f"{INSTALL}; then {RESTART}",
        check=_keras_untried,
    ),
    Entry(
        "keras-hub-newer-than-keras", "warning",
        "{seen}: keras-hub 0.32 needs Keras 3.15 or newer.",
        "keras-hub was installed with --no-deps, or Keras was put back afterwards.",
        f'{INSTALL}, or: pip install --no-deps "keras>=3.15.1,<3.16"',
        check=_keras_hub_newer,
    ),
    Entry(
        "tensorflow-text-of-another-release", "warning",
        "{seen}: its compiled ops belong to another TensorFlow.",
        "tensorflow-text must have the same first two numbers as TensorFlow; else importing it "
        "ends in 'undefined symbol'.",
        f"pip uninstall -y tensorflow-text, then {INSTALL} --engine tensorflow",
        engine="tensorflow", check=_text_mismatch,
    ),
    Entry(
        "tensorflow-missing-on-tpu", "error",
        "TensorFlow is not installed; the device is {seen}.",
        "Colab's TPU image has had no TensorFlow since March 2025; the JAX engine needs none.",
        f"{INSTALL} --engine tensorflow, or take the JAX engine: connect(engine='jax')",
        engine="tensorflow", check=_no_tensorflow_on_tpu,
    ),
    Entry(
        "stock-tensorflow-on-tpu", "error",
        "{seen} has no TPU kernels.",
        "TPU support is in another wheel, tensorflow-tpu; the stock one fails with \"No OpKernel "
        "was registered to support Op 'ConfigureDistributedTPU'\".",
        f"{INSTALL} --engine tensorflow (it removes the stock wheel first), or take the JAX "
        "engine: connect(engine='jax')",
        engine="tensorflow", check=_stock_tensorflow_on_tpu,
    ),
    Entry(
        "kaggle-tensorflow-cpu", "error",
        "Kaggle's TPU image ships tensorflow-cpu {seen}, which cannot use the TPU.",
        "Kaggle took tensorflow-tpu out in September 2025, for want of a libtpu that fits both "
        "TensorFlow and JAX.",
        f"{INSTALL} --engine tensorflow (needs Internet switched on in the notebook's settings), "
        "or take the JAX engine: connect(engine='jax')",
        engine="tensorflow", check=_kaggle_tensorflow_cpu,
    ),
    Entry(
        "two-tensorflows", "error",
        "Two TensorFlows are installed: {seen}.",
        "Both own the directory tensorflow/; the one that was installed last has overwritten "
        "the other, and pip does not notice.",
        f"{INSTALL} --engine tensorflow (it removes the stock one and puts tensorflow-tpu back); "
        f"then {RESTART}",
        engine="tensorflow", check=_two_tensorflows,
    ),
    Entry(
        "keras-hub-pulled-tensorflow", "warning",
        "{seen} asks pip for stock tensorflow, which then overwrites tensorflow-tpu.",
        "Their metadata says `tensorflow`; tensorflow-tpu does not count as that.",
        "Install them with --no-deps: pip install --no-deps tensorflow-text==2.20.1 "
        f"keras-hub==0.32.0; `{INSTALL} --engine tensorflow` does it for you",
        engine="tensorflow", check=_pulled_by_keras_hub,
    ),
    Entry(
        "libtpu-outside-range", "error",
        "{seen}: `import tensorflow` would abort this process.",
        "tensorflow-tpu 2.20.0 asks for libtpu~=0.0.14, so pip takes the newest; those after "
        "0.0.30 and before 0.0.14 lack functions that it calls.",
        f'pip install "libtpu{LIBTPU_SPECIFIER}"; then {RESTART}',
        engine="tensorflow", check=_libtpu_outside,
    ),
    Entry(
        "tensorflow-without-libtpu", "error",
        "{seen} is installed without libtpu.",
        "libtpu is the driver library that both engines reach the chip through.",
        f'pip install "libtpu{LIBTPU_SPECIFIER}"; then {RESTART}',
        engine="tensorflow", check=_tensorflow_without_libtpu,
    ),
    Entry(
        "tpu7x-has-no-tensorflow", "error",
        "TensorFlow does not support {seen}.",
        "Google's page on TPU7x says: JAX and PyTorch only.",
        "Take the JAX engine: connect(engine='jax')",
        engine="tensorflow", check=_tpu7x,
    ),
    Entry(
        "tensorflow-missing", "error",
        "TensorFlow is not installed; the device is {seen}.",
        "The TensorFlow engine was asked for, or no engine is installed at all.",
        f"{INSTALL} --engine tensorflow",
        engine="tensorflow", check=_tensorflow_missing,
    ),
    Entry(
        "tpu-library-off", "error",
        "{seen} keeps TensorFlow from loading libtpu.",
        "With it TensorFlow fails with \"No matching devices found for '/device:TPU_SYSTEM:0'\".",
        f"del os.environ['TPU_LOAD_LIBRARY']; then {RESTART}",
        engine="tensorflow", check=_library_off,
    ),
    Entry(
        "legacy-keras", "error",
        "{seen} makes tf.keras mean Keras 2.",
        "Models here are Keras 3; mixing the two fails in fit().",
        f"del os.environ['TF_USE_LEGACY_KERAS']; then {RESTART}",
        engine="tensorflow", check=_legacy_keras,
    ),
    Entry(
        "tensorflow-imported-too-early", "error",
        "TensorFlow was imported before these variables were set: {seen}.",
        "On v5e, v5p and v6e TensorFlow reaches the chip through PJRT, and reads those variables "
        "once, when it is imported.",
        f"{RESTART[0].upper()}{RESTART[1:]}, and call colabtpu.connect() before anything "
        "imports tensorflow",
        engine="tensorflow", check=_tensorflow_too_early,
    ),
    Entry(
        "jax-missing", "error",
        "The JAX engine lacks {seen}.",
        "It was asked for, or no engine is installed at all.",
        f"{INSTALL} --engine jax",
        engine="jax", check=_jax_missing,
    ),
    Entry(
        "jax-without-libtpu", "error",
        "{seen} is installed without libtpu, so it sees no TPU.",
        "libtpu is the driver library that both engines reach the chip through.",
        f"{INSTALL} --engine jax",
        engine="jax", check=_jax_without_libtpu,
    ),
    Entry(
        "jax-held-to-another-platform", "error",
        "{seen} hides the best device from JAX.",
        "JAX starts the platforms in that list and no others.",
        f"del os.environ['JAX_PLATFORMS']; then {RESTART} if jax was used already",
        engine="jax", check=_jax_held_to_cpu,
    ),
    Entry(
        "gpu-with-cpu-only-tensorflow", "error",
        "A GPU is present, but {seen} cannot use it.",
        "tensorflow-cpu and tensorflow-tpu have no CUDA kernels, and plain `tensorflow` needs "
        "CUDA's libraries beside it.",
        f"{INSTALL} --engine tensorflow",
        engine="tensorflow", check=_gpu_without_cuda_tensorflow,
    ),
    Entry(
        "gpu-with-cpu-only-jax", "error",
        "A GPU is present, but {seen} has no CUDA plugin.",
        "`pip install jax` installs the CPU build alone.",
        f"{INSTALL} --engine jax",
        engine="jax", check=_gpu_without_cuda_jax,
    ),
    Entry(
        "gpu-without-driver", "warning",
        "There is {seen}, but no NVIDIA driver.",
        "Without the driver no framework can use it; training will run on the CPU.",
        "Install NVIDIA's driver; `nvidia-smi` must list the GPU.",
        check=_gpu_without_driver,
    ),
    Entry(
        "keras-imported-on-another-backend", "error",
        "Keras was imported with the backend {seen!r}.",
        "Keras reads KERAS_BACKEND once, when it is imported; setting it later has no effect "
        "(keras#19423).",
        f"{RESTART[0].upper()}{RESTART[1:]}, and call colabtpu.connect() before anything "
        "imports keras",
        check=_keras_on_other_backend,
    ),
    Entry(
        "keras-backend-conflicts", "warning",
        "{seen}, but this run would take another engine.",
        "The variable asks Keras for one backend, the choice of engine for another.",
        "Ask for that engine, such as connect(engine='jax'), or remove KERAS_BACKEND.",
        check=_keras_variable_conflicts,
    ),
    Entry(
        "jax-beside-tensorflow", "warning",
        "Both {seen} are imported in this process.",
        "Only one of them can open the TPU; the second one fails or hangs.",
        f"Use one engine a process: {RESTART}.",
        check=_jax_beside_tensorflow,
    ),
    Entry(
        "tpu-held-by-another-process", "error",
        "The TPU is in use: {seen}.",
        "A TPU belongs to one process at a time; a notebook that was left open keeps it.",
        "End that process: shut its kernel down, or `kill` its pid.",
        check=_held,
    ),
    Entry(
        "legacy-tpu-address", "warning",
        "{seen} is the address of a TPU Node.",
        "Colab ended TPU Nodes in 2024 and Google Cloud in April 2025; today's TPU is attached "
        "to this machine.",
        "Remove the variable, or connect(tpu='grpc://...') if that worker really lives.",
        check=_legacy_address,
    ),
    Entry(
        "tpu-name-local", "warning",
        "{seen} is not the same as TPUClusterResolver(tpu='local').",
        "TensorFlow takes the variable for a name to look up at Google Cloud, and first asks "
        "a metadata server that is not there.",
        "Remove TPU_NAME and pass tpu='local'; connect() does so.",
        engine="tensorflow", check=_tpu_name("local"),
    ),
    Entry(
        "tpu-name-empty", "warning",
        "{seen} is set but empty.",
        "TensorFlow then asks the metadata server and fails with URLError.",
        "Remove TPU_NAME; connect() passes tpu='local'.",
        engine="tensorflow", check=_tpu_name(""),
    ),
    Entry(
        "metadata-server-is-asked", "note",
        "TPU_SKIP_MDS_QUERY is not set, so {seen} will ask a metadata server.",
        "Off Google Cloud there is none, and 30 attempts pass before libtpu gives up (jax#11668).",
        "os.environ['TPU_SKIP_MDS_QUERY'] = '1'; connect() sets it.",
        check=_asks_metadata,
    ),
    Entry(
        "tensorboard-without-pkg-resources", "warning",
        "TensorBoard 2.20 cannot start with {seen}.",
        "It imports pkg_resources, which setuptools 82 removed.",
        'pip install "setuptools<82"',
        check=_tensorboard_setuptools,
    ),
    Entry(
        "tensorboard-missing", "warning",
        "TensorBoard is not installed ({seen}).",
        "Colab's TPU image has none; training works, but leaves no curves.",
        INSTALL,
        check=_tensorboard_missing,
    ),
    Entry(
        "unknown-tpu", "warning",
        "There is a TPU, of a generation that could not be read ({seen}).",
        "MFU and memory figures need the generation.",
        "Set TPU_ACCELERATOR_TYPE, such as 'v5e-8', before connect().",
        check=_unknown_chip,
    ),
    Entry(
        "tpu-variable-without-a-chip", "warning",
        "{seen}, but no chip is visible on the PCI bus or under /dev.",
        "The variable may be left over, or the container was not given the device.",
        "Remove the variable if this machine has no TPU; else pass the device to the container.",
        check=_variable_without_device,
    ),
    Entry(
        "no-accelerator", "note",
        "Neither a TPU nor a GPU is attached to this {seen} runtime.",
        "Training will run on the CPU, as 8 logical devices.",
        "Colab: Runtime > Change runtime type > v5e-1 TPU. Kaggle: Settings > Accelerator.",
        check=_no_accelerator,
    ),
)  # fmt: skip
