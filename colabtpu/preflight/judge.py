"""`ct.preflight(…)`: lower, compile, report.

report = ct.preflight(model, (x, y), target="v5e-1")
report = ct.preflight(model, ct.preflight.tokens(8, 1024), target="v6e-1", step="evaluate")
"""

import sys
import time
from collections.abc import Callable
from typing import Any

from colabtpu import chips
from colabtpu.chips import Target
from colabtpu.preflight import compiler, lowering, recall
from colabtpu.preflight import spec as specs
from colabtpu.preflight.estimate import without_compiler
from colabtpu.preflight.flops import model_flops
from colabtpu.preflight.report import Report
from colabtpu.preflight.verdict import verdict

Progress = Callable[[str], None]


def preflight(
    model: Any,
    data: Any,
    target: str = "v5e-1",
    *,
    batch: int | None = None,
    seq_len: int | None = None,
    step: str = lowering.TRAIN,
    advise: bool = True,
    memory_only: bool = False,
    libtpu: str | None = None,
    time_limit_seconds: float = compiler.TIME_LIMIT_SECONDS,
    progress: Progress | None = None,
) -> Report:
    """Compiles a model's step for a TPU that need not be there, and says whether it fits.

    Args:
        model: a compiled Keras model, of either engine.
        data: one batch or its spec, `x`, `(x, y)` or `(x, y, sample_weight)`, or a data set. Its
            rows are the global batch, shared by the target's devices.
        target: the slice, such as `"v5e-1"`, `"v5e-8"` or `"v5e:4x4"`.
        batch: the global batch, where it should not be that of `data`.
        seq_len: the sequences' length, where `data` leaves it open.
        step: `"train"`, `"evaluate"` or `"generate"`.
        advise: when it does not fit, compile the changes that would help.
        memory_only: stop as soon as the memory is known, before code is generated: a verdict in
            seconds, without FLOPs and bounds.
        libtpu: a `libtpu.so` or a folder that holds one, instead of the installed one.
        time_limit_seconds: when to give up on libtpu.
        progress: called with a few words as things move on; printed on one line if left out.

    Returns:
        The `Report`. Steps that cannot be a TPU program, and crashes of libtpu, are reports too.

    Raises:
        InvalidArgumentError: an argument cannot be used.
    """
    slice_ = chips.target(target)
    structure = specs.batch_spec(data, batch=batch, seq_len=seq_len)
    show = progress or status_line()
    try:
        report = judge(model, structure, slice_, step, memory_only, libtpu, time_limit_seconds,
                       show)  # fmt: skip
        if advise and report.fits is False and step == lowering.TRAIN:
            from colabtpu.preflight.advice import advised

            report = advised(report, model, structure, slice_, libtpu, time_limit_seconds, show)
    finally:
        show("")
    return report


def judge(
    model: Any,
    structure: Any,
    target: Target,
    step: str = lowering.TRAIN,
    memory_only: bool = False,
    libtpu: str | None = None,
    time_limit_seconds: float = compiler.TIME_LIMIT_SECONDS,
    progress: Progress | None = None,
) -> Report:
    """Lowers and compiles one step; `preflight` without the advice."""
    missing = compiler.unavailable(libtpu)
    if missing:
        return without_compiler(model, structure, target, step, missing)
    kept = recall.read(recall.key(model, structure, target, step, memory_only, libtpu))
    if kept is not None:
        return kept
    if progress:
        progress("lowering the step")
    try:
        program = lowering.lower(model, structure, target, step)
    except lowering.LoweringError as error:
        return _refused(model, structure, target, step, error)
    flops = model_flops(model, structure, program)

    def ask(only_memory: bool) -> Report:
        compiled = compiler.compile_program(
            program,
            target,
            memory_only=only_memory,
            libtpu=libtpu,
            time_limit_seconds=time_limit_seconds,
            progress=progress,
        )
        return verdict(model.name, program, target, compiled, flops)

    report = ask(memory_only)
    report = ask(False) if _too_close(report) else report
    # Asked for anew, because lowering builds what was not built, and the key tells of it.
    recall.write(recall.key(model, structure, target, step, memory_only, libtpu), report)
    return report


def _too_close(report: Report) -> bool:
    """Whether the layout alone cannot decide.

    It leaves out the program itself (0.2 to 0.3 GiB for GPT-2 small) and what fragmentation adds,
    and what libtpu shares that we count twice: 1 to 3 % where we compared the two.
    """
    if report.status != compiler.SCHEDULED or not report.hbm_usable_bytes:
        return False
    return 0.93 <= (report.hbm_needed_bytes or 0) / report.hbm_usable_bytes <= 1.06


def status_line() -> Progress:
    """A progress display of one line, on a terminal or in a notebook; silent elsewhere."""
    notebook = "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None
    interactive = notebook or sys.stderr.isatty()
    last = [0.0]

    def show(words: str) -> None:
        if not interactive or (words and time.monotonic() - last[0] < 0.5):
            return
        last[0] = time.monotonic()
        print(f"\r{words:<70}" if words else "\r" + " " * 70, end="\r" if not words else "",
              file=sys.stderr, flush=True)  # fmt: skip

    return show


def _refused(
    model: Any, structure: Any, target: Target, step: str, error: lowering.LoweringError
) -> Report:
    return Report(
        model=model.name,
        engine=lowering.engine(),
        target=target.name,
        step=step,
        batch=specs.rows(structure),
        replicas=target.num_devices,
        seq_len=specs.sequence_length(structure),
        status=compiler.REFUSED,
        compiles=False,
        fits=None,
        summary=error.what,
        fix=error.fix,
        message=str(error),
        hbm_usable_bytes=target.chip.hbm_usable_bytes,
    )
