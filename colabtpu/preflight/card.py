"""The report as an HTML card: plain markup with inline styles, which Colab, Kaggle and Jupyter
show alike, in light and dark themes, without scripts.

    card(report)        # what a notebook shows for a Report
"""

from html import escape
from typing import TYPE_CHECKING

from colabtpu.preflight.messages import layer_of, size

if TYPE_CHECKING:
    from colabtpu.preflight.report import Report

# Okabe and Ito's palette: told apart with any colour vision.
COLOURS = {
    "weights": "#0072B2",
    "optimizer": "#56B4E9",
    "state": "#999999",
    "batch": "#009E73",
    "activations": "#E69F00",
    "outputs": "#CC79A7",
    "program": "#F0E442",
}
GOOD, BAD, UNSURE = "#009E73", "#D55E00", "#8a8a8a"


def card(report: "Report") -> str:
    """Returns the report as HTML."""
    return (
        '<div style="font:14px/1.45 system-ui,sans-serif;max-width:760px;'
        'border:1px solid #8884;border-radius:10px;padding:14px 18px;margin:6px 0">'
        f"{_head(report)}{_bar(report)}{_buffers(report)}{_figures(report)}{_advice(report)}</div>"
    )


def _head(report: "Report") -> str:
    colour, word = UNSURE, "no verdict"
    if report.compiles is False:
        colour, word = BAD, "does not compile"
    elif report.fits is not None:
        colour, word = (GOOD, "fits") if report.fits else (BAD, "does not fit")
    if report.status == "out of memory":
        colour, word = BAD, "does not fit"
    badge = (
        f'<span style="background:{colour};color:#fff;border-radius:6px;padding:2px 10px;'
        f'font-weight:600;margin-right:10px">{word}</span>'
    )
    fix = f'<div style="margin-top:4px"><b>Next step:</b> {escape(report.fix)}</div>'
    return (
        f'<div style="font-size:15px">{badge}{escape(report.title)}</div>'
        f'<div style="margin:8px 0">{escape(report.summary)}{fix if report.fix else ""}</div>'
    )


def _bar(report: "Report") -> str:
    needed, usable = report.hbm_needed_bytes, report.hbm_usable_bytes
    if needed is None or not usable:
        return ""
    whole = max(needed, usable)
    parts = [(name, count) for name, count in report.hbm_parts if count > 0]
    pieces = "".join(
        f'<div title="{_shown(name)}: {size(count)}" style="width:{100 * count / whole:.2f}%;'
        f'background:{COLOURS[name]}"></div>'
        for name, count in parts
    )
    mark = (
        f'<div style="position:absolute;left:{100 * usable / whole:.2f}%;top:-3px;bottom:-3px;'
        'border-left:2px dashed currentColor" title="usable HBM"></div>'
    )
    legend = " &nbsp; ".join(
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:10px;'
        f'height:10px;background:{COLOURS[name]};border-radius:2px"></span> '
        f"{_shown(name)} {size(count)}</span>"
        for name, count in parts
    )
    return (
        f'<div style="margin-top:6px"><b>HBM</b> {size(needed)} of {size(usable)} '
        f"({needed / usable:.0%})</div>"
        '<div style="position:relative;margin:6px 0"><div style="display:flex;height:18px;'
        f'background:#8883;border-radius:4px;overflow:hidden">{pieces}</div>'
        f"{mark if needed > usable else ''}</div>"
        f'<div style="font-size:12px">{legend}</div>'
    )


def _shown(name: str) -> str:
    from colabtpu.preflight.report import SHOWN_AS

    return SHOWN_AS[name]


def _buffers(report: "Report") -> str:
    if not report.buffers:
        return ""
    rows = "".join(
        f'<tr><td style="text-align:right">{size(b.size_bytes)}</td><td><code>{escape(b.shape)}'
        f"</code></td><td>{escape(layer_of(b.op))}</td></tr>"
        for b in report.buffers[:8]
    )
    return _folded("largest buffers at the fullest moment", f"<table>{rows}</table>")


def _figures(report: "Report") -> str:
    rows = "".join(
        f"<tr><td><b>{escape(name)}</b></td><td>{escape(words)}</td></tr>"
        for name, words in report.rows()
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    notes = f'<ul style="margin:6px 0">{notes}</ul>' if notes else ""
    return (f'<table style="font-size:13px;margin-top:8px">{rows}</table>' if rows else "") + notes


def _advice(report: "Report") -> str:
    if not report.advice:
        return ""
    rows = ""
    for number, item in enumerate(report.advice, 1):
        verdict = {True: "fits", False: "does not fit", None: "not tried"}[item.fits]
        colour = {True: GOOD, False: BAD, None: UNSURE}[item.fits]
        needed = size(item.hbm_needed_bytes) if item.hbm_needed_bytes else ""
        rows += (
            f"<tr><td>{number}</td><td>{escape(item.change)}<br><code>{escape(item.code)}</code>"
            f'</td><td style="color:{colour};font-weight:600">{verdict}</td><td>{needed}</td>'
            f"<td>{'compiled' if item.verified else ''}</td></tr>"
        )
    return f'<div style="margin-top:8px"><b>What to change</b><table>{rows}</table></div>'


def _folded(title: str, body: str) -> str:
    return (
        f'<details style="margin-top:8px;font-size:13px"><summary>{escape(title)}</summary>'
        f"{body}</details>"
    )
