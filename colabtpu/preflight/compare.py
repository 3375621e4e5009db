"""One table over chips: does it fit, how full, how fast at best.

ct.preflight.compare(model, data, ["v5e-1", "v5e-8", "v6e-1"])
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from colabtpu.preflight.judge import Progress, preflight, status_line
from colabtpu.preflight.messages import size
from colabtpu.preflight.report import Report

HEADINGS = ("target", "verdict", "HBM needed", "of", "rows a device", "bound: ms a step",
            "bound: tokens/s", "bound by")  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Reports on the same step and several targets; prints and shows as a table."""

    reports: tuple[Report, ...]

    def __str__(self) -> str:
        rows = [list(HEADINGS), *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(h)}</th>" for h in HEADINGS)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows()
        )
        return f"<table><tr>{head}</tr>{body}</table>"

    def rows(self) -> list[list[str]]:
        """The table's cells, a row for each target."""
        return [_row(report) for report in self.reports]


def compare(
    model: Any,
    data: Any,
    targets: Sequence[str] = ("v5e-1", "v6e-1"),
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Comparison:
    """Judges one step on several targets.

    Args:
        model: a compiled Keras model.
        data: one batch or its spec, or a data set; the global batch is the same everywhere.
        targets: the slices.
        progress: called with a few words as things move on; printed on one line if left out.
        **options: as in `preflight`; no advice is sought unless `advise=True`.

    Returns:
        The `Comparison`.
    """
    show = progress or status_line()

    def judged(target: str) -> Report:
        def say(words: str) -> None:
            show(f"{target}: {words}" if words else "")

        return preflight(model, data, target, progress=say, **{"advise": False, **options})

    return Comparison(tuple(judged(target) for target in targets))


def _row(report: Report) -> list[str]:
    seconds, tokens = report.step_seconds_bound, report.tokens_per_second_bound
    return [
        report.target,
        _word(report),
        size(report.hbm_needed_bytes) if report.hbm_needed_bytes else "–",
        size(report.hbm_usable_bytes) if report.hbm_usable_bytes else "–",
        f"{report.per_replica_batch:,}",
        f"≥ {seconds * 1e3:,.1f}" if seconds else "–",
        f"≤ {tokens:,.0f}" if tokens else "–",
        report.bound_by or "–",
    ]


def _word(report: Report) -> str:
    if report.status == "out of memory" or report.fits is False:
        return "does not fit"
    if report.compiles is False:
        return "does not compile"
    if report.fits is None:
        return f"no verdict ({report.status})"
    return "fits"
