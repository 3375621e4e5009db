"""What to change when a step does not fit: in order, and each tried by the compiler.

    report = advised(report, model, structure, target)

The order is from what changes nothing in the result to what changes the method: a smaller
per-core batch with accumulated gradients, recomputed activations, a loss without logits, bfloat16
products, LoRA. Each
change is made to the model for the length of one lowering (`variants.py`), and libtpu lays out
the memory of the changed step.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from colabtpu.chips import Target
from colabtpu.preflight import spec as specs
from colabtpu.preflight import variants
from colabtpu.preflight.report import Advice, Report

Judge = Callable[[Any, Any], Report]
MOST_LORA_PARAMETERS = 1_500_000_000  # a copy of a larger model may not fit into the host's RAM


def advised(
    report: Report,
    model: Any,
    structure: Any,
    target: Target,
    libtpu: str | None = None,
    time_limit_seconds: float = 1800.0,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Returns the report with advice, every item laid out by libtpu.

    Args:
        report: on a step that does not fit.
        model: the compiled Keras model.
        structure: the spec of its global batch.
        target: the slice.
        libtpu: as in `preflight`.
        time_limit_seconds: for each item.
        progress: called with a few words as things move on.
    """
    from colabtpu.preflight.judge import judge

    def ask(changed: Any, batch: Any) -> Report:
        return judge(changed, batch, target, "train", True, libtpu, time_limit_seconds)

    found = []
    for attempt in (_accumulate, _rematerialize, _chunked_loss, _bfloat16, _lora):
        if progress:
            progress(f"trying what would help: {attempt.__doc__}")
        with contextlib.suppress(_NotForThisModel):
            found.append(attempt(model, structure, target, ask))
    return replace(report, advice=tuple(found))


class _NotForThisModel(Exception):
    """The change does not apply."""


def _accumulate(model: Any, structure: Any, target: Target, ask: Judge) -> Advice:
    """a smaller batch"""
    rows = specs.rows(structure)
    best: Advice | None = None
    for steps in _divisors(rows // target.num_devices):
        with variants.accumulating(model, steps):
            report = ask(model, variants.smaller(structure, steps))
        share = rows // target.num_devices // steps
        best = _advice(
            report,
            f"{share} rows a core and step, gradients of {steps} steps accumulated: "
            f"the same {rows:,} rows an update",
            f"optimizer = {type(model.optimizer).__name__}(…, gradient_accumulation_steps={steps})"
            f"; batch = {rows // steps}",
        )
        if report.fits:
            return best
    if best is None:
        raise _NotForThisModel
    return best


def _divisors(share: int) -> Iterator[int]:
    """Powers of two that divide the per-core batch, up to one row a step."""
    steps = 2
    while steps <= share and share % steps == 0:
        yield steps
        steps *= 2


def _rematerialize(model: Any, structure: Any, target: Target, ask: Judge) -> Advice:
    """recomputed activations"""
    own = variants.own_blocks(model)
    if any(block.spec.remat != "none" for block in own):
        raise _NotForThisModel
    if not own and not variants.repeated_blocks(model):
        raise _NotForThisModel
    with variants.rematerialized(model) as names:
        report = ask(model, structure)
    code = (
        "ct.models.transformer_lm(…, remat='full')"
        if own
        else f"with keras.RematScope(mode='list_of_layers', layer_names={_shortened(names)}): "
        "build the model"
    )
    return _advice(
        report,
        f"recompute the activations of {len(names)} blocks in the backward pass "
        "(about a third more arithmetic)",
        code,
    )


def _chunked_loss(model: Any, structure: Any, target: Target, ask: Judge) -> Advice:
    """a loss without logits"""
    if not variants.lends_its_head(model):
        raise _NotForThisModel
    with variants.chunked_loss(model):
        report = ask(model, structure)
    return _advice(
        report,
        "compute the loss a chunk of tokens at a time, so that the logits never exist at once",
        "model.compile(…, loss=ct.losses.next_token(model), metrics=ct.losses.metrics(model))",
    )


def _bfloat16(model: Any, structure: Any, target: Target, ask: Judge) -> Advice:
    """bfloat16"""
    if not variants.is_float32(model):
        raise _NotForThisModel
    with variants.in_bfloat16(model):
        report = ask(model, structure)
    return _advice(
        report,
        "multiply in bfloat16, keep weights in float32",
        "keras.config.set_dtype_policy('mixed_bfloat16') before building the model",
    )


def _lora(model: Any, structure: Any, target: Target, ask: Judge) -> Advice:
    """LoRA"""
    if model.count_params() > MOST_LORA_PARAMETERS:
        raise _NotForThisModel
    try:
        adapted = variants.with_lora(model)
    except Exception as error:
        raise _NotForThisModel from error
    if adapted is None:
        raise _NotForThisModel
    owner = "model.backbone" if hasattr(model, "backbone") else "model"
    return _advice(
        ask(adapted, structure),
        f"train rank-{variants.LORA_RANK} factors of query and value only "
        "(for fine-tuning, not for training from scratch)",
        f"{owner}.enable_lora({variants.LORA_RANK})",
    )


def _advice(report: Report, change: str, code: str) -> Advice:
    return Advice(
        change=change,
        code=code,
        fits=report.fits if report.compiles or report.status == "out of memory" else None,
        hbm_needed_bytes=report.hbm_needed_bytes,
        verified=report.status in ("compiled", "scheduled", "out of memory"),
    )


def _shortened(names: list[str]) -> str:
    return str(names) if len(names) <= 3 else f"['{names[0]}', …, '{names[-1]}']"
