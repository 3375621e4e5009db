"""The live panel and the profile, on real fits."""

import math

import keras
import numpy as np
import pytest
from monitor_helpers import text

from colabtpu import InvalidArgumentError, monitor
from colabtpu.monitor.panel import Panel, TextView
from colabtpu.monitor.profiling import verdict
from colabtpu.monitor.xplane import TraceShares, analyse


class Recorder:
    def __init__(self):
        self.states = []

    def show(self, state):
        self.states.append(state)


class Each(keras.callbacks.Callback):
    """Calls a function at the beginning of each step."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_train_batch_begin(self, batch, logs=None):
        self.function(batch)


def line_model(rate=0.1):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="line")
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model


def numbers(rows):
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype("float32")
    return x, x.sum(-1, keepdims=True)


def watch(folder, view):
    (log,) = monitor.callbacks(folder, run="run", panel=False)
    return log, Panel(log, view=view)


def test_panel_follows_a_fit_from_compiling_to_done(tmp_path):
    log, panel = watch(tmp_path, view := Recorder())
    seen = []
    x, y = numbers(48)
    line_model().fit(
        x, y, batch_size=8, epochs=2, validation_data=(x, y), verbose=0,
        callbacks=[log, panel, Each(lambda _: seen.append(panel.state()))],
    )  # fmt: skip
    assert [s.phase for s in seen[:2]] == ["compiling", "compiling"]
    assert {s.phase for s in seen[6:]} == {"training"}
    assert [s.step for s in seen] == list(range(12))
    assert {(s.last_step, s.epochs) for s in seen} == {(12, 2)}
    assert [s.epoch for s in seen] == [1] * 6 + [2] * 6
    last = view.states[-1]
    assert (last.phase, last.step) == ("done", 12)
    assert last.numbers["val_loss"] < seen[0].numbers.get("val_loss", math.inf)
    assert seen[-1].eta_seconds > 0
    # Whether the device waits for data depends on how busy this machine is.
    assert not [warning for warning in last.warnings if "waits for data" not in warning]


def test_other_rooms_phases_are_shown_while_they_last(tmp_path):
    log, panel = watch(tmp_path, Recorder())

    class Saving(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with monitor.phase("saving"):
                phases.append(panel.state().phase)
            monitor.note_checkpoint(log.step)
            phases.append(panel.state().checkpoint)

    phases = []
    x, y = numbers(16)
    line_model().fit(x, y, batch_size=8, callbacks=[log, panel, Saving()], verbose=0)
    assert phases == ["saving", "step 2, 0 s ago"]


def test_stop_button_ends_the_fit_and_saves_the_model(tmp_path):
    log, panel = watch(tmp_path, view := Recorder())
    x, y = numbers(80)
    model = line_model()
    stop = Each(lambda batch: panel.ask_to_stop() if batch == 3 else None)
    history = model.fit(
        x, y, batch_size=8, epochs=5, verbose=0, shuffle=False, callbacks=[log, stop, panel]
    )
    assert len(history.history["loss"]) == 1
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 4
    saved = keras.models.load_model(tmp_path / "run" / "stopped.keras")
    np.testing.assert_array_equal(saved.layers[-1].get_weights()[0], model.get_weights()[0])
    assert view.states[-1].phase == "stopped and saved"


def test_loss_that_is_not_a_number_is_warned_of(tmp_path):
    log, panel = watch(tmp_path, view := Recorder())
    x, y = numbers(32)
    y[20] = np.nan
    line_model().fit(x, y, batch_size=8, shuffle=False, callbacks=[log, panel], verbose=0)
    assert "not a number" in view.states[-1].warnings[0]


def test_exploding_gradient_is_warned_of(tmp_path):
    log, panel = watch(tmp_path, view := Recorder())
    x, y = numbers(8 * 20)
    y[-8:] *= 1e3
    line_model(0.01).fit(x, y, batch_size=8, shuffle=False, callbacks=[log, panel], verbose=0)
    assert "times its usual size" in view.states[-1].warnings[0]


def test_text_view_prints_phases_once_and_stays_short(tmp_path):
    lines = []
    log, panel = watch(tmp_path, TextView(lines.append))
    x, y = numbers(8 * 300)
    line_model().fit(x, y, batch_size=8, callbacks=[log, panel], verbose=0)
    phases = [line.split()[0] for line in lines]
    assert phases[0] == "compiling"
    assert phases[-1] == "done"
    assert len(lines) < 12


def test_interrupted_fit_and_the_next_one_leave_one_drawing_thread_at_most(tmp_path):
    import threading

    log, panel = watch(tmp_path, Recorder())
    x, y = numbers(32)

    def interrupt(batch):
        if batch == 2:
            raise KeyboardInterrupt

    model = line_model()
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=8, callbacks=[log, panel, Each(interrupt)], verbose=0)
    model.fit(x, y, batch_size=8, callbacks=[log, panel], verbose=0)
    assert not [t for t in threading.enumerate() if t.name == "colabtpu-panel"]


def test_profile_traces_after_warm_up_and_says_where_the_time_went(tmp_path, capsys):
    x = np.random.default_rng(0).normal(size=(8 * 64, 256)).astype("float32")
    model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256)])
    model.compile("sgd", "mse")
    logs = monitor.callbacks(tmp_path, run="run", panel=False, profile_steps=2)
    model.fit(x, x, batch_size=64, callbacks=logs, verbose=0)
    (trace,) = (tmp_path / "run" / "plugins" / "profile").glob("*/*.xplane.pb")
    found = analyse(tmp_path)
    assert trace.stat().st_size > 0
    assert 0 < found.matrix_share <= 1, "two matrix products a step"
    assert found.collective_share == 0, "one device"
    said = capsys.readouterr().out
    assert "matrix products" in said
    assert "waiting for data" in said
    assert "matrix products" in text(tmp_path / "run", "run/profile")


def test_fit_too_short_to_trace_says_so(tmp_path, capsys):
    x, y = numbers(16)
    trace = monitor.profile(tmp_path, steps=3)
    line_model().fit(x, y, batch_size=8, callbacks=[trace], verbose=0)
    assert "ended before step 6" in capsys.readouterr().out
    with pytest.raises(InvalidArgumentError, match="steps=0"):
        monitor.profile(tmp_path, steps=0)


@pytest.mark.parametrize(
    ("shares", "waiting", "words"),
    [
        ((0.6, 0.0, 0.4), 0.35, "Input-bound: the device waits for data 35%"),
        ((0.2, 0.5, 0.1), 0.0, "Communication-bound"),
        ((0.6, 0.0, 0.4), 0.0, "idles 40%"),
        ((0.9, 0.0, 0.05), 0.01, "Compute-bound"),
        ((0.9, 0.0, 0.05), None, "waiting for data not measured"),
    ],
)
def test_verdict_names_what_bounds_the_run(shares, waiting, words):
    matrix, collective, idle = shares
    trace = TraceShares("/device:TPU:0", 1.0, matrix, collective, idle, (("fusion", 0.5),))
    assert words in verdict(trace, waiting)
