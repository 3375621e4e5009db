"""What the panel says about a state, as text and as HTML, and the phases that rooms announce."""

import math
import re

import pytest

from colabtpu.monitor import note_checkpoint, phase, status
from colabtpu.monitor.panel_state import PanelState, as_html, as_text, duration, sparkline

STATE = PanelState(
    phase="training",
    phase_seconds=75,
    epoch=2,
    epochs=3,
    step=1200,
    last_step=3000,
    eta_seconds=3725,
    losses=(4.0, 3.0, 2.0, 1.0),
    numbers={
        "loss": 2.34567,
        "val_loss": 2.5,
        "accuracy": 0.4567,
        "speed/tokens_per_second": 148829.4,
        "speed/mfu_percent": 61.23,
        "speed/data_wait_share": 0.034,
        "memory/hbm_gib": 10.0,
        "memory/hbm_limit_gib": 16.0,
        "health/gradient_norm": 0.5,
    },
    checkpoint="step 1,000, 40 s ago",
    warnings=("The loss is not a number: lower the learning rate.",),
)


def plain(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>|&nbsp;", " ", html))


def test_text_says_everything_in_one_line_and_each_warning_in_one_more():
    line, warning = as_text(STATE).splitlines()
    for part in (
        "training 1:15", "epoch 2 of 3", "step 1,200 of 3,000", "1:02:05 left", "loss 2.346",
        "validation loss 2.5", "accuracy 45.7%", "tokens/s 148,829", "MFU 61.2 %",
        "waiting for data 3%", "HBM 10.0 GiB", "last checkpoint step 1,000, 40 s ago",
    ):  # fmt: skip
        assert part in line
    assert warning == "  ! The loss is not a number: lower the learning rate."


def test_html_says_the_same_as_the_text():
    shown = plain(as_html(STATE))
    for part in as_text(STATE).split("\n")[0].split(" | ")[2:-1]:
        name, _, _ = part.partition(" ")
        assert name in shown
    for figure in ("2.346", "45.7%", "148,829", "61.2 %", "3%", "10.0 of 16.0 GiB", "1:02:05 left"):
        assert figure in shown
    assert "The loss is not a number" in shown


def test_html_shows_progress_and_memory_as_bars_and_the_loss_as_a_line():
    html = as_html(STATE)
    assert "width:40.0%" in html, "1,200 of 3,000 steps"
    assert "width:62.5%" in html, "10 of 16 GiB"
    # Four falling losses, from the top left to the bottom right.
    assert 'points="0.0,4.0 100.0,17.3 200.0,30.7 300.0,44.0"' in html


def test_html_escapes_what_it_is_given():
    html = as_html(PanelState(phase="<b>", warnings=("a < b & c",)))
    assert "&lt;b&gt;" in html
    assert "a &lt; b &amp; c" in html


def test_unknown_length_shows_no_share_and_no_time_left():
    line = as_text(PanelState(phase="training", step=7))
    assert "step 7" in line
    assert "left" not in line


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0 s"), (59.9, "59 s"), (60, "1:00"), (3600, "1:00:00")]
)
def test_durations_read_as_people_write_them(seconds, shown):
    assert duration(seconds) == shown


def test_sparkline_runs_from_low_to_high_and_leaves_gaps():
    assert sparkline((0.0, 7.0)) == "▁█"
    assert sparkline((1.0, math.nan, 2.0)) == "▁ █"
    assert sparkline((1.0, 1.0)) == "▁▁"
    assert sparkline((math.nan,)) == ""


def test_html_survives_losses_that_are_no_numbers():
    assert "<svg" not in as_html(PanelState(phase="x", losses=(math.nan, math.inf)))


def test_innermost_phase_is_the_current_one():
    assert status.current() is None
    with phase("saving"):
        with phase("installing"):
            assert status.current().name == "installing"
        assert status.current().name == "saving"
    assert status.current() is None


def test_phase_ends_when_its_block_fails():
    with pytest.raises(ValueError, match="no"), phase("saving"):
        raise ValueError("no")
    assert status.current() is None


def test_last_checkpoint_is_remembered():
    note_checkpoint(step=12)
    assert status.last_checkpoint().step == 12
