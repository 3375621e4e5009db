"""The largest batch that fits: few compiles, and both sides of the edge compiled.

    found = ct.preflight.largest_batch(model, data, "v5e-1", global_batch=512)
    found.per_core_batch, found.accumulation_steps

Memory is nearly affine in the batch, so two layouts give a line, and the line gives a guess. But
XLA recomputes activations of its own accord when memory gets tight, so the edge lies at or beyond
the guess; the search walks from there until one batch fits and the next one up does not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from colabtpu import chips
from colabtpu.errors import InvalidArgumentError
from colabtpu.preflight import compiler, variants
from colabtpu.preflight import spec as specs
from colabtpu.preflight.judge import Progress, judge, status_line
from colabtpu.preflight.messages import size
from colabtpu.preflight.report import Report

SMALLEST = (1, 2, 4)  # below 8 rows, the sublanes of a tile, only to answer at all


@dataclass(frozen=True)
class Trial:
    """One batch that was tried.

    Attributes:
        per_core_batch: rows on one device.
        hbm_needed_bytes: what the step needs, if libtpu got as far.
        fits: whether that fits.
        compiled: whether libtpu compiled to the end (or refused), rather than laid out memory.
    """

    per_core_batch: int
    hbm_needed_bytes: int | None
    fits: bool
    compiled: bool


@dataclass(frozen=True)
class LargestBatch:
    """The answer of `largest_batch`.

    Attributes:
        target: the slice.
        replicas: its devices.
        per_core_batch: the largest number of rows on one device that fits; 0 if none does.
        next_up: the next larger one, which does not fit; `None` when the limit was reached.
        accumulation_steps: batches whose gradients to accumulate for the wanted global batch.
        global_batch: rows an update: per-core batch x replicas x accumulation steps.
        trials: everything that was tried, in order.
        report: on the largest batch that fits.
    """

    target: str
    replicas: int
    per_core_batch: int
    next_up: int | None
    accumulation_steps: int
    global_batch: int
    trials: tuple[Trial, ...]
    report: Report | None

    def __str__(self) -> str:
        if not self.per_core_batch:
            return f"{self.target}: not even one row a core fits."
        total = self.per_core_batch * self.replicas
        lines = [f"{self.target}: {self.per_core_batch:,} rows a core fit ({total:,} in all)."]
        if self.next_up:
            lines[0] += f" {self.next_up:,} do not."
        if self.accumulation_steps > 1:
            lines.append(
                f"For {self.global_batch:,} rows an update: batch {total:,}, "
                f"gradient_accumulation_steps={self.accumulation_steps}."
            )
        for trial in sorted(self.trials, key=lambda t: t.per_core_batch):
            needed = size(trial.hbm_needed_bytes) if trial.hbm_needed_bytes else "?"
            verdict = "fits" if trial.fits else "does not fit"
            how = "" if trial.compiled else " (memory laid out)"
            lines.append(f"  {trial.per_core_batch:>6,} a core: {needed:>11}  {verdict}{how}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from html import escape

        return f'<pre style="margin:0">{escape(str(self))}</pre>'


def largest_batch(
    model: Any,
    data: Any,
    target: str = "v5e-1",
    *,
    global_batch: int | None = None,
    seq_len: int | None = None,
    limit: int = 4096,
    libtpu: str | None = None,
    time_limit_seconds: float = compiler.TIME_LIMIT_SECONDS,
    progress: Progress | None = None,
) -> LargestBatch:
    """Finds the largest per-core batch whose training step fits.

    Args:
        model: a compiled Keras model.
        data: one batch or its spec, or a data set; its number of rows does not matter.
        target: the slice.
        global_batch: rows wanted an update; what does not fit at once is accumulated, and the
            accumulating step is what is compiled.
        seq_len: the sequences' length, where `data` leaves it open.
        limit: the largest per-core batch to try.
        libtpu: as in `preflight`.
        time_limit_seconds: for each compile.
        progress: called with a few words as things move on; printed on one line if left out.

    Returns:
        The `LargestBatch`: multiples of 8 up to 128, then of 128; below 8 if 8 do not fit.

    Raises:
        InvalidArgumentError: there is no TPU compiler here, or the step does not compile at all.
    """
    missing = compiler.unavailable(libtpu)
    if missing:
        raise InvalidArgumentError(missing, "Use `ct.preflight.estimate` here.")
    slice_ = chips.target(target)
    show = progress or status_line()
    structure = specs.batch_spec(data, batch=slice_.num_devices, seq_len=seq_len)
    trials: dict[int, tuple[Trial, Report]] = {}

    def ask(rows: int, memory_only: bool) -> Trial:
        kept = trials.get(rows)
        if kept is not None and (memory_only or kept[0].compiled):
            return kept[0]
        show(f"{len(trials) + 1}: {rows} rows a core")
        batch = specs.with_batch(structure, rows * slice_.num_devices)
        with variants.accumulating(model, _steps(global_batch, rows * slice_.num_devices)):
            report = judge(
                model,
                batch,
                slice_,
                "train",
                memory_only,
                libtpu,
                time_limit_seconds,
                lambda words: show(f"{rows} rows a core: {words}"),
            )
        if report.fits is None:
            raise InvalidArgumentError(report.summary, report.fix or "See `ct.preflight(…)`.")
        done = report.status in (compiler.COMPILED, "out of memory")
        trials[rows] = (Trial(rows, report.hbm_needed_bytes, report.fits, done), report)
        return trials[rows][0]

    try:
        best, next_up = _search(ask, slice_.chip.hbm_usable_bytes, limit)
    finally:
        show("")
    total = best * slice_.num_devices
    steps = _steps(global_batch, total) if total else 1
    return LargestBatch(
        target=target,
        replicas=slice_.num_devices,
        per_core_batch=best,
        next_up=next_up,
        accumulation_steps=steps,
        global_batch=total * steps,
        trials=tuple(trial for trial, _ in trials.values()),
        report=trials[best][1] if best else None,
    )


def candidates(limit: int) -> list[int]:
    """Returns the per-core batches to choose from, smallest first."""
    fine = [*SMALLEST, *range(8, 129, 8)]
    return [c for c in fine + list(range(256, limit + 1, 128)) if c <= limit]


def _steps(global_batch: int | None, at_once: int) -> int:
    return max(-(-global_batch // at_once), 1) if global_batch and at_once else 1


def _search(ask: Callable[[int, bool], Trial], usable: int, limit: int) -> tuple[int, int | None]:
    """The edge among the candidates: the last that fits, and the first that does not."""
    sizes = candidates(limit)
    fitting: list[Trial] = []
    low, high = -1, len(sizes)  # sizes[low] fits, sizes[high] does not
    at, step = sizes.index(8) if 8 in sizes else 0, 1
    while high - low > 1:
        trial = ask(sizes[at], True)
        if trial.fits:
            low = at
            fitting.append(trial)
        else:
            high = at
        guess = _guess(sizes, fitting, usable)
        if low < guess < high:
            at = guess
        elif high == len(sizes):  # the line ends below what fits already: stride on
            at, step = min(low + step, high - 1), step * 2
        else:
            at = (low + high) // 2
    return _confirmed(ask, sizes, low, high)


def _confirmed(
    ask: Callable[[int, bool], Trial], sizes: list[int], low: int, high: int
) -> tuple[int, int | None]:
    """The same edge with both sides compiled to the end, moved where that says otherwise."""
    while low >= 0 and not ask(sizes[low], False).fits:
        low, high = low - 1, low
    while high < len(sizes) and ask(sizes[high], False).fits:
        low, high = high, high + 1
    return sizes[low] if low >= 0 else 0, sizes[high] if high < len(sizes) else None


def _guess(sizes: list[int], fitting: list[Trial], usable: int) -> int:
    """Where the line through the last two batches that fit meets the limit; -1 without a line."""
    points = sorted((t.per_core_batch, t.hbm_needed_bytes or 0) for t in fitting)[-2:]
    if len(points) < 2:
        return -1
    (x1, y1), (x2, y2) = points
    edge = x2 + (usable - y2) / max((y2 - y1) / (x2 - x1), 1.0)
    return max((i for i, rows in enumerate(sizes) if rows <= edge), default=-1)
