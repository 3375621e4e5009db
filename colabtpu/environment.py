"""Where am I: the platform, the accelerator, the installed builds. Imports no ML framework.

    from colabtpu import environment
    environment.detect().accelerator         # "tpu", "gpu" or "cpu"

`python -m colabtpu doctor` prints it. Everything is read from variables, from files under
/sys, /proc and /dev, and from the metadata of installed distributions: importing TensorFlow
on a TPU machine would take the TPU.
"""

import os
import platform as python_platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from colabtpu import chips
from colabtpu.chips import Chip
from colabtpu.errors import InvalidArgumentError

# The distributions whose presence or version decides something.
DISTRIBUTIONS = (
    "tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tf-nightly", "tensorflow-text",
    "keras", "keras-hub", "keras-nlp", "tf-keras", "jax", "jaxlib", "libtpu",
    "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "torch", "torch-xla",
    "tensorboard", "tensorboard-plugin-profile", "xprof", "setuptools", "protobuf", "numpy",
    "ml-dtypes", "tokenizers", "sentencepiece", "tensorflow-datasets", "importlib-resources",
    "array-record", "grain", "ipywidgets", "ipykernel", "matplotlib", "safetensors", "rich",
    "regex", "kagglehub", "kagglesdk", "google-colab", "colabtpu",
)  # fmt: skip

FRAMEWORKS = ("tensorflow", "jax", "keras", "torch")

# The variables that decide something. A list, not a prefix: KAGGLE_* also holds secrets.
_VARIABLES = re.compile(
    r"(TPU|PJRT|LIBTPU|XLA|XRT|JAX|KERAS|GCE_METADATA|NEXT_PLUGGABLE)_\w+|VBAR_CONTROL_SERVICE_URL"
    r"|TF_(XLA|PLUGGABLE|USE_LEGACY|CPP|GPU|FORCE|ENABLE)\w+"
    r"|COLAB_(GPU|TPU_1VM|TPU_ADDR|RELEASE_TAG)|ISTPUVM|KAGGLE_KERNEL_RUN_TYPE|CLOUD_TPU_TASK_ID"
    r"|KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS|KUBERNETES_SERVICE_HOST|(CUDA|NVIDIA)_VISIBLE_DEVICES"
    r"|ALLOW_MULTIPLE_LIBTPU_LOAD|MPLBACKEND"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY", re.IGNORECASE)

_GOOGLE, _NVIDIA = "0x1ae0", "0x10de"
_LOCK_FILE = "tmp/libtpu_lockfile"


@dataclass(frozen=True)
class Holder:
    """A process that has the TPU open: its pid, its name, and what it holds."""

    pid: int
    name: str
    path: str


@dataclass(frozen=True)
class Environment:
    """What can be known about this process's surroundings without importing a framework.

    Attributes:
        platform: `"colab"`, `"kaggle"`, `"cloud_tpu_vm"` or `"machine"`.
        accelerator: `"tpu"`, `"gpu"` or `"cpu"`, the best that is attached.
        chip: the TPU generation, `None` without a TPU or where it is unknown.
        num_chips: TPU chips on this host, 0 without a TPU.
        evidence: how each of the above is known, such as `"TPU_ACCELERATOR_TYPE=v5e-1"`.
        python: the Python version, such as `"3.13.15"`.
        builds: distribution name -> version, for the builds that matter and are installed.
        imported: which of tensorflow, jax, keras, torch this process has imported already.
        variables: the variables about TPUs and backends that are set, with their values.
        gpus: NVIDIA GPUs with a working driver, by name where it is known.
        gpu_without_driver: an NVIDIA GPU is in the machine, its driver is not.
        cuda_libraries: CUDA's libraries are installed, which TensorFlow needs for a GPU.
        keras_backend: the backend Keras runs on once imported, else the one that KERAS_BACKEND
            or keras.json asks for, else `None`.
        tpu_nodes: device files of TPU chips, such as `/dev/vfio/0`.
        tpu_holders: other processes that hold the TPU, as far as this user may see them.
        on_gce: a Google Compute Engine machine, whose metadata server answers libtpu.
    """

    platform: str
    accelerator: str
    chip: Chip | None
    num_chips: int
    evidence: tuple[str, ...]
    python: str
    builds: dict[str, str]
    imported: frozenset[str]
    variables: dict[str, str]
    gpus: tuple[str, ...] = ()
    gpu_without_driver: bool = False
    cuda_libraries: bool = False
    keras_backend: str | None = None
    tpu_nodes: tuple[str, ...] = ()
    tpu_holders: tuple[Holder, ...] = field(default=())
    on_gce: bool = False

    @property
    def num_tpu_devices(self) -> int:
        """TPU devices that TensorFlow and JAX will list on this host."""
        return self.num_chips * (self.chip.devices_per_chip if self.chip else 1)

    @property
    def device(self) -> str:
        """The best device present in words, such as `"TPU v5e, 1 chip"`."""
        if self.accelerator == "tpu":
            plural = "" if self.num_chips == 1 else "s"
            kind = self.chip.name if self.chip else "of unknown generation"
            return f"TPU {kind}, {self.num_chips} chip{plural}"
        if self.accelerator == "gpu":
            return f"{len(self.gpus)} x {self.gpus[0]}"
        return "CPU"


def detect(
    env: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    *,
    builds: Mapping[str, str] | None = None,
    modules: Mapping[str, object] | None = None,
    python: str | None = None,
) -> Environment:
    """Looks around and says where this process runs.

    Args:
        env: the environment variables; those of this process if left out.
        root: where `sys`, `proc`, `dev` and `tmp` are, `/` but for tests.
        builds: distribution name -> version; what is installed here if left out.
        modules: the imported modules; `sys.modules` if left out.
        python: the Python version; this one if left out.

    Returns:
        The `Environment`.
    """
    env = os.environ if env is None else env
    builds = installed() if builds is None else builds
    modules = sys.modules if modules is None else modules
    chip, num_chips, tpu_evidence = _tpu(env, root)
    gpus, gpu_evidence, gpu_without_driver = _gpus(env, root)
    platform, platform_evidence = _platform(env, root, builds, tpu=num_chips > 0)
    accelerator = "tpu" if num_chips else "gpu" if gpus else "cpu"
    return Environment(
        platform=platform,
        accelerator=accelerator,
        chip=chip,
        num_chips=num_chips,
        evidence=(*platform_evidence, *tpu_evidence, *gpu_evidence),
        python=python or python_platform.python_version(),
        builds=dict(builds),
        imported=frozenset(name for name in FRAMEWORKS if name in modules),
        variables={
            name: "***" if _SECRET.search(name) else value
            for name, value in sorted(env.items())
            if _VARIABLES.fullmatch(name)
        },
        gpus=gpus,
        gpu_without_driver=gpu_without_driver,
        cuda_libraries="nvidia-cudnn-cu12" in builds or (root / "usr/local/cuda").exists(),
        keras_backend=_keras_backend(env, root, modules),
        tpu_nodes=_tpu_nodes(root),
        tpu_holders=_holders(root) if num_chips else (),
        on_gce="Google Compute Engine" in _read(root / "sys/class/dmi/id/product_name"),
    )


def installed() -> dict[str, str]:
    """Returns distribution name -> version for every one of `DISTRIBUTIONS` installed here."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _platform(
    env: Mapping[str, str], root: Path, builds: Mapping[str, str], *, tpu: bool
) -> tuple[str, list[str]]:
    """Kaggle before Colab: Kaggle's image is built on Colab's and keeps its variables."""
    if "KAGGLE_KERNEL_RUN_TYPE" in env:
        return "kaggle", [f"KAGGLE_KERNEL_RUN_TYPE={env['KAGGLE_KERNEL_RUN_TYPE']}"]
    if env.get("ISTPUVM") == "1" or (root / "kaggle/working").exists():
        return "kaggle", ["ISTPUVM=1" if env.get("ISTPUVM") == "1" else "/kaggle/working exists"]
    for name in ("COLAB_RELEASE_TAG", "COLAB_GPU", "COLAB_TPU_1VM"):
        if name in env:
            return "colab", [f"{name}={env[name]}"]
    if "google-colab" in builds:
        return "colab", ["google-colab is installed"]
    return ("cloud_tpu_vm", []) if tpu else ("machine", [])


def _tpu(env: Mapping[str, str], root: Path) -> tuple[Chip | None, int, list[str]]:
    """The chip and how many: variables first, then the PCI bus.

    The bounds variables are no witness: Colab says `TPU_CHIPS_PER_HOST_BOUNDS=2,2,1` with one
    chip attached.
    """
    evidence = []
    chip, count = None, 0
    named = env.get("TPU_ACCELERATOR_TYPE", "")
    if named:
        evidence.append(f"TPU_ACCELERATOR_TYPE={named}")
        chip, count = _accelerator_type(named)
    on_bus, on_bus_count = _tpus_on_pci(root)
    if on_bus_count:
        kind = on_bus.name if on_bus else "of unknown generation"
        evidence.append(f"PCI bus: {on_bus_count} x TPU {kind}")
    if not count and not on_bus_count:
        for name in ("COLAB_TPU_1VM", "ISTPUVM"):
            # Colab sets COLAB_TPU_1VM to '' on a runtime without a TPU.
            if env.get(name) == "1":
                nodes = len(_tpu_nodes(root))
                return None, nodes or 1, [f"{name}=1", *([f"{nodes} device files"] * bool(nodes))]
    return chip or on_bus, count or on_bus_count, evidence


def _accelerator_type(named: str) -> tuple[Chip | None, int]:
    """The chip and the chips on this host, from a name such as `v5litepod-8`."""
    try:
        target = chips.target(named)
    except InvalidArgumentError:
        return None, 1
    return target.chip, target.num_chips // target.num_hosts


def _tpus_on_pci(root: Path) -> tuple[Chip | None, int]:
    found = []
    for device in _pci(root, _GOOGLE):
        number = _read(device / "device")
        subsystem = _read(device / "subsystem_device")
        for chip in chips.CHIPS.values():
            if any(number == d and s in (None, subsystem) for d, s in chip.pci_ids):
                found.append(chip)
    return (found[0], len(found)) if found else (None, 0)


def _gpus(env: Mapping[str, str], root: Path) -> tuple[tuple[str, ...], list[str], bool]:
    """NVIDIA GPUs that a program could use: driver present, not hidden by a variable."""
    on_bus = [d for d in _pci(root, _NVIDIA) if _read(d / "class").startswith("0x03")]
    described = [
        _read(file) for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    ]
    names = [m[1].strip() for text in described if (m := re.search(r"Model:(.*)", text))]
    nodes = [f for f in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", f.name)]
    count = len(names) or len(nodes)
    if not count:
        return (), ["PCI bus: an NVIDIA GPU without a driver"] * bool(on_bus), bool(on_bus)
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        if env.get(name) in ("", "-1", "none", "void"):
            return (), [f"{name}={env[name]} hides {count} NVIDIA GPU"], False
    return tuple(names or ["NVIDIA GPU"] * count), [f"driver: {count} x NVIDIA GPU"], False


def _pci(root: Path, vendor: str) -> list[Path]:
    folder = root / "sys/bus/pci/devices"
    return [d for d in sorted(folder.glob("*")) if _read(d / "vendor") == vendor]


def _tpu_nodes(root: Path) -> tuple[str, ...]:
    """`/dev/accelN` up to v4, `/dev/vfio/N` after; `/dev/vfio/vfio` is no chip."""
    files = [*(root / "dev").glob("accel*"), *(root / "dev/vfio").glob("*")]
    names = (f"/{file.relative_to(root)}" for file in files)
    return tuple(sorted(n for n in names if re.fullmatch(r"/dev/(accel|vfio/)\d+", n)))


def _holders(root: Path) -> tuple[Holder, ...]:
    """Who else has the TPU open: by open files, and by the lock on libtpu's lock file."""
    held: dict[int, str] = {}
    for link in (root / "proc").glob("[0-9]*/fd/*"):
        try:
            opened = os.readlink(link)
        except OSError:
            continue  # another user's process, or it has ended meanwhile
        if re.fullmatch(r"/dev/(accel|vfio/)\d+", opened):
            held.setdefault(int(link.parts[-3]), opened)
    try:
        inode = str((root / _LOCK_FILE).stat().st_ino)
    except OSError:
        inode = ""
    for line in _read(root / "proc/locks").splitlines():
        lock = re.match(r"\d+: (?:FLOCK|POSIX)\s+\w+\s+\w+\s+(\d+) \S+:(\d+) ", line)
        if lock and lock[2] == inode:
            held.setdefault(int(lock[1]), f"/{_LOCK_FILE}")
    held.pop(os.getpid(), None)
    return tuple(
        Holder(pid, _read(root / f"proc/{pid}/comm") or "unknown", path)
        for pid, path in sorted(held.items())
    )


def _keras_backend(env: Mapping[str, str], root: Path, modules: Mapping[str, object]) -> str | None:
    ask = getattr(getattr(modules.get("keras"), "backend", None), "backend", None)
    if callable(ask):
        return str(ask())
    if "KERAS_BACKEND" in env:
        return env["KERAS_BACKEND"]
    home = env.get("KERAS_HOME") or f"{env.get('HOME', '/nonexistent')}/.keras"
    written = re.search(r'"backend":\s*"(\w+)"', _read(root / home.lstrip("/") / "keras.json"))
    return written[1] if written else None


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
