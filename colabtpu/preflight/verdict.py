"""From what libtpu said to a `Report`: memory by part, bounds, and whether it fits.

report = verdict("gpt2", program, target, compiled, flops)
"""

from typing import Any

from colabtpu.chips import Target
from colabtpu.preflight import program as roles
from colabtpu.preflight.compiler import (
    COMPILED,
    CRASHED,
    REFUSED,
    SCHEDULED,
    TIMED_OUT,
    UNAVAILABLE,
    Compiled,
)
from colabtpu.preflight.flops import ModelFlops
from colabtpu.preflight.messages import OUT_OF_MEMORY, explain, size
from colabtpu.preflight.program import Program
from colabtpu.preflight.report import Report

# What Colab's TPU runtime ships: googlecolab/backend-info, image of 2026-08-19.
COLAB_LIBTPU, COLAB_JAX = "0.0.21.1", "0.7.2"


def verdict(
    model: str, program: Program, target: Target, compiled: Compiled, flops: ModelFlops
) -> Report:
    """Returns the report on one compiled, or refused, step.

    Args:
        model: its name.
        program: the lowered step.
        target: the slice.
        compiled: libtpu's answer.
        flops: what the model's mathematics asks for.
    """
    said = explain(compiled.message) if compiled.message else None
    usable = target.chip.hbm_usable_bytes
    if said is not None and said.available_bytes:
        usable = min(usable, said.available_bytes)
    parts = memory_parts(program, compiled)
    needed = sum(count for _, count in parts) if compiled.temp_bytes is not None else None
    if said is not None and said.needed_bytes:
        needed = max(needed or 0, said.needed_bytes)
    compiles, fits = _verdict(compiled, needed, usable)
    seconds, bound_by = _bound(compiled, flops, program, target)
    items = program.batch * (program.seq_len or 1)
    buffers = compiled.buffers or (said.buffers if said else ())
    return Report(
        model=model,
        engine=program.engine,
        target=target.name,
        step=program.step,
        batch=program.batch,
        replicas=program.replicas,
        seq_len=program.seq_len,
        status=compiled.status,
        compiles=compiles,
        fits=fits,
        summary=_summary(compiled, compiles, fits, needed, usable),
        fix=_fix(compiled, fits, said),
        message=compiled.message,
        hbm_parts=tuple(parts),
        hbm_needed_bytes=needed,
        hbm_usable_bytes=usable,
        temp_bytes=compiled.temp_bytes,
        argument_bytes=compiled.argument_bytes,
        flops=compiled.flops,
        model_flops=flops.total,
        model_flops_formula=flops.formula,
        bytes_accessed=compiled.bytes_accessed,
        step_seconds_bound=seconds,
        tokens_per_second_bound=items / seconds if seconds else None,
        bound_by=bound_by,
        buffers=tuple(b for b in buffers if b.size_bytes >= 2**10),
        collectives=compiled.collectives,
        compile_seconds=compiled.compile_seconds or compiled.schedule_seconds,
        libtpu_version=compiled.libtpu_version,
        jax_version=compiled.jax_version,
        as_shipped=_as_shipped(compiled),
        shipped=_shipped(compiled),
        notes=program.notes + tuple(_notes(compiled, target)),
        cached=compiled.cached,
    )


def memory_parts(program: Program, compiled: Compiled) -> list[tuple[str, int]]:
    """Returns the bytes of each part of one device's memory, in the report's order."""
    by_role = dict.fromkeys((roles.WEIGHTS, roles.OPTIMIZER, roles.STATE, roles.BATCH), 0)
    if len(compiled.argument_sizes) == len(program.arguments):
        for argument, count in zip(program.arguments, compiled.argument_sizes, strict=True):
            by_role[argument.role] += count
    elif compiled.argument_bytes:
        _apportion(by_role, program, compiled.argument_bytes)
    outputs = max((compiled.output_bytes or 0) - (compiled.alias_bytes or 0), 0)
    return [
        *by_role.items(),
        ("activations", compiled.temp_bytes or 0),
        ("outputs", outputs),
        ("program", compiled.program_bytes or 0),
    ]


def _apportion(by_role: dict[str, int], program: Program, total: int) -> None:
    """Splits the arguments by their plain sizes, where libtpu's own sizes are not known."""
    from math import prod

    from colabtpu.preflight.spec import item_bytes

    for argument in program.arguments:
        by_role[argument.role] += prod(argument.shape) * item_bytes(argument.dtype)
    plain = sum(by_role.values()) or 1
    for role, count in by_role.items():
        by_role[role] = round(count * total / plain)


def _verdict(
    compiled: Compiled, needed: int | None, usable: int
) -> tuple[bool | None, bool | None]:
    if compiled.status == OUT_OF_MEMORY:
        return False, False
    if compiled.status == REFUSED:
        return False, None
    if compiled.status in (COMPILED, SCHEDULED):
        return True, needed is not None and needed <= usable
    return None, None


def _summary(
    compiled: Compiled, compiles: bool | None, fits: bool | None, needed: int | None, usable: int
) -> str:
    if compiled.status == OUT_OF_MEMORY and needed is not None:
        said = explain(compiled.message).summary
        return (
            f"It needs {size(needed)} of HBM and the TPU has {size(usable)}: "
            f"{size(needed - usable)} too much. libtpu says: {said}"
        )
    if compiled.status == OUT_OF_MEMORY:
        return explain(compiled.message).summary
    if compiled.status == REFUSED:
        return f"It does not compile for this TPU: {compiled.message.strip()[:400]}"
    if compiles and needed is not None:
        how = "compiles" if compiled.status == COMPILED else "is scheduled by libtpu"
        if fits:
            return f"It {how} and fits: {size(needed)} of {size(usable)} of HBM."
        return f"It {how} but needs {size(needed - usable)} more than the HBM there is."
    return compiled.message


def _fix(compiled: Compiled, fits: bool | None, said: Any) -> str:
    if compiled.status in (CRASHED, TIMED_OUT):
        return (
            "Try another libtpu: `pip install --target FOLDER libtpu==0.0.52`, then pass "
            "`libtpu=FOLDER`. Your notebook and its state are unharmed."
        )
    if compiled.status == UNAVAILABLE:
        return (
            "Without a compiler, `ct.preflight.estimate(model, data, target)` gives a rough idea."
        )
    if compiled.status == REFUSED and said is not None:
        return said.fix
    if fits is False:
        return "Halve the per-core batch; the list below says what else helps, if it was asked for."
    return ""


def _bound(
    compiled: Compiled, flops: ModelFlops, program: Program, target: Target
) -> tuple[float | None, str]:
    """The roofline: no faster than the arithmetic at peak, nor than the bytes at full speed.

    XLA does not count the FLOPs of custom kernels, so the larger of its count and the model's
    own is used.
    """
    if compiled.bytes_accessed is None or compiled.flops is None:
        return None, ""
    count = max(compiled.flops, flops.total / program.replicas)
    arithmetic = count / target.chip.peak_bf16_flops_per_device
    memory = compiled.bytes_accessed / target.chip.hbm_bytes_per_second_per_device
    return (arithmetic, "arithmetic") if arithmetic >= memory else (memory, "memory traffic")


def _as_shipped(compiled: Compiled) -> bool | None:
    if not compiled.libtpu_version:
        return None
    return (compiled.libtpu_version, compiled.jax_version) == (COLAB_LIBTPU, COLAB_JAX)


def _shipped(compiled: Compiled) -> str:
    if _as_shipped(compiled):
        return "the pair that Colab's TPU runtime ships"
    return f"Colab's TPU runtime ships libtpu {COLAB_LIBTPU} with jax {COLAB_JAX}"


def _notes(compiled: Compiled, target: Target) -> list[str]:
    notes = []
    if compiled.status == SCHEDULED:
        notes.append(
            "memory only: libtpu laid the program out and was stopped before it generated code, "
            "so the program's own size (often 0.2 GiB) and FLOPs are not known"
        )
    chip = target.chip
    if chip.compiler_devices_per_chip != chip.devices_per_chip:
        notes.append(f"a real {chip.name} joins its two cores into one device; without a chip "
                     "libtpu compiles for one core, with half the memory")  # fmt: skip
    return notes
