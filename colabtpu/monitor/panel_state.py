"""What the live panel shows, as plain data, and how that reads as text and as HTML.

    state = PanelState(phase="training", step=120, last_step=400, ...)
    print(as_text(state)); as_html(state)

Both say the same. Pictures are drawn with HTML and SVG alone: no script, no download.
"""

import html
from dataclasses import dataclass, field

SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class PanelState:
    """One look at a run.

    Attributes:
        phase: `"compiling"`, `"training"`, `"evaluating"`, `"saving"`, `"done"`, ...
        phase_seconds: how long it has been so.
        epoch, epochs: which of how many, from 1; 0 epochs when unknown.
        step, last_step: which of how many steps of this fit; 0 when their number is unknown.
        eta_seconds: until this fit ends, `None` when unknown.
        losses: the latest training losses, oldest first.
        numbers: tag -> the newest value, as in the event files.
        checkpoint: a line on the last checkpoint, empty without one.
        warnings: what is wrong, each with what to do.
    """

    phase: str
    phase_seconds: float = 0.0
    epoch: int = 0
    epochs: int = 0
    step: int = 0
    last_step: int = 0
    eta_seconds: float | None = None
    losses: tuple[float, ...] = ()
    numbers: dict[str, float] = field(default_factory=dict)
    checkpoint: str = ""
    warnings: tuple[str, ...] = ()


def as_text(state: PanelState) -> str:
    """Returns the state as one line, and one more for each warning."""
    parts = [f"{state.phase} {duration(state.phase_seconds)}", _progress(state)]
    parts += [f"{name} {value}" for name, value in _facts(state)]
    if state.losses:
        parts.append(sparkline(state.losses[-24:]))
    lines = [" | ".join(part for part in parts if part)]
    return "\n".join(lines + [f"  ! {warning}" for warning in state.warnings])


def as_html(state: PanelState) -> str:
    """Returns the state as one block of HTML."""
    facts = "".join(
        f'<div style="margin-right:24px"><div style="color:#888;font-size:11px">{_safe(name)}</div>'
        f'<div style="font-size:16px">{_safe(value)}</div></div>'
        for name, value in _facts(state)
    )
    warnings = "".join(
        f'<div style="color:#b3261e;margin-top:4px">&#9888; {_safe(warning)}</div>'
        for warning in state.warnings
    )
    share = state.step / state.last_step if state.last_step else 0.0
    return (
        '<div style="font-family:sans-serif;font-size:13px;line-height:1.4;max-width:760px">'
        f"<div><b>{_safe(state.phase)}</b> {duration(state.phase_seconds)} &nbsp; "
        f"{_safe(_progress(state))}</div>"
        f"{_bar(share, '#1a73e8')}"
        f'<div style="display:flex;flex-wrap:wrap;margin:8px 0">{facts}</div>'
        f"{_curve(state.losses)}{_memory_bar(state)}{warnings}</div>"
    )


def sparkline(values: tuple[float, ...]) -> str:
    """Returns the values as a row of eight heights; what is not finite is a gap."""
    finite = [v for v in values if abs(v) < float("inf")]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(
        SPARKS[min(int((v - low) / span * 8), 7)] if abs(v) < float("inf") else " " for v in values
    )


def duration(seconds: float) -> str:
    """Returns seconds as `42 s`, `3:07` or `1:02:33`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _progress(state: PanelState) -> str:
    parts = []
    if state.epochs:
        parts.append(f"epoch {state.epoch} of {state.epochs}")
    if state.last_step:
        parts.append(f"step {state.step:,} of {state.last_step:,}")
    elif state.step:
        parts.append(f"step {state.step:,}")
    if state.eta_seconds is not None:
        parts.append(f"{duration(state.eta_seconds)} left")
    return ", ".join(parts)


# Tag -> its name on the panel, and how its value is shown.
_SHOWN = {
    "loss": ("loss", "{:.4g}"),
    "val_loss": ("validation loss", "{:.4g}"),
    "accuracy": ("accuracy", "{:.1%}"),
    "perplexity": ("perplexity", "{:.4g}"),
    "bits_per_byte": ("bits/byte", "{:.3f}"),
    "speed/tokens_per_second": ("tokens/s", "{:,.0f}"),
    "speed/step_seconds": ("s/step", "{:.3g}"),
    "speed/mfu_percent": ("MFU", "{:.1f} %"),
    "speed/data_wait_share": ("waiting for data", "{:.0%}"),
    "memory/hbm_gib": ("HBM", "{:.1f} GiB"),
    "memory/host_gib": ("host memory", "{:.1f} GiB"),
}


def _facts(state: PanelState) -> list[tuple[str, str]]:
    facts = [
        (name, shape.format(state.numbers[tag]))
        for tag, (name, shape) in _SHOWN.items()
        if tag in state.numbers
    ]
    return facts + ([("last checkpoint", state.checkpoint)] if state.checkpoint else [])


def _bar(share: float, colour: str) -> str:
    width = 100 * min(max(share, 0.0), 1.0)
    return (
        '<div style="background:#ddd;height:6px;border-radius:3px;margin:4px 0">'
        f'<div style="background:{colour};height:6px;border-radius:3px;width:{width:.1f}%"></div>'
        "</div>"
    )


def _memory_bar(state: PanelState) -> str:
    used, limit = (state.numbers.get(f"memory/hbm{x}_gib", 0.0) for x in ("", "_limit"))
    if not limit:
        return ""
    label = f"HBM {used:.1f} of {limit:.1f} GiB"
    return f'<div style="color:#888;font-size:11px">{label}</div>{_bar(used / limit, "#188038")}'


def _curve(losses: tuple[float, ...]) -> str:
    finite = [v for v in losses if abs(v) < float("inf")]
    if len(finite) < 2:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    points = " ".join(
        f"{300 * i / (len(losses) - 1):.1f},{44 - 40 * (v - low) / span:.1f}"
        for i, v in enumerate(losses)
        if abs(v) < float("inf")
    )
    return (
        '<svg width="300" height="48" role="img" aria-label="training loss">'
        f'<polyline points="{points}" fill="none" stroke="#e37400" stroke-width="1.5"/></svg>'
    )


def _safe(text: str) -> str:
    return html.escape(text)
