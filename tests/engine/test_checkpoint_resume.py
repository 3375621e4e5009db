"""What interrupts a run, what continues it, and what it refuses to continue."""

import contextlib
import os
import resource
import signal

import keras
import numpy as np
import pytest

from colabtpu.checkpoint import Store, resume
from colabtpu.checkpoint.resuming import FLUSH
from colabtpu.data import Batches
from colabtpu.errors import ColabTPUError, InvalidArgumentError

EXAMPLES, BATCH, WIDTH = 64, 8, 5
STEPS = EXAMPLES // BATCH


class Grid:
    """Examples of which each is a function of its number."""

    seq_len, weighted, padding_share = WIDTH, False, 0.0
    num_tokens = num_bytes = EXAMPLES

    def __init__(self, corpus="grid", rotten=()):
        self.identity = {"corpus": corpus, "tokenizer": "none"}
        self._rotten = list(rotten)

    def __len__(self):
        return EXAMPLES

    def fetch(self, numbers):
        x = np.sin(np.outer(numbers + 1, np.arange(1, WIDTH + 1))).astype(np.float32)
        x[np.isin(numbers, self._rotten)] = np.nan
        return x, x.mean(axis=1, keepdims=True), None


def batches(batch=BATCH, seed=1, **options):
    return Batches(Grid(**options), batch, seed=seed)


def compiled(units=4, optimizer="adam"):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile(optimizer, "mse")
    return model


class At(keras.callbacks.Callback):
    """Does something once, before the given step of `fit`."""

    def __init__(self, step, action):
        super().__init__()
        self.step, self.action = step, action
        self.steps = []

    def on_train_batch_begin(self, batch, logs=None):
        if len(self.steps) == self.step:
            self.action()
        self.steps.append(batch)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def fit(directory, epochs=2, model=None, data=None, callbacks=(), valid=None, **options):
    model = model or compiled()
    data = data or batches()
    saver = resume(directory, data, every_minutes=None, **options)
    model.fit(data, epochs=epochs, verbose=0, callbacks=[saver, *callbacks], validation_data=valid)
    return model, saver


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("COLABTPU_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def expected():
    """The weights of a run that nothing interrupts, and that saves nothing."""
    model = compiled()
    model.fit(batches(), epochs=2, verbose=0)
    return model.get_weights()


def assert_same(model, expected, atol=0.0):
    for found, wanted in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("step", [0, 7, 11])
def test_interrupted_kernel_saves_stops_and_continues_at_the_same_batch(tmp_path, expected, step):
    watch = At(step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callbacks=[watch])
    done = max(1, step + 1)  # the step that was under way is finished first
    again = At(-1, None)
    model, saver = fit(tmp_path, callbacks=[again])
    assert saver.initial_step == done
    assert [*watch.steps, *again.steps] == [*range(STEPS)] * 2
    assert f"continuing run 1 at step {done}" in saver.messages[0]
    assert_same(model, expected)


def test_second_interruption_is_not_held_back(tmp_path):
    # A shell that starts this in the background has it ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    twice = At(2, lambda: (interrupt(), interrupt()))
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callbacks=[twice])
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_interruption_during_validation_keeps_the_epoch(tmp_path, expected):
    class Interrupt(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            interrupt()

    valid = Batches(Grid(), BATCH, repeats=False)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callbacks=[Interrupt()], valid=valid)
    model, saver = fit(tmp_path)
    assert saver.initial_step == STEPS
    assert_same(model, expected)


def test_sigterm_saves_and_then_ends_the_process_as_it_would_have(tmp_path):
    reached = []
    previous = signal.signal(signal.SIGTERM, lambda *_: reached.append("handler"))
    try:
        stop = At(5, lambda: os.kill(os.getpid(), signal.SIGTERM))
        fit(tmp_path, callbacks=[stop])
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert reached == ["handler"]
    _, saver = fit(tmp_path)
    assert saver.initial_step == 6 + 1  # Keras runs the step that it had begun


def test_run_that_is_done_says_so_and_more_epochs_continue_it(tmp_path, expected):
    fit(tmp_path, epochs=1)
    model, saver = fit(tmp_path, epochs=1)
    assert "all its epochs are done" in saver.messages[0]
    model, saver = fit(tmp_path, epochs=2)
    assert saver.initial_step == STEPS
    assert_same(model, expected)


CHANGES = {
    "batch: 8 -> 16": {"data": lambda: batches(batch=16)},
    "seed: 1 -> 2": {"data": lambda: batches(seed=2)},
    "corpus: 'grid' -> 'other'": {"data": lambda: batches(corpus="other")},
    r"\[5, 4\] float32' -> '\[5, 3\]": {"model": lambda: compiled(units=3)},
    "optimizer": {"model": lambda: compiled(optimizer="sgd")},
}


@pytest.fixture(scope="module")
def half_done(tmp_path_factory):
    directory = tmp_path_factory.mktemp("half")
    fit(directory, epochs=1)
    return directory


@pytest.mark.parametrize("difference", CHANGES)
def test_what_has_changed_is_refused_by_name(half_done, difference):
    with pytest.raises(ColabTPUError, match=difference):
        fit(half_done, **{name: make() for name, make in CHANGES[difference].items()})


def test_new_run_leaves_the_old_one_whole(tmp_path):
    fit(tmp_path, epochs=1)
    _, saver = fit(tmp_path, epochs=1, model=compiled(units=3), new_run=True)
    assert (saver.run, saver.initial_step) == ("run-0002", 0)
    assert Store(tmp_path).newest_whole("run-0001")[0].step == STEPS


def test_damaged_checkpoint_is_named_and_the_one_before_continues(tmp_path, expected):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callbacks=[At(6, interrupt)], every_steps=3)
    state = tmp_path / "run-0001" / "step-00000007" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-10])
    model, saver = fit(tmp_path)
    assert "step-00000007" in saver.messages[0]
    assert saver.initial_step == 6
    assert_same(model, expected)


def test_full_disk_does_not_stop_training(tmp_path, expected):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    fill = At(5, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1])))
    free = At(14, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
    try:
        model, saver = fit(tmp_path, callbacks=[fill, free], every_steps=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert any("training goes on" in message for message in saver.messages)
    assert_same(model, expected)
    assert Store(tmp_path).newest_whole(saver.run)[0].step == 2 * STEPS


def test_drive_that_goes_away_leaves_the_newest_checkpoint_here(tmp_path, expected):
    drive, away = tmp_path / "drive", tmp_path / "unmounted"
    unmount = At(5, lambda: drive.rename(away))
    options = {"every_steps": 4, "fallback": tmp_path / "local"}
    with pytest.raises(KeyboardInterrupt):
        fit(drive, callbacks=[unmount, At(9, interrupt)], **options)
    assert not drive.exists()
    away.rename(drive)
    model, saver = fit(drive, **options)
    assert saver.initial_step == 10
    assert_same(model, expected)


def test_loss_that_is_no_number_stops_and_keeps_the_batch(tmp_path):
    data = batches(rotten=[13])
    bad = next(s for s in range(STEPS) if 13 in data.example_numbers(s))
    _, saver = fit(tmp_path, data=data, every_steps=1)
    assert f"the loss of step {bad + 1} is no number" in saver.messages[-1]
    (kept,) = (tmp_path / "run-0001").glob("no-number-*.npz")
    assert 13 in np.load(kept)["example_numbers"]
    found, _ = Store(tmp_path).newest_whole("run-0001")
    assert (found.step if found else 0) == bad  # nothing was saved of what came after
    if found:
        assert all(np.isfinite(array).all() for array in found.arrays().values())


def test_roll_back_goes_on_with_the_next_batch(tmp_path):
    data = batches(rotten=[13])
    bad = next(s for s in range(STEPS) if 13 in data.example_numbers(s))
    data.seek(bad - 2 if bad >= 2 else bad + STEPS - 2)  # two good steps first
    model, saver = fit(tmp_path, epochs=1, data=data, every_steps=1, on_nan="roll back")
    assert any("back to the state of step" in message for message in saver.messages)
    assert all(np.isfinite(weights).all() for weights in model.get_weights())
    assert Store(tmp_path).newest_whole("run-0001")[0].step == STEPS


def test_curves_are_flushed_up_to_each_checkpoint(tmp_path):
    """A callback with a lag, as one that does not wait for the device has."""

    class Curve(At):
        def on_train_begin(self, logs=None):
            self.written = []
            self.model.__dict__.setdefault(FLUSH, {})["curve"] = self.flush

        def flush(self):
            self.written = list(self.steps)

    curve = Curve(5, interrupt)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callbacks=[curve])
    assert curve.written == [0, 1, 2, 3, 4, 5]
    assert fit(tmp_path)[1].initial_step == 6


def test_best_checkpoint_outlives_newer_ones(tmp_path):
    class Worse(keras.callbacks.Callback):
        """Makes every epoch but the second validate worse."""

        def on_epoch_begin(self, epoch, logs=None):
            self.model.layers[-1].bias.assign([0.0 if epoch == 1 else 50.0])

    valid = Batches(Grid(), BATCH, repeats=False)
    fit(tmp_path, epochs=4, valid=valid, callbacks=[Worse()], keep=1)
    steps = [each.step for each in Store(tmp_path).whole("run-0001")[0]]
    assert steps == [2 * STEPS, 4 * STEPS]


@contextlib.contextmanager
def devices(engine, count):
    if engine == "tensorflow":
        import tensorflow as tf

        # Not collectives, which keep the group of the first strategy for the whole process.
        reduce = tf.distribute.ReductionToOneDevice()
        names = [f"CPU:{i}" for i in range(count)]
        with tf.distribute.MirroredStrategy(names, cross_device_ops=reduce).scope():
            yield
    else:
        names = keras.distribution.list_devices()[:count]
        with keras.distribution.DataParallel(devices=names).scope():
            yield


def test_run_of_eight_devices_continues_on_two(tmp_path, expected, engine):
    for count, callbacks in ((8, [At(4, interrupt)]), (2, [])):
        with devices(engine, count):
            model = compiled()
            if callbacks:
                with pytest.raises(KeyboardInterrupt):
                    fit(tmp_path, model=model, callbacks=callbacks)
            else:
                _, saver = fit(tmp_path, model=model)
    assert saver.initial_step == 5
    assert_same(model, expected, atol=1e-6)


def test_other_data_continue_at_the_beginning_of_the_epoch(tmp_path):
    x, y, _ = Grid().fetch(np.arange(EXAMPLES))
    options = {"epochs": 2, "batch_size": BATCH, "shuffle": False, "verbose": 0}
    model = compiled()
    model.optimizer.build(model.trainable_variables)
    saver = resume(tmp_path, every_minutes=None)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, callbacks=[saver, At(10, interrupt)], **options)
    model, again, seen = compiled(), resume(tmp_path, every_minutes=None), At(-1, None)
    model.optimizer.build(model.trainable_variables)
    model.fit(x, y, callbacks=[again, seen], **options)
    assert again.initial_step == 11
    assert seen.steps == [*range(STEPS)]
    assert "3 batches of epoch 2 come again" in again.messages[0]


@pytest.mark.parametrize("options", [{"every_steps": 0}, {"keep": 0}, {"on_nan": "pray"}])
def test_options_that_cannot_work_are_refused(tmp_path, options):
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        resume(tmp_path, **options)
