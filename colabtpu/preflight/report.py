"""What preflight says: one value that prints, shows as a card in a notebook, and dumps as JSON.

    report = ct.preflight(model, data, target="v5e-1")
    print(report); report.to_json(); report          # the last draws the card

All three show the same figures. Memory and FLOPs are per device, tokens per second for the slice.
"""

import json
from dataclasses import dataclass
from typing import Any

from colabtpu.preflight.hlo import Buffer, Collective
from colabtpu.preflight.messages import layer_of, size

BAR_WIDTH = 40
# The parts of the bar, in its order.
PARTS = ("weights", "optimizer", "state", "batch", "activations", "outputs", "program")
SHOWN_AS = {
    "weights": "weights",
    "optimizer": "optimizer state",
    "state": "metrics and seeds",
    "batch": "batch",
    "activations": "activations and temporaries",
    "outputs": "outputs",
    "program": "program",
}


@dataclass(frozen=True)
class Advice:
    """One change, and what it does.

    Attributes:
        change: what to do, in words.
        code: how, in code.
        fits: whether the changed step fits; `None` where it could not be compiled.
        hbm_needed_bytes: what the changed step needs.
        verified: whether libtpu compiled the changed step.
    """

    change: str
    code: str
    fits: bool | None = None
    hbm_needed_bytes: int | None = None
    verified: bool = False


@dataclass(frozen=True)
class Report:
    """The verdict on one step and one target; figures that nobody knows are `None`.

    Attributes:
        model: its name.
        engine: `"jax"` or `"tensorflow"`.
        target: the slice, such as `"v5e-1"`.
        step: `"train"`, `"evaluate"` or `"generate"`.
        batch: the global batch, in rows.
        replicas: devices that share it.
        seq_len: length of the sequences.
        status: what libtpu said: `"compiled"`, `"scheduled"` (memory laid out, no code generated),
            `"out of memory"`, `"refused"`, `"crashed"`, `"timed out"`, `"unavailable"`; or
            `"estimated"` when no compiler could run.
        compiles: whether the step compiles.
        fits: whether it fits into the memory of one device.
        summary: the verdict in a sentence.
        fix: the next step, when there is one to take.
        message: libtpu's own words, when it did not compile.
        hbm_parts: bytes by part, see `PARTS`.
        hbm_needed_bytes: all parts together.
        hbm_usable_bytes: what a program may use.
        temp_bytes: activations and temporaries.
        argument_bytes: weights, optimizer state, batch.
        flops: by XLA's count, custom kernels left out; on one device.
        model_flops: what the mathematics asks for, over the whole batch.
        model_flops_formula: how that was counted.
        bytes_accessed: by XLA's count, on one device.
        step_seconds_bound: no step can be faster than this by the roofline; not a prediction.
        tokens_per_second_bound: the same as tokens (or rows) a second.
        bound_by: `"arithmetic"` or `"memory"`.
        buffers: the largest temporaries at the fullest moment.
        collectives: traffic between devices.
        compile_seconds: what libtpu took.
        libtpu_version: the release that compiled.
        jax_version: the release that drove it.
        as_shipped: whether these are the releases that the target's runtime ships.
        shipped: those releases, in words.
        advice: changes, in the order in which to try them.
        notes: what else to know.
        cached: whether this verdict was kept from an earlier run.
    """

    model: str
    engine: str
    target: str
    step: str
    batch: int
    replicas: int
    seq_len: int | None
    status: str
    compiles: bool | None
    fits: bool | None
    summary: str
    fix: str = ""
    message: str = ""
    hbm_parts: tuple[tuple[str, int], ...] = ()
    hbm_needed_bytes: int | None = None
    hbm_usable_bytes: int | None = None
    temp_bytes: int | None = None
    argument_bytes: int | None = None
    flops: float | None = None
    model_flops: float | None = None
    model_flops_formula: str = ""
    bytes_accessed: float | None = None
    step_seconds_bound: float | None = None
    tokens_per_second_bound: float | None = None
    bound_by: str = ""
    buffers: tuple[Buffer, ...] = ()
    collectives: tuple[Collective, ...] = ()
    compile_seconds: float | None = None
    libtpu_version: str = ""
    jax_version: str = ""
    as_shipped: bool | None = None
    shipped: str = ""
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = ()
    cached: bool = False

    def __str__(self) -> str:
        return "\n".join(line for line in self._lines() if line)

    def _repr_html_(self) -> str:
        from colabtpu.preflight.card import card

        return card(self)

    def to_json(self) -> str:
        """Returns the report as JSON; keys are the attributes' names."""
        return json.dumps(self.to_dict(), indent=2)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data."""
        fields = dict(vars(self))
        fields["hbm_parts"] = dict(self.hbm_parts)
        for name in ("buffers", "collectives", "advice"):
            fields[name] = [vars(item) for item in fields[name]]
        fields["notes"] = list(self.notes)
        return fields

    @property
    def per_replica_batch(self) -> int:
        """Rows that one device sees."""
        return self.batch // self.replicas

    @property
    def flops_ratio(self) -> float | None:
        """Model FLOPs over the FLOPs that the compiled program spends; 1.0 wastes none."""
        if not self.flops or self.model_flops is None:
            return None
        return self.model_flops / (self.flops * self.replicas)

    @property
    def title(self) -> str:
        """What was judged, in a line."""
        rows = f"batch {self.batch:,}" + (f" x {self.seq_len:,}" if self.seq_len else "")
        share = f" ({self.per_replica_batch:,} a device)" if self.replicas > 1 else ""
        return f"{self.model} · {self.step} step · {rows}{share} · {self.engine} · {self.target}"

    def rows(self) -> list[tuple[str, str]]:
        """The figures as (name, words), for the text and for the card."""
        rows: list[tuple[str, str]] = []
        if self.flops:
            ratio = f"; model FLOPs are {self.flops_ratio:.0%} of it" if self.flops_ratio else ""
            rows.append(("FLOPs", f"{self.flops:.3g} a step and device{ratio}"))
        if self.model_flops:
            rows.append(
                ("model FLOPs", f"{self.model_flops:.3g} a step ({self.model_flops_formula})")
            )
        if self.bytes_accessed:
            rows.append(("bytes moved", f"{size(self.bytes_accessed)} a step and device"))
        if self.step_seconds_bound and self.tokens_per_second_bound:
            unit = "tokens" if self.seq_len else "rows"
            rows.append(
                (
                    "roofline bound",
                    f"at least {self.step_seconds_bound * 1e3:,.1f} ms a step, at most "
                    f"{self.tokens_per_second_bound:,.0f} {unit}/s, by {self.bound_by} "
                    "(a bound, not a prediction)",
                )
            )
        for c in self.collectives:
            rows.append((c.kind, f"{size(c.size_bytes)} in {c.count} operations"))
        if self.libtpu_version:
            took = f" in {self.compile_seconds:,.0f} s" if self.compile_seconds else ""
            kept = " (kept from an earlier run)" if self.cached else ""
            ships = "" if self.as_shipped is None else f"; {self.shipped}"
            rows.append(
                (
                    "compiler",
                    f"libtpu {self.libtpu_version}, jax {self.jax_version}{took}{kept}{ships}",
                )
            )
        return rows

    def _lines(self) -> list[str]:
        lines = [self.title, self.summary]
        if self.hbm_needed_bytes is not None and self.hbm_usable_bytes:
            lines.append(self._bar())
            lines += [f"  {SHOWN_AS[k]:<28}{size(v):>11}" for k, v in self.hbm_parts if v]
        if self.buffers:
            lines.append("largest buffers at the fullest moment:")
            lines += [
                f"  {size(b.size_bytes):>11}  {b.shape}  {layer_of(b.op)}" for b in self.buffers[:6]
            ]
        lines += [f"{name}: {words}" for name, words in self.rows()]
        lines += [f"note: {note}" for note in self.notes]
        if self.fix:
            lines.append(f"next step: {self.fix}")
        if self.advice:
            lines.append("what to change, in this order:")
            lines += [f"  {i}. {_advice_line(a)}" for i, a in enumerate(self.advice, 1)]
        return lines

    def _bar(self) -> str:
        needed, usable = self.hbm_needed_bytes or 0, self.hbm_usable_bytes or 1
        filled = min(round(needed / usable * BAR_WIDTH), BAR_WIDTH)
        bar = "█" * filled + "░" * (BAR_WIDTH - filled)
        return f"HBM {bar} {size(needed)} of {size(usable)} ({needed / usable:.0%})"


def from_dict(fields: dict[str, Any]) -> Report:
    """Returns the report that `to_dict` wrote down."""
    made = dict(fields)
    made["hbm_parts"] = tuple(fields["hbm_parts"].items())
    made["notes"] = tuple(fields["notes"])
    for name, kind in (("buffers", Buffer), ("collectives", Collective), ("advice", Advice)):
        made[name] = tuple(kind(**item) for item in fields[name])
    return Report(**made)


def _advice_line(advice: Advice) -> str:
    verdict = {True: "fits", False: "does not fit", None: "not tried"}[advice.fits]
    needed = f", {size(advice.hbm_needed_bytes)}" if advice.hbm_needed_bytes else ""
    tested = " (compiled)" if advice.verified else ""
    return f"{advice.change}: {verdict}{needed}{tested}\n     {advice.code}"
