"""What goes wrong on these runtimes, as data: how it is seen, why it happens, the exact fix.

`doctor.diagnose` runs every check below against an `Environment`; `doctor.choose_engine` takes
the first engine that none of its own errors stands against. An entry that belongs to one engine
is an error for that engine alone and a mere note for the other. Error texts that only show
later stand in connecting_symptoms.py and training_symptoms.py, as `Symptom`s.
"""

from dataclasses import dataclass

from colabtpu import checks
from colabtpu.checks import LIBTPU_SPECIFIER, Check

INSTALL = "python -m colabtpu install"
RESTART = "restart the kernel (Colab: Runtime > Restart session)"


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


@dataclass(frozen=True)
class Symptom:
    """One error text.

    Attributes:
        code: its short name, stable between releases.
        shows: the text as people see it, shortened.
        pattern: a regular expression that finds it.
        cause: what it means.
        fix: the exact next step.
        source: where it was met.
        frames: where the text alone is too general, a regular expression that must also fit a
            file of the traceback.
    """

    code: str
    shows: str
    pattern: str
    cause: str
    fix: str
    source: str
    frames: str | None = None


ENTRIES = (
    Entry(
        "python-unsupported", "error",
        "Python {seen} is outside 3.11 to 3.13.",
        "tensorflow-tpu 2.20.0 has wheels up to Python 3.13, and this package uses what "
        "Python 3.11 brought.",
        "Take another runtime version (Colab: Runtime > Change runtime type > Runtime version), "
        "or make a virtual environment with Python 3.11, 3.12 or 3.13.",
        check=checks.outside_pythons,
    ),
    Entry(
        "keras-missing", "error",
        "Keras is not installed ({seen}).",
        "Both engines run the same Keras model.",
        INSTALL,
        check=checks.keras_missing,
    ),
    Entry(
        "keras-2", "error",
        "Keras {seen} is Keras 2.",
        "Models here are Keras 3, which runs on TensorFlow and on JAX.",
        f"{INSTALL}; then {RESTART}",
        check=checks.keras_2,
    ),
    Entry(
        "keras-untried", "warning",
        "Keras {seen} is older than 3.13.2.",
        "3.13.2 is the oldest release this package was tried with; up to 3.9.2 training on more "
        "than one replica gave NaN (keras#21061).",
        f"{INSTALL}; then {RESTART}",
        check=checks.keras_untried,
    ),
    Entry(
        "keras-hub-newer-than-keras", "warning",
        "{seen}: keras-hub 0.32 needs Keras 3.15 or newer.",
        "keras-hub was installed with --no-deps, or Keras was put back afterwards.",
        f'{INSTALL}, or: pip install --no-deps "keras>=3.15.1,<3.16"',
        check=checks.keras_hub_newer,
    ),
    Entry(
        "keras-hub-without-tensorflow", "warning",
        "{seen} cannot be imported: TensorFlow is not installed.",
        "Before 0.32 keras-hub imported TensorFlow even on the JAX backend.",
        f"{INSTALL} --engine jax",
        engine="jax", check=checks.keras_hub_without_tensorflow,
    ),
    Entry(
        "tensorflow-text-of-another-release", "warning",
        "{seen}: its compiled ops belong to another TensorFlow.",
        "tensorflow-text must have the same first two numbers as TensorFlow; else importing it "
        "ends in 'undefined symbol'.",
        f"pip uninstall -y tensorflow-text, then {INSTALL} --engine tensorflow",
        engine="tensorflow", check=checks.text_mismatch,
    ),
    Entry(
        "tensorflow-missing-on-tpu", "error",
        "TensorFlow is not installed; the device is {seen}.",
        "Colab's TPU image has had no TensorFlow since March 2025; the JAX engine needs none.",
        f"{INSTALL} --engine tensorflow, or take the JAX engine: connect(engine='jax')",
        engine="tensorflow", check=checks.no_tensorflow_on_tpu,
    ),
    Entry(
        "stock-tensorflow-on-tpu", "error",
        "{seen} has no TPU kernels.",
        "TPU support is in another wheel, tensorflow-tpu; the stock one fails with \"No OpKernel "
        "was registered to support Op 'ConfigureDistributedTPU'\".",
        f"{INSTALL} --engine tensorflow (it removes the stock wheel first), or take the JAX "
        "engine: connect(engine='jax')",
        engine="tensorflow", check=checks.stock_tensorflow_on_tpu,
    ),
    Entry(
        "kaggle-tensorflow-cpu", "error",
        "Kaggle's TPU image ships tensorflow-cpu {seen}, which cannot use the TPU.",
        "Kaggle took tensorflow-tpu out in September 2025, for want of a libtpu that fits both "
        "TensorFlow and JAX.",
        f"{INSTALL} --engine tensorflow (needs Internet switched on in the notebook's settings), "
        "or take the JAX engine: connect(engine='jax')",
        engine="tensorflow", check=checks.kaggle_tensorflow_cpu,
    ),
    Entry(
        "two-tensorflows", "error",
        "Two TensorFlows are installed: {seen}.",
        "Both own the directory tensorflow/; the one that was installed last has overwritten "
        "the other, and pip does not notice.",
        f"{INSTALL} --engine tensorflow (it removes the stock one and puts tensorflow-tpu back); "
        f"then {RESTART}",
        engine="tensorflow", check=checks.two_tensorflows,
    ),
    Entry(
        "keras-hub-pulled-tensorflow", "warning",
        "{seen} asks pip for stock tensorflow, which then overwrites tensorflow-tpu.",
        "Their metadata says `tensorflow`; tensorflow-tpu does not count as that.",
        "Install them with --no-deps: pip install --no-deps tensorflow-text==2.20.1 "
        f"keras-hub==0.32.0; `{INSTALL} --engine tensorflow` does it for you",
        engine="tensorflow", check=checks.pulled_by_keras_hub,
    ),
    Entry(
        "libtpu-outside-range", "error",
        "{seen}: `import tensorflow` would abort this process.",
        "tensorflow-tpu 2.20.0 asks for libtpu~=0.0.14, so pip takes the newest; those after "
        "0.0.30 and before 0.0.14 lack functions that it calls.",
        f'pip install "libtpu{LIBTPU_SPECIFIER}"; then {RESTART}',
        engine="tensorflow", check=checks.libtpu_outside,
    ),
    Entry(
        "tensorflow-without-libtpu", "error",
        "{seen} is installed without libtpu.",
        "libtpu is the driver library that both engines reach the chip through.",
        f'pip install "libtpu{LIBTPU_SPECIFIER}"; then {RESTART}',
        engine="tensorflow", check=checks.tensorflow_without_libtpu,
    ),
    Entry(
        "tpu7x-has-no-tensorflow", "error",
        "TensorFlow does not support {seen}.",
        "Google's page on TPU7x says: JAX and PyTorch only.",
        "Take the JAX engine: connect(engine='jax')",
        engine="tensorflow", check=checks.tpu7x,
    ),
    Entry(
        "tensorflow-missing", "error",
        "TensorFlow is not installed; the device is {seen}.",
        "The TensorFlow engine was asked for, or no engine is installed at all.",
        f"{INSTALL} --engine tensorflow",
        engine="tensorflow", check=checks.tensorflow_missing,
    ),
    Entry(
        "tpu-library-off", "error",
        "{seen} keeps TensorFlow from loading libtpu.",
        "With it TensorFlow fails with \"No matching devices found for '/device:TPU_SYSTEM:0'\".",
        f"del os.environ['TPU_LOAD_LIBRARY']; then {RESTART}",
        engine="tensorflow", check=checks.library_off,
    ),
    Entry(
        "legacy-keras", "error",
        "{seen} makes tf.keras mean Keras 2.",
        "Models here are Keras 3; mixing the two fails in fit().",
        f"del os.environ['TF_USE_LEGACY_KERAS']; then {RESTART}",
        engine="tensorflow", check=checks.legacy_keras,
    ),
    Entry(
        "tensorflow-imported-too-early", "error",
        "TensorFlow was imported before these variables were set: {seen}.",
        "On v5e, v5p and v6e TensorFlow reaches the chip through PJRT, and reads those variables "
        "once, when it is imported.",
        f"{RESTART[0].upper()}{RESTART[1:]}, and call colabtpu.connect() before anything "
        "imports tensorflow",
        engine="tensorflow", check=checks.tensorflow_too_early,
    ),
    Entry(
        "jax-missing", "error",
        "The JAX engine lacks {seen}.",
        "It was asked for, or no engine is installed at all.",
        f"{INSTALL} --engine jax",
        engine="jax", check=checks.jax_missing,
    ),
    Entry(
        "jax-without-libtpu", "error",
        "{seen} is installed without libtpu, so it sees no TPU.",
        "libtpu is the driver library that both engines reach the chip through.",
        f"{INSTALL} --engine jax",
        engine="jax", check=checks.jax_without_libtpu,
    ),
    Entry(
        "jax-held-to-another-platform", "error",
        "{seen} hides the best device from JAX.",
        "JAX starts the platforms in that list and no others.",
        f"del os.environ['JAX_PLATFORMS']; then {RESTART} if jax was used already",
        engine="jax", check=checks.jax_held_to_cpu,
    ),
    Entry(
        "gpu-with-cpu-only-tensorflow", "error",
        "A GPU is present, but {seen} cannot use it.",
        "tensorflow-cpu and tensorflow-tpu have no CUDA kernels, and plain `tensorflow` needs "
        "CUDA's libraries beside it.",
        f"{INSTALL} --engine tensorflow",
        engine="tensorflow", check=checks.gpu_without_cuda_tensorflow,
    ),
    Entry(
        "gpu-with-cpu-only-jax", "error",
        "A GPU is present, but {seen} has no CUDA plugin.",
        "`pip install jax` installs the CPU build alone.",
        f"{INSTALL} --engine jax",
        engine="jax", check=checks.gpu_without_cuda_jax,
    ),
    Entry(
        "gpu-without-driver", "warning",
        "There is {seen}, but no NVIDIA driver.",
        "Without the driver no framework can use it; training will run on the CPU.",
        "Install NVIDIA's driver; `nvidia-smi` must list the GPU.",
        check=checks.gpu_without_driver,
    ),
    Entry(
        "keras-imported-on-another-backend", "error",
        "Keras was imported with the backend {seen!r}.",
        "Keras reads KERAS_BACKEND once, when it is imported; setting it later has no effect "
        "(keras#19423).",
        f"{RESTART[0].upper()}{RESTART[1:]}, and call colabtpu.connect() before anything "
        "imports keras",
        check=checks.keras_on_other_backend,
    ),
    Entry(
        "keras-backend-conflicts", "warning",
        "{seen}, but this run would take another engine.",
        "The variable asks Keras for one backend, the choice of engine for another.",
        "Ask for that engine, such as connect(engine='jax'), or remove KERAS_BACKEND.",
        check=checks.keras_variable_conflicts,
    ),
    Entry(
        "jax-beside-tensorflow", "warning",
        "Both {seen} are imported in this process.",
        "Only one of them can open the TPU; the second one fails or hangs.",
        f"Use one engine a process: {RESTART}.",
        check=checks.jax_beside_tensorflow,
    ),
    Entry(
        "tpu-held-by-another-process", "error",
        "The TPU is in use: {seen}.",
        "A TPU belongs to one process at a time; a notebook that was left open keeps it.",
        "End that process: shut its kernel down, or `kill` its pid.",
        check=checks.held,
    ),
    Entry(
        "legacy-tpu-address", "warning",
        "{seen} is the address of a TPU Node.",
        "Colab ended TPU Nodes in 2024 and Google Cloud in April 2025; today's TPU is attached "
        "to this machine.",
        "Remove the variable, or connect(tpu='grpc://...') if that worker really lives.",
        check=checks.legacy_address,
    ),
    Entry(
        "tpu-name-local", "warning",
        "{seen} is not the same as TPUClusterResolver(tpu='local').",
        "TensorFlow takes the variable for a name to look up at Google Cloud, and first asks "
        "a metadata server that is not there.",
        "Remove TPU_NAME and pass tpu='local'; connect() does so.",
        engine="tensorflow", check=checks.tpu_name("local"),
    ),
    Entry(
        "tpu-name-empty", "warning",
        "{seen} is set but empty.",
        "TensorFlow then asks the metadata server and fails with URLError.",
        "Remove TPU_NAME; connect() passes tpu='local'.",
        engine="tensorflow", check=checks.tpu_name(""),
    ),
    Entry(
        "metadata-server-is-asked", "note",
        "TPU_SKIP_MDS_QUERY is not set, so {seen} will ask a metadata server.",
        "Off Google Cloud there is none, and 30 attempts pass before libtpu gives up (jax#11668).",
        "os.environ['TPU_SKIP_MDS_QUERY'] = '1'; connect() sets it.",
        check=checks.asks_metadata,
    ),
    Entry(
        "tensorboard-without-pkg-resources", "warning",
        "TensorBoard 2.20 cannot start with {seen}.",
        "It imports pkg_resources, which setuptools 82 removed.",
        'pip install "setuptools<82"',
        check=checks.tensorboard_setuptools,
    ),
    Entry(
        "tensorboard-missing", "warning",
        "TensorBoard is not installed ({seen}).",
        "Colab's TPU image has none; training works, but leaves no curves.",
        INSTALL,
        check=checks.tensorboard_missing,
    ),
    Entry(
        "unknown-tpu", "warning",
        "There is a TPU, of a generation that could not be read ({seen}).",
        "MFU and memory figures need the generation.",
        "Set TPU_ACCELERATOR_TYPE, such as 'v5e-8', before connect().",
        check=checks.unknown_chip,
    ),
    Entry(
        "tpu-variable-without-a-chip", "warning",
        "{seen}, but no chip is visible on the PCI bus or under /dev.",
        "The variable may be left over, or the container was not given the device.",
        "Remove the variable if this machine has no TPU; else pass the device to the container.",
        check=checks.variable_without_device,
    ),
    Entry(
        "control-service-unknown", "warning",
        "VBAR_CONTROL_SERVICE_URL is not set on Colab's {seen}.",
        "Without it libtpu waits for a minute and ends with DEADLINE_EXCEEDED; the notebook's "
        "kernel has the variable, a terminal or ssh session may not.",
        "Run from the notebook, or copy the kernel's TPU_* and VBAR_* variables to the shell.",
        check=checks.control_service_unknown,
    ),
    Entry(
        "no-accelerator", "note",
        "Neither a TPU nor a GPU is attached to this {seen} runtime.",
        "Training will run on the CPU, as 8 logical devices.",
        "Colab: Runtime > Change runtime type > v5e-1 TPU. Kaggle: Settings > Accelerator.",
        check=checks.no_accelerator,
    ),
)  # fmt: skip
