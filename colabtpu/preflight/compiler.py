"""Runs libtpu on a lowered step, in a process of its own, and says what it said.

    result = compile_program(program, chips.target("v5e-1"))
    result.status, result.temp_bytes, result.buffers

libtpu needs no TPU for this, but it crashes on some hosts and pairs of versions, so a crash, a
hang and a refusal are results like any other. Which libtpu: the argument, else the environment
variable `COLABTPU_LIBTPU` (a path to a `libtpu.so`, or a folder that holds it), else the
installed package. Results are kept on disk under the program's fingerprint (`cache.py`).
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import colabtpu
from colabtpu.chips import Target
from colabtpu.preflight import cache, hlo
from colabtpu.preflight.hlo import Buffer, Collective
from colabtpu.preflight.messages import OUT_OF_MEMORY, explain
from colabtpu.preflight.program import Program

COMPILED, SCHEDULED = "compiled", "scheduled"
REFUSED, CRASHED, TIMED_OUT, UNAVAILABLE = "refused", "crashed", "timed out", "unavailable"
TIME_LIMIT_SECONDS = 1800.0

# Said to libtpu: write down the scheduled program (and nothing else), before generating code.
_DUMP = "--xla_jf_dump_to={folder} --xla_jf_dump_category_filter=program"


@dataclass(frozen=True)
class Compiled:
    """What libtpu said about a program on one target.

    Attributes:
        status: `"compiled"`; `"scheduled"`, when only the memory was asked for; `"out of
            memory"`; `"refused"`; `"crashed"`; `"timed out"`; or `"unavailable"`.
        message: libtpu's own words when it did not compile.
        temp_bytes: activations and temporaries at the fullest moment, on one device.
        argument_bytes: weights, optimizer state and batch on one device, padding included.
        output_bytes: results, those in an argument's place included.
        alias_bytes: results that take an argument's place.
        program_bytes: the instructions themselves, which lie in HBM too.
        flops: floating-point operations of one device, custom kernels left out.
        bytes_accessed: by XLA's count, on one device.
        argument_sizes: bytes of each argument in the program's order.
        buffers: the largest temporaries at the fullest moment.
        collectives: the traffic between devices.
        schedule_seconds: until the memory was known.
        compile_seconds: until libtpu was done.
        libtpu_version: the release that compiled.
        jax_version: the release that drove it.
        cached: whether this was read from disk.
    """

    status: str
    message: str = ""
    temp_bytes: int | None = None
    argument_bytes: int | None = None
    output_bytes: int | None = None
    alias_bytes: int | None = None
    program_bytes: int | None = None
    flops: float | None = None
    bytes_accessed: float | None = None
    argument_sizes: tuple[int, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    collectives: tuple[Collective, ...] = ()
    schedule_seconds: float | None = None
    compile_seconds: float | None = None
    libtpu_version: str = ""
    jax_version: str = ""
    cached: bool = False

    @property
    def conclusive(self) -> bool:
        """Whether this is about the program, and not about the machine that asked."""
        return self.status in (COMPILED, SCHEDULED, OUT_OF_MEMORY, REFUSED)


def compile_program(
    program: Program,
    target: Target,
    *,
    memory_only: bool = False,
    libtpu: str | None = None,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
    progress: Callable[[str], None] | None = None,
) -> Compiled:
    """Compiles a lowered step for a target, or reads the result of having done so.

    Args:
        program: the step.
        target: the slice.
        memory_only: stop when libtpu has scheduled the program and laid out its memory, before
            it generates code: a tenth of the time, but neither FLOPs nor the program's size.
        libtpu: a `libtpu.so`, or a folder that holds one.
        time_limit_seconds: when to give up.
        progress: called with a few words as the compiler moves on.

    Returns:
        The `Compiled`, whatever happened.
    """
    missing = unavailable(libtpu)
    if missing:
        return Compiled(UNAVAILABLE, missing)
    version = libtpu_version(libtpu)
    key = _key(program, target, version)
    for found in [key] + ([f"{key}-memory"] if memory_only else []):
        kept = cache.read(found)
        if kept is not None:
            return replace(_from_json(kept), cached=True)
    result = _run(program, target, memory_only, libtpu, time_limit_seconds, progress, dump=True)
    if result.status == CRASHED and result.schedule_seconds is None:
        # Another libtpu may not know the flags that ask for the schedule.
        result = _run(program, target, False, libtpu, time_limit_seconds, progress, dump=False)
    result = replace(result, libtpu_version=version)
    if result.conclusive:
        cache.write(key + ("-memory" if result.status == SCHEDULED else ""), _to_json(result))
    return result


def unavailable(libtpu: str | None = None) -> str:
    """Returns why no TPU compiler can run here, or nothing if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return (
            f"libtpu runs on x86-64 Linux only, and this is {platform.system()} on "
            f"{platform.machine()}. Run this in a Colab notebook (a CPU runtime will do)."
        )
    if importlib.util.find_spec("jax") is None:
        return "libtpu is driven through jax, which is not installed: pip install jax==0.7.2"
    if _library(libtpu) is None and importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed: pip install libtpu==0.0.21.1 (Colab's release)"
    return ""


def libtpu_version(libtpu: str | None = None) -> str:
    """Returns the release of the libtpu that would compile, or its path if that is all we know."""
    library = _library(libtpu)
    if library is None:
        try:
            return importlib.metadata.version("libtpu")
        except importlib.metadata.PackageNotFoundError:
            return "none"
    for info in library.parent.parent.glob("libtpu-*.dist-info"):
        return info.name.removeprefix("libtpu-").removesuffix(".dist-info")
    return str(library)


def _library(libtpu: str | None) -> Path | None:
    chosen = libtpu or os.environ.get("COLABTPU_LIBTPU")
    if not chosen:
        return None
    path = Path(chosen).expanduser()
    if path.is_dir():
        path = next((p for p in (path / "libtpu.so", path / "libtpu" / "libtpu.so") if p.exists()),
                    path / "libtpu.so")  # fmt: skip
    if not path.exists():
        raise colabtpu.InvalidArgumentError(
            f"`libtpu` must be a libtpu.so or a folder that holds one. Received: {chosen!r}",
            "Unpack one with `pip install --target FOLDER libtpu==0.0.52`, and pass FOLDER.",
        )
    return path


def _key(program: Program, target: Target, version: str) -> str:
    parts = [program.fingerprint, target.topology, str(target.chips_per_host_bounds),
             str(program.num_partitions), version, importlib.metadata.version("jaxlib"),
             os.environ.get("LIBTPU_INIT_ARGS", "")]  # fmt: skip
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def _run(
    program: Program,
    target: Target,
    memory_only: bool,
    libtpu: str | None,
    time_limit_seconds: float,
    progress: Callable[[str], None] | None,
    dump: bool,
) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="colabtpu-preflight-") as name:
        folder = Path(name)
        (folder / "dump").mkdir()
        (folder / "module.mlir").write_bytes(program.module)
        (folder / "request.json").write_text(json.dumps({
            "topology": target.topology,
            "chips_per_host_bounds": target.chips_per_host_bounds,
            "num_partitions": program.num_partitions,
        }))  # fmt: skip
        with open(folder / "log", "wb") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", "colabtpu.preflight.worker", name],
                env=_environment(libtpu, folder / "dump" if dump else None),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                end = _watch(worker, folder, memory_only, time_limit_seconds, progress)
            finally:
                _stop(worker)
        return _result(folder, end, worker.returncode, time_limit_seconds)


def _environment(libtpu: str | None, dump: Path | None) -> dict[str, str]:
    """The worker's environment: nothing of this runtime's own TPU, which must not be touched."""
    ours = ("TPU_", "PJRT_", "XLA_", "JAX_", "CLOUD_TPU", "LIBTPU_", "MEGASCALE")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    root = str(Path(colabtpu.__file__).parent.parent)
    arguments = os.environ.get("LIBTPU_INIT_ARGS", "")
    env |= {
        "PYTHONPATH": os.pathsep.join(p for p in (root, env.get("PYTHONPATH", "")) if p),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        # The lock is for those who open a chip; a compiler must run beside them.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "LIBTPU_INIT_ARGS": f"{arguments} {_DUMP.format(folder=dump)}" if dump else arguments,
    }
    library = _library(libtpu)
    return env | ({"TPU_LIBRARY_PATH": str(library)} if library else {})


def _watch(
    worker: "subprocess.Popen[bytes]",
    folder: Path,
    memory_only: bool,
    time_limit_seconds: float,
    progress: Callable[[str], None] | None,
) -> str:
    """Waits for the worker; returns `"exit"`, `"scheduled"` or `"time"`."""
    started, scheduled = time.monotonic(), None
    while worker.poll() is None:
        elapsed = time.monotonic() - started
        if elapsed > time_limit_seconds:
            return "time"
        if scheduled is None and _schedule(folder):
            scheduled = elapsed
            (folder / "schedule_seconds").write_text(str(elapsed))
        # An out-of-memory message follows the schedule at once: leave it a moment.
        if memory_only and scheduled is not None and elapsed > scheduled * 1.1 + 2:
            return "scheduled"
        if progress:
            what = "generating code" if scheduled is not None else "scheduling"
            progress(f"libtpu is {what} ({elapsed:.0f} s)")
        time.sleep(0.1)
    return "exit"


def _schedule(folder: Path) -> str:
    """The scheduled program's text, once it is written to its end."""
    for path in sorted((folder / "dump").glob("*TLP-hlo.txt")):
        text = path.read_text(errors="replace")
        if text.rstrip().endswith("}") and "\nENTRY " in text:
            return text
    return ""


def _stop(worker: "subprocess.Popen[bytes]") -> None:
    if worker.poll() is None:
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def _result(folder: Path, end: str, code: int, time_limit_seconds: float) -> Compiled:
    found: dict[str, Any] = {}
    if (folder / "result.json").exists():
        found = json.loads((folder / "result.json").read_text())
    text = _schedule(folder)
    seconds = folder / "schedule_seconds"
    known = Compiled(
        COMPILED,
        jax_version=found.get("jax_version", ""),
        schedule_seconds=float(seconds.read_text()) if seconds.exists() else None,
        compile_seconds=found.get("compile_seconds"),
        **_measured(found),
    )
    known = _with_schedule(known, text) if text else known
    if found.get("stage") == "done":
        return known
    if found.get("stage") == "refused":
        message = found["message"]
        kind = explain(message).kind
        return replace(known, status=kind if kind == OUT_OF_MEMORY else REFUSED, message=message)
    if end == "scheduled":
        return replace(known, status=SCHEDULED)
    if end == "time":
        return replace(known, status=TIMED_OUT,
                       message=f"libtpu was stopped after {time_limit_seconds:.0f} s.")  # fmt: skip
    last = (folder / "log").read_text(errors="replace").strip().splitlines()[-3:]
    stage = found.get("stage", "start")
    return replace(known, status=CRASHED,
                   message=f"libtpu died while {_DOING.get(stage, stage)} (exit status {code}). "
                           + " | ".join(last)[-600:])  # fmt: skip


_DOING = {
    "start": "it was loaded",
    "topology": "it described the slice",
    "compiling": "compiling",
    "compiled": "reporting what it had compiled",
}


def _measured(found: dict[str, Any]) -> dict[str, Any]:
    names = ("temp_bytes", "argument_bytes", "output_bytes", "alias_bytes", "program_bytes",
             "flops", "bytes_accessed")  # fmt: skip
    return {name: found.get(name) for name in names}


def _with_schedule(known: Compiled, text: str) -> Compiled:
    """Adds what the scheduled program shows: largest buffers, traffic, sizes of arguments."""
    total, buffers = hlo.peak(text)
    sizes = tuple(hlo.argument_bytes(text))
    return replace(
        known,
        temp_bytes=known.temp_bytes if known.temp_bytes is not None else total,
        argument_bytes=known.argument_bytes if known.argument_bytes is not None else sum(sizes),
        argument_sizes=sizes,
        buffers=tuple(buffers),
        collectives=tuple(hlo.collectives(text)),
    )


def _to_json(result: Compiled) -> dict[str, Any]:
    fields = dict(vars(result))
    fields["buffers"] = [vars(b) for b in result.buffers]
    fields["collectives"] = [vars(c) for c in result.collectives]
    return fields


def _from_json(fields: dict[str, Any]) -> Compiled:
    return Compiled(**{
        **fields,
        "argument_sizes": tuple(fields["argument_sizes"]),
        "buffers": tuple(Buffer(**b) for b in fields["buffers"]),
        "collectives": tuple(Collective(**c) for c in fields["collectives"]),
    })  # fmt: skip
