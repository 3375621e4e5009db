"""What is wrong with this runtime, why, and the next step; which engine and device a run takes.

    python -m colabtpu doctor [--json]       # exit status 0 when a training run can start
    python -m colabtpu doctor --bundle       # a small report for a bug report

    from colabtpu import doctor, environment
    doctor.diagnose(environment.detect())    # prints; renders as a card in a notebook
    doctor.explain(error)                    # what an error means, or None

What can be wrong stands in catalogue.py. Imports no ML framework and runs nothing: a TPU that
looks right may still fail to start, which `connect()` finds out in a subprocess.
"""

import argparse
import dataclasses
import html
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from colabtpu import environment as surroundings
from colabtpu.catalogue import ENTRIES, Entry
from colabtpu.environment import Environment
from colabtpu.errors import InvalidArgumentError
from colabtpu.symptoms import Explanation, explain, watch

__all__ = ["Diagnosis", "Explanation", "Finding", "choose_engine", "diagnose", "explain", "watch"]

ENGINES = ("tensorflow", "jax")
_ORDER = {"error": 0, "warning": 1, "note": 2}
_MARK = {"error": "✗", "warning": "!", "note": "·"}
_COLOUR = {"error": "#b3261e", "warning": "#9a6700", "note": "#57606a"}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong here: what (with the value seen), why, and the next step."""

    code: str
    severity: str
    what: str
    why: str
    fix: str


@dataclass(frozen=True)
class Diagnosis:
    """The findings, and the engine and device that a training run would use.

    Attributes:
        environment: what was looked at.
        engine: `"tensorflow"` or `"jax"`.
        reason: why that engine.
        device: the best device present, in words.
        findings: what is wrong, errors first.
    """

    environment: Environment
    engine: str
    reason: str
    device: str
    findings: tuple[Finding, ...]

    @property
    def ready(self) -> bool:
        """Whether a training run can start on the best device present."""
        return all(finding.severity != "error" for finding in self.findings)

    def to_dict(self) -> dict[str, object]:
        """Returns everything as plain data, ready for JSON."""
        plain = dataclasses.asdict(self.environment)
        plain["chip"] = self.environment.chip.name if self.environment.chip else None
        plain["imported"] = sorted(self.environment.imported)
        return {
            "ready": self.ready,
            "engine": self.engine,
            "reason": self.reason,
            "device": self.device,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "environment": plain,
        }

    def __str__(self) -> str:
        return "\n".join(
            [f"{name:<9} {value}" for name, value in self._rows()]
            + [_as_text(finding) for finding in self.findings]
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='padding-right:1em'>{html.escape(name)}</td>"
            f"<td>{html.escape(value)}</td></tr>"
            for name, value in self._rows()
        )
        return (
            "<div style='border:1px solid #8886;border-radius:6px;padding:.6em 1em;max-width:56em'>"
            f"<table>{rows}</table>{''.join(map(_as_html, self.findings))}</div>"
        )

    def _rows(self) -> list[tuple[str, str]]:
        e = self.environment
        builds = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "jax", "libtpu", "keras")
        errors = sum(finding.severity == "error" for finding in self.findings)
        return [
            ("platform", f"{e.platform}, Python {e.python}"),
            ("device", f"{self.device}{_because(e.evidence)}"),
            ("engine", f"{self.engine}: {self.reason}"),
            ("builds", ", ".join(f"{n} {e.builds[n]}" for n in builds if n in e.builds) or "none"),
            ("verdict", "a training run can start" if self.ready
             else f"a training run cannot start: {errors} to fix"),
        ]  # fmt: skip


def diagnose(environment: Environment | None = None, engine: str = "auto") -> Diagnosis:
    """Says what is wrong here and what a training run would use.

    Args:
        environment: what to look at; this process's if left out.
        engine: `"tensorflow"`, `"jax"`, or `"auto"` for the one that `choose_engine` takes.

    Returns:
        The `Diagnosis`.

    Raises:
        InvalidArgumentError: no such engine.
    """
    environment = surroundings.detect() if environment is None else environment
    chosen, reason = choose_engine(environment, engine)
    findings = [found for entry in ENTRIES if (found := _examine(entry, environment, chosen))]
    findings.sort(key=lambda finding: _ORDER[finding.severity])
    device = environment.device
    if environment.accelerator == "cpu":
        device = "CPU, as 8 logical devices"
    return Diagnosis(environment, chosen, reason, device, tuple(findings))


def choose_engine(environment: Environment, engine: str = "auto") -> tuple[str, str]:
    """Returns the engine that a run takes here, and why.

    TensorFlow where the runtime can hold it, else JAX. A Keras that is imported already has
    settled it, and KERAS_BACKEND is obeyed where that engine can run.

    Args:
        environment: what to look at.
        engine: `"tensorflow"`, `"jax"` or `"auto"`.

    Returns:
        The engine and the reason.

    Raises:
        InvalidArgumentError: no such engine.
    """
    if engine in ENGINES:
        return engine, "asked for"
    if engine != "auto":
        raise InvalidArgumentError(
            f"`engine` must be 'auto', 'tensorflow' or 'jax'. Received: engine={engine!r}",
            "Leave it out: 'auto' takes what this runtime can hold.",
        )
    against = {name: _obstacles(environment, name) for name in ENGINES}
    if "keras" in environment.imported and environment.keras_backend in ENGINES:
        return environment.keras_backend, "Keras is imported with that backend"
    asked = environment.variables.get("KERAS_BACKEND")
    if asked in ENGINES and not against[asked]:
        return asked, f"KERAS_BACKEND={asked}"
    if not against["tensorflow"]:
        return "tensorflow", "this runtime can hold it"
    if not against["jax"] or environment.accelerator == "tpu":
        return "jax", against["tensorflow"][0].what.rstrip(".")
    return "tensorflow", "neither engine is ready; on this device TensorFlow comes first"


def _obstacles(environment: Environment, engine: str) -> list[Finding]:
    """The errors that stand against one engine, and not against the other as well."""
    found = (_examine(entry, environment, engine) for entry in ENTRIES if entry.engine == engine)
    return [finding for finding in found if finding and finding.severity == "error"]


def _examine(entry: Entry, environment: Environment, engine: str) -> Finding | None:
    seen = entry.check(environment, engine) if entry.check else None
    if seen is None:
        return None
    severity = entry.severity if entry.engine in (None, engine) else "note"
    return Finding(
        entry.code,
        severity,
        entry.what.format(seen=seen),
        entry.why.format(seen=seen),
        entry.fix.format(seen=seen),
    )


def _because(evidence: tuple[str, ...]) -> str:
    return f" ({'; '.join(evidence)})" if evidence else ""


def _as_text(finding: Finding) -> str:
    return (
        f"\n{_MARK[finding.severity]} {finding.what}  [{finding.code}]\n"
        f"    why:  {finding.why}\n"
        f"    next: {finding.fix}"
    )


def _as_html(finding: Finding) -> str:
    return (
        f"<p style='margin:.6em 0'><b style='color:{_COLOUR[finding.severity]}'>"
        f"{_MARK[finding.severity]} {html.escape(finding.what)}</b> "
        f"<code>{finding.code}</code><br>{html.escape(finding.why)}<br>"
        f"Next: {html.escape(finding.fix)}</p>"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    parser.add_argument("--engine", choices=("auto", *ENGINES), default="auto")
    parser.add_argument("--json", action="store_true", help="print plain data")
    parser.add_argument(
        "--bundle",
        nargs="?",
        type=Path,
        const=Path("colabtpu-report.md"),
        metavar="FILE",
        help="write a small report without secrets, for a bug report (%(const)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the diagnosis; exit status 0 when a training run can start, 1 otherwise."""
    diagnosis = diagnose(engine=args.engine)
    print(json.dumps(diagnosis.to_dict(), indent=2) if args.json else diagnosis)
    if args.bundle:
        from colabtpu import bundle  # it imports this module

        print(f"\nreport: {bundle.write(diagnosis, args.bundle)}", file=sys.stderr)
    return 0 if diagnosis.ready else 1
