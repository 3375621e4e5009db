"""What can go wrong between asking for an accelerator and having it, and how to tell.

    try:
        tpu = ct.connect(engine="tensorflow")
    except ct.connection.TPUBusyError as error:
        print(error.fix)

Every error here is an `AcceleratorError`. `recognise` reads what a probe left behind (exit
status, last words) and names the failure; the phrases come from TensorFlow, JAX and libtpu.
"""

import os
import re
import signal
from collections.abc import Callable

from colabtpu.errors import ColabTPUError, InvalidArgumentError
from colabtpu.probe import Outcome


class AcceleratorError(ColabTPUError):
    """An accelerator could not be had; `falls_back` says whether "auto" looks for the next one."""

    falls_back = True


class TooLateError(AcceleratorError):
    """A framework was imported or used before `connect()` could prepare it."""

    falls_back = False


class TPUBusyError(AcceleratorError):
    """Another process holds the TPU; a slower device would hide a problem that is quickly cured."""

    falls_back = False


class AlreadyConnectedError(AcceleratorError):
    """This process is connected, and differently from what is now asked."""

    falls_back = False


class MissingEngineError(AcceleratorError):
    """The engine is not installed."""


class WrongBuildError(AcceleratorError):
    """The engine is installed, but not in a build that can drive this accelerator."""


class WrongLibtpuError(WrongBuildError):
    """libtpu and the engine do not fit together."""


class NoTPUError(AcceleratorError):
    """The place was reached, and no TPU is there."""


class UnreachableError(AcceleratorError):
    """Nothing answers where the TPU should be."""


INSTALL = "python -m colabtpu install"
RESTART = "Restart the kernel (Runtime > Restart session) and call colabtpu.connect() first"
_Maker = Callable[[str, str, re.Match[str]], AcceleratorError]


def recognise(outcome: Outcome, engine: str, where: str) -> AcceleratorError:
    """Names the failure that a probe met.

    Args:
        outcome: what the probe left behind; its `answer` is `None`.
        engine: `"tensorflow"` or `"jax"`.
        where: `"local"`, a `grpc://` address, or a TPU's name.

    Returns:
        The error to raise; an `AcceleratorError` with the probe's last words if nothing matches.
    """
    for pattern, make in _PHRASES:
        found = re.search(pattern, outcome.output)
        if found:
            return make(engine, where, found)
    if outcome.timed_out:
        return _silent(engine, where, outcome)
    if outcome.status < 0:
        return _crashed(engine, outcome)
    return AcceleratorError(
        f"{_NAMES[engine]} could not open the TPU ({where}). Its last words: {outcome.last_words}",
        "Run python -m colabtpu doctor, which checks the builds and the variables one by one.",
    )


def too_many(count: int, there: int, what: str) -> InvalidArgumentError:
    """The error for asking more devices of an accelerator than it has."""
    return InvalidArgumentError(
        f"`devices` must be at most {there}, the number of {what} here. Received: devices={count}",
        f"Leave `devices` out to use all {there}; more logical devices exist on CPU only.",
    )


def _busy(engine: str, where: str, found: re.Match[str]) -> AcceleratorError:
    pid = found.groupdict().get("pid")
    if pid == str(os.getpid()):
        return TooLateError(
            "This process holds the TPU already: TensorFlow or JAX took it before connect().",
            f"{RESTART}.",
        )
    return TPUBusyError(
        f"The TPU is in use by another process{f', pid {pid}' if pid else ''}. "
        f"Received from libtpu: {found.group(0)!r}",
        f"End it ({f'!kill {pid}' if pid else 'shut down other notebooks on this machine'}), "
        "then call connect() again; one process at a time can hold a TPU.",
    )


def _wrong_libtpu(engine: str, where: str, found: re.Match[str]) -> AcceleratorError:
    return WrongLibtpuError(
        f"Importing {_NAMES[engine]} with this libtpu ends the process: {found.group(0)!r}.",
        "Install a libtpu that tensorflow-tpu 2.20.0 works with (0.0.14 to 0.0.30): "
        'pip install "libtpu>=0.0.14,<=0.0.30", and restart the kernel.',
    )


def _stock_wheel(engine: str, where: str, found: re.Match[str]) -> AcceleratorError:
    return WrongBuildError(
        "The installed TensorFlow has no TPU kernels (no 'ConfigureDistributedTPU'): "
        "it is the stock `tensorflow`, not `tensorflow-tpu`.",
        f"{INSTALL} --engine tensorflow, then restart the kernel; or connect(engine='jax').",
    )


def _no_worker_tpu(engine: str, where: str, found: re.Match[str]) -> AcceleratorError:
    return NoTPUError(
        f"A worker answers at {where}, but it has no TPU: {found.group(0)!r}.",
        "Give the address of a TPU worker in connect(tpu='grpc://HOST:8470'), or leave `tpu` out "
        "(and unset TPU_NAME, COLAB_TPU_ADDR, XRT_TPU_CONFIG) to use what this machine has.",
    )


def _no_chip(engine: str, where: str, found: re.Match[str]) -> AcceleratorError:
    return NoTPUError(
        f"{_NAMES[engine]} and libtpu load, but no TPU chip answers: {found.group(0)!r}.",
        "Choose a TPU runtime (Colab: Runtime > Change runtime type; Kaggle: Settings > "
        "Accelerator), then restart the kernel.",
    )


def _no_metadata(engine: str, where: str, found: re.Match[str]) -> AcceleratorError:
    return UnreachableError(
        f"The TPU name {where!r} needs Google Cloud's API and metadata server, which do not "
        f"answer here: {found.group(0)!r}.",
        "Give the address itself: connect(tpu='grpc://HOST:8470'); for a TPU of this machine, "
        "connect(tpu='local').",
    )


def _no_answer(engine: str, where: str, found: re.Match[str]) -> AcceleratorError:
    return UnreachableError(
        f"Nothing answers at {where}: {found.group(0)!r}.",
        "Check that the TPU is running and that its address and port (8470) are right.",
    )


def _library_off(engine: str, where: str, found: re.Match[str]) -> AcceleratorError:
    return WrongLibtpuError(
        "TPU_LOAD_LIBRARY=0 is set, which forbids libtpu.",
        "del os.environ['TPU_LOAD_LIBRARY'], then restart the kernel.",
    )


def _not_installed(engine: str, where: str, found: re.Match[str]) -> AcceleratorError:
    return MissingEngineError(
        f"{_NAMES[engine]} cannot be imported: {found.group(0)}.",
        f"{INSTALL} --engine {engine}, then restart the kernel.",
    )


def _silent(engine: str, where: str, outcome: Outcome) -> AcceleratorError:
    return UnreachableError(
        f"{_NAMES[engine]} did not get an answer from the TPU ({where}) within "
        f"{outcome.seconds_allowed:g} s; it was stopped while it did this: {outcome.stage}.",
        "Restart the runtime (Colab: Runtime > Disconnect and delete runtime): a stale process "
        "that holds /dev/vfio or /dev/accel makes libtpu wait for ever."
        if where == "local"
        else "Check that a TPU worker, and nothing else, listens at that address.",
    )


def _crashed(engine: str, outcome: Outcome) -> AcceleratorError:
    name = signal.Signals(-outcome.status).name
    if outcome.stage == "import":
        return WrongLibtpuError(
            f"Importing {_NAMES[engine]} with the installed libtpu ends the process with {name}.",
            f"{INSTALL} --engine {engine}, which pins a pair that works; then restart the kernel.",
        )
    return NoTPUError(
        f"libtpu crashed with {name} when {_NAMES[engine]} opened the TPU: it does so where no "
        "chip answers, or when its release does not fit the engine's.",
        "Check that this runtime has a TPU (python -m colabtpu doctor), and the pair of builds: "
        f"{INSTALL} --engine {engine} pins one that works.",
    )


_NAMES = {"tensorflow": "TensorFlow", "jax": "JAX"}

# What the doctor finds -> error; every other finding is an `AcceleratorError`.
BY_CODE: dict[str, type[AcceleratorError]] = {
    "jax-missing": MissingEngineError,
    "jax-without-libtpu": WrongLibtpuError,
    "kaggle-tensorflow-cpu": WrongBuildError,
    "keras-imported-on-another-backend": TooLateError,
    "libtpu-outside-range": WrongLibtpuError,
    "stock-tensorflow-on-tpu": WrongBuildError,
    "tensorflow-imported-too-early": TooLateError,
    "tensorflow-missing-on-tpu": MissingEngineError,
    "tensorflow-without-libtpu": WrongLibtpuError,
    "tpu-held-by-another-process": TPUBusyError,
    "tpu7x-has-no-tensorflow": WrongBuildError,
    "two-tensorflows": WrongBuildError,
}

# Phrase in a probe's output -> error, most telling first: a busy TPU also logs that none is found.
_PHRASES: tuple[tuple[str, _Maker], ...] = (
    (r"already in use by process(?: with)? pid (?P<pid>\d+)", _busy),
    (r"accessing libtpu multi-process lockfile", _busy),
    (r"/dev/(?:vfio|accel)\S*.{0,40}(?:Device or resource busy|Operation not permitted)", _busy),
    (r"\w+ not available in this library", _wrong_libtpu),
    (r"No module named '(?:tensorflow|jax)'", _not_installed),
    (r"Unknown backend XLA_TPU_JIT", _stock_wheel),  # a PJRT plugin in a stock wheel: aborts
    (r"TPU_LOAD_LIBRARY=0, not loading libtpu", _library_off),
    (r"No OpKernel was registered to support Op 'ConfigureDistributedTPU'", _stock_wheel),
    (r"TPUs not found in the cluster[^\n]{0,120}", _no_worker_tpu),
    (r"Missing runtime dependency on the Google API client", _no_metadata),
    (r"Could not lookup TPU metadata[^\n]{0,120}", _no_metadata),
    (r"URLError: [^\n]{0,120}", _no_metadata),
    (r"No TPU platform (?:registered|found)", _no_chip),
    (r"No matching devices found for '/device:TPU_SYSTEM:0'", _no_chip),
    (r"RET_CHECK failure \([^)]*tpu_node_interfaces[^)]*\) \S+", _no_chip),
    (r"TPU initialization failed: No \S+ device found", _no_chip),
    (r"Unable to initialize backend 'tpu'[^\n]{0,160}", _no_chip),
    (r"(?:DEADLINE_EXCEEDED|DeadlineExceeded|UnavailableError|UNAVAILABLE)[^\n]{0,120}",
     _no_answer),
)  # fmt: skip
