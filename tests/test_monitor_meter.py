"""Throughput by hand count: warm-up, compilation and pauses are not steps."""

from colabtpu.monitor import Meter


def test_first_steps_with_their_compilation_are_left_out():
    meter = Meter(warmup_steps=2)
    meter.resume(0.0)
    meter.step(60.0, tokens=100)  # compiles for a minute
    meter.step(61.0, tokens=100)  # still warming up: sets the zero
    assert meter.step_seconds is None
    assert meter.tokens_per_second is None
    meter.step(63.0, tokens=100)
    meter.step(65.0, tokens=100)
    assert meter.step_seconds == 2.0
    assert meter.tokens_per_second == 50.0


def test_pauses_do_not_count():
    meter = Meter(warmup_steps=1)
    meter.resume(0.0)
    meter.step(1.0, tokens=10)
    meter.step(2.0, tokens=10)
    meter.pause(2.5)
    meter.pause(50.0)  # pausing twice is pausing once
    meter.resume(100.0)
    meter.step(100.5, tokens=10)
    # Active from 1.0 to 2.5 and from 100.0 to 100.5: two steps in two seconds.
    assert meter.step_seconds == 1.0
    assert meter.tokens_per_second == 10.0


def test_window_forgets_old_steps():
    meter = Meter(warmup_steps=1, window=2)
    meter.resume(0.0)
    for now in (1.0, 11.0, 12.0, 13.0):
        meter.step(now, tokens=4)
    assert meter.step_seconds == 1.0


def test_several_steps_at_once_count_as_several():
    meter = Meter(warmup_steps=10)
    meter.resume(0.0)
    meter.step(30.0, tokens=1000, steps=10)
    meter.step(50.0, tokens=1000, steps=10)
    assert meter.step_seconds == 2.0
    assert meter.tokens_per_second == 50.0


def test_no_tokens_give_no_rate():
    meter = Meter(warmup_steps=1)
    meter.resume(0.0)
    meter.step(1.0)
    meter.step(2.0)
    assert meter.step_seconds == 1.0
    assert meter.tokens_per_second is None
