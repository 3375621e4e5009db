"""The training callback on both engines: what it writes equals what was computed by hand."""

import contextlib
import os
import subprocess
import sys
from typing import ClassVar

import keras
import numpy as np
import pytest
from monitor_helpers import scalars, values

from colabtpu import InvalidArgumentError, monitor

VOCAB, SEQ, BATCH, STEPS = 16, 8, 16, 4


def tokens(rows: int = BATCH * STEPS) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).integers(0, VOCAB, (rows, SEQ), dtype="int32")
    return x, (3 * x + 1) % VOCAB


def language_model(optimizer=None, scope=None, **compile_args) -> keras.Model:
    keras.utils.set_random_seed(0)
    with scope or contextlib.nullcontext():
        model = keras.Sequential(
            [
                keras.Input((SEQ,), dtype="int32"),
                keras.layers.Embedding(VOCAB, 8),
                keras.layers.Dense(VOCAB),
            ]
        )
        model.compile(
            optimizer or keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            **compile_args,
        )
    return model


def fit(model, folder, *, rows=BATCH * STEPS, epochs=1, extra=(), lag=2, **fit_args):
    x, y = tokens(rows)
    logs = monitor.callbacks(folder, run="run", lag=lag)
    fit_args = {"batch_size": BATCH, "shuffle": False, "verbose": 0} | fit_args
    return model.fit(x, y, epochs=epochs, callbacks=[*logs, *extra], **fit_args)


def numpy_loss_and_accuracy(model, x, y) -> tuple[list[float], list[float]]:
    """Cross-entropy and accuracy of each batch, by numpy alone from the model's logits."""
    logits = np.asarray(model.predict(x, verbose=0), "float64")
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    nll = -np.take_along_axis(log_p, y[..., None], -1)[..., 0].reshape(STEPS, -1)
    right = (logits.argmax(-1) == y).reshape(STEPS, -1)
    return list(nll.mean(-1)), list(right.mean(-1))


def test_each_step_writes_its_own_batchs_loss_accuracy_and_perplexity(tmp_path):
    model = language_model(keras.optimizers.SGD(0.0))
    loss, accuracy = numpy_loss_and_accuracy(model, *tokens())
    fit(model, tmp_path)
    train = tmp_path / "run" / "train"
    np.testing.assert_allclose(values(train, "loss"), loss, rtol=1e-5)
    np.testing.assert_allclose(values(train, "accuracy"), accuracy, rtol=1e-5)
    np.testing.assert_allclose(values(train, "perplexity"), np.exp(loss), rtol=1e-5)
    assert [step for step, _ in scalars(train)["loss"]] == [1, 2, 3, 4]


# Eight mirrored CPU replicas take a minute to trace on two cores.
def test_eight_devices_write_what_one_device_writes(tmp_path, eight_devices):
    fit(language_model(keras.optimizers.SGD(0.1)), tmp_path / "one")
    with eight_devices.scope():
        model = language_model(keras.optimizers.SGD(0.1))
        fit(model, tmp_path / "several")
    for tag in ("loss", "accuracy", "learning_rate"):
        one = values(tmp_path / "one" / "run" / "train", tag)
        several = values(tmp_path / "several" / "run" / "train", tag)
        np.testing.assert_allclose(several, one, rtol=1e-5, err_msg=tag)


def test_epoch_figures_equal_keras_history(tmp_path):
    x, y = tokens(32)
    history = fit(language_model(), tmp_path, epochs=2, validation_data=(x, y)).history
    train, validation = (scalars(tmp_path / "run" / f) for f in ("train", "validation"))
    for tag in ("loss", "accuracy"):
        # History holds float64 means, event files float32.
        assert [s for s, _ in train[f"epoch_{tag}"]] == [0, 1]
        np.testing.assert_allclose([v for _, v in train[f"epoch_{tag}"]], history[tag], rtol=1e-6)
        by_step = validation[tag]
        assert [s for s, _ in by_step] == [STEPS, 2 * STEPS], "on the same axis as training"
        np.testing.assert_allclose([v for _, v in by_step], history[f"val_{tag}"], rtol=1e-6)
        # Equal batches: the epoch's loss is the mean of its steps' losses.
        by_hand = np.reshape([v for _, v in train[tag]], (2, STEPS)).mean(-1)
        np.testing.assert_allclose(history[tag], by_hand, rtol=1e-5)


def test_learning_rate_follows_a_schedule(tmp_path):
    schedule = keras.optimizers.schedules.PolynomialDecay(0.8, decay_steps=4, end_learning_rate=0.0)
    fit(language_model(keras.optimizers.SGD(schedule)), tmp_path)
    np.testing.assert_allclose(
        values(tmp_path / "run" / "train", "learning_rate"), [0.8, 0.6, 0.4, 0.2], rtol=1e-6
    )


def test_learning_rate_follows_a_change_between_epochs(tmp_path):
    change = keras.callbacks.LearningRateScheduler(lambda epoch: [0.5, 0.25][epoch])
    fit(language_model(keras.optimizers.SGD(1.0)), tmp_path, epochs=2, extra=[change])
    assert values(tmp_path / "run" / "train", "learning_rate") == [0.5] * 4 + [0.25] * 4


@pytest.mark.parametrize("lag", [0, 3, 100])
def test_lag_changes_when_values_are_read_not_what_is_written(tmp_path, lag):
    fit(language_model(), tmp_path / "lagged", lag=lag, epochs=2)
    fit(language_model(), tmp_path / "again", lag=2, epochs=2)
    lagged, again = (scalars(tmp_path / f / "run" / "train") for f in ("lagged", "again"))
    for tag in ("loss", "accuracy", "learning_rate", "epoch_loss"):
        assert lagged[tag] == again[tag]


def test_value_of_a_step_is_read_when_later_steps_are_enqueued(tmp_path, engine):
    if engine == "tensorflow":
        pytest.skip("a tf.function returns tensors only, so nothing can watch who reads them")
    enqueued, read_after = [], []

    class Watched:
        def __init__(self, step):
            self.step = step

        def __float__(self):
            import threading

            if threading.current_thread() is threading.main_thread():
                read_after.append(len(enqueued) - self.step)
            return 1.0

    class Model(keras.Model):
        def train_step(self, state, data):
            enqueued.append(data)
            return {"loss": Watched(len(enqueued))}, state

    inputs = keras.Input((SEQ,), dtype="int32")
    model = Model(inputs, keras.layers.Embedding(VOCAB, 4)(inputs))
    model.compile("sgd", run_eagerly=True)
    fit(model, tmp_path, rows=BATCH * 6, lag=2)
    assert read_after == [2, 2, 2, 2, 1, 0], "the last two are read when the epoch ends"


def test_steps_continue_after_a_resume(tmp_path):
    model = language_model()
    fit(model, tmp_path / "logs")
    model.save(tmp_path / "model.keras")
    resumed = keras.models.load_model(tmp_path / "model.keras")
    fit(resumed, tmp_path / "logs")
    assert [s for s, _ in scalars(tmp_path / "logs" / "run" / "train")["loss"]] == list(range(1, 9))


def test_tokens_per_second_are_tokens_per_step_over_step_time(tmp_path):
    fit(language_model(), tmp_path, epochs=2)
    train = tmp_path / "run" / "train"
    product = np.multiply(
        values(train, "speed/tokens_per_second"), values(train, "speed/step_seconds")
    )
    np.testing.assert_allclose(product, BATCH * SEQ, rtol=1e-4)
    assert len(product) == 2 * STEPS - 2, "the first two steps are warm-up"


def test_tokens_per_step_of_the_data_win(tmp_path):
    class Batches:
        tokens_per_step = 1000

    x, y = tokens()
    logs = monitor.callbacks(tmp_path, data=Batches(), run="run")
    language_model().fit(x, y, batch_size=BATCH, callbacks=logs, verbose=0)
    train = tmp_path / "run" / "train"
    product = np.multiply(
        values(train, "speed/tokens_per_second"), values(train, "speed/step_seconds")
    )
    np.testing.assert_allclose(product, 1000, rtol=1e-4)


def test_model_without_tokens_says_so_once_and_has_no_perplexity(tmp_path, capsys):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((32, 4), "float32")
    logs = monitor.callbacks(tmp_path, run="run")
    model.fit(x, x[:, :1], batch_size=8, epochs=2, callbacks=logs, verbose=0)
    written = scalars(tmp_path / "run" / "train")
    assert {"loss", "learning_rate", "speed/step_seconds"} <= written.keys()
    assert not {"speed/tokens_per_second", "perplexity"} & written.keys()
    assert capsys.readouterr().out.count("No tokens per second") == 1


def test_keras_logs_and_other_callbacks_see_nothing_of_ours(tmp_path):
    class Own(keras.callbacks.Callback):
        keys: ClassVar[set[str]] = set()

        def on_train_batch_end(self, batch, logs=None):
            self.keys |= logs.keys()

    own = Own()
    history = fit(language_model(), tmp_path, extra=[own])
    assert own.keys == {"loss", "accuracy"}
    assert history.history.keys() == {"loss", "accuracy"}
    assert len(scalars(tmp_path / "run" / "train")["loss"]) == STEPS


def test_second_fit_traces_nothing_again(tmp_path):
    traces = []

    class Model(keras.Sequential):
        def train_step(self, *args):
            traces.append(1)
            return super().train_step(*args)

    keras.utils.set_random_seed(0)
    model = Model([keras.Input((SEQ,), dtype="int32"), keras.layers.Embedding(VOCAB, VOCAB)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit(model, tmp_path)
    first = len(traces)
    assert first > 0
    fit(model, tmp_path)
    x, y = tokens()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    assert len(traces) == first


def test_recompiled_model_and_fit_without_us_show_plain_keras_logs(tmp_path):
    model = language_model()
    fit(model, tmp_path)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"])
    x, y = tokens()
    history = model.fit(x, y, batch_size=BATCH, verbose=0)
    assert history.history.keys() == {"loss", "accuracy"}
    fit(model, tmp_path / "again")
    assert "learning_rate" in scalars(tmp_path / "again" / "run" / "train")


def test_interrupted_fit_leaves_a_tap_that_writes_no_foreign_step(tmp_path):
    class Interrupt(keras.callbacks.Callback):
        async_safe = False

        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise KeyboardInterrupt

    x, y = tokens()
    model = language_model()
    logs = monitor.callbacks(tmp_path, run="run")
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=BATCH, callbacks=[*logs, Interrupt()], verbose=0, shuffle=False)
    model.train_on_batch(x[:BATCH], y[:BATCH])
    model.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0)
    # Two steps were logged, two were not; the next fit with us goes on with step 5.
    model.fit(x, y, batch_size=BATCH, callbacks=logs, verbose=0)
    assert [s for s, _ in scalars(tmp_path / "run" / "train")["loss"]] == [1, 2, 5, 6, 7, 8]


@pytest.mark.parametrize("how", [{"run_eagerly": True}, {"jit_compile": True}])
def test_eager_and_compiled_steps_write_the_same(tmp_path, how):
    fit(language_model(), tmp_path / "plain")
    fit(language_model(**how), tmp_path / "how")
    plain, other = (tmp_path / f / "run" / "train" for f in ("plain", "how"))
    for tag in ("loss", "accuracy", "learning_rate"):
        np.testing.assert_allclose(values(other, tag), values(plain, tag), rtol=1e-5, err_msg=tag)


def test_several_steps_per_execution_write_the_last_of_them(tmp_path):
    fit(language_model(), tmp_path / "single")
    fit(language_model(steps_per_execution=2), tmp_path / "double")
    single = dict(scalars(tmp_path / "single" / "run" / "train")["loss"])
    double = dict(scalars(tmp_path / "double" / "run" / "train")["loss"])
    assert double.keys() == {2, 4}
    np.testing.assert_allclose([double[2], double[4]], [single[2], single[4]], rtol=1e-5)


def test_gradient_accumulation_counts_batches(tmp_path):
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    model = language_model(optimizer)
    fit(model, tmp_path)
    fit(model, tmp_path)
    assert [s for s, _ in scalars(tmp_path / "run" / "train")["loss"]] == list(range(1, 9))


def test_vanishing_log_folder_never_stops_training(tmp_path, capsys):
    import shutil

    class Vandal(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            shutil.rmtree(tmp_path / "run", ignore_errors=True)

    history = fit(language_model(), tmp_path, epochs=3, extra=[Vandal()])
    assert len(history.history["loss"]) == 3


@pytest.mark.parametrize("bad", [{"lag": -1}, {"run": "../up"}, {"run": "/abs"}, {"run": ""}])
def test_bad_arguments_are_refused(tmp_path, bad):
    with pytest.raises(InvalidArgumentError, match=next(iter(bad))):
        monitor.callbacks(tmp_path, **bad)


def test_each_run_gets_a_folder_of_its_own_by_default(tmp_path):
    x, y = tokens()
    language_model().fit(x, y, batch_size=BATCH, callbacks=monitor.callbacks(tmp_path), verbose=0)
    (run,) = tmp_path.iterdir()
    assert "train" in [f.name for f in run.iterdir()]


def test_jax_needs_no_tensorflow(tmp_path, engine):
    if engine != "jax":
        pytest.skip("the TensorFlow engine has TensorFlow")
    program = f"""
import importlib.abc, sys
class NotInstalled(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tensorflow":
            raise ModuleNotFoundError("No module named 'tensorflow'")
sys.meta_path.insert(0, NotInstalled())
import keras, numpy as np
from colabtpu import monitor
x = np.arange(64, dtype="int32").reshape(8, 8)
model = keras.Sequential([keras.Input((8,), dtype="int32"), keras.layers.Embedding(64, 64)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss, metrics=["accuracy"])
model.fit(x, x, batch_size=4, verbose=0, validation_data=(x, x),
          callbacks=monitor.callbacks({str(tmp_path)!r}, run="run"))
assert "tensorflow" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert [s for s, _ in scalars(tmp_path / "run" / "train")["loss"]] == [1, 2]
