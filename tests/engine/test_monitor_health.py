"""Norms, histograms, MFU and bits a byte against numbers computed by hand."""

import contextlib
import math

import keras
import numpy as np
import pytest
from monitor_helpers import scalars, several_devices, tensors, text, values

from colabtpu import chips, monitor

ROWS, WIDTH, OUT, RATE = 16, 4, 3, 0.5


def regression(scope=None, **optimizer_args):
    """A linear model whose gradient is known in closed form, its data, and that gradient."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(ROWS, WIDTH)).astype("float32")
    y = rng.normal(size=(ROWS, OUT)).astype("float32")
    weights = rng.normal(size=(WIDTH, OUT)).astype("float32")
    with scope or contextlib.nullcontext():
        dense = keras.layers.Dense(OUT, use_bias=False, name="dense")
        model = keras.Sequential([keras.Input((WIDTH,)), dense], name="line")
        model.compile(keras.optimizers.SGD(RATE, **optimizer_args), "mse")
        dense.set_weights([weights])
    gradient = 2 * x.T @ (x @ weights - y) / (ROWS * OUT)
    return model, x, y, weights, gradient


def fit(model, x, y, folder, batch=ROWS, epochs=1, extra=(), **options):
    logs = monitor.callbacks(folder, run="run", panel=False, **options)
    model.fit(
        x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0,
        callbacks=[*logs, *extra],
    )  # fmt: skip
    return folder / "run" / "train"


# Eight mirrored CPU replicas take a minute to trace on two cores.
DEVICES = [1, 2, pytest.param(8, marks=pytest.mark.slow)]


def by_numpy(array) -> np.ndarray:
    """(left edge, right edge, count) in 30 bins, by numpy's own histogram."""
    counts, edges = np.histogram(np.asarray(array, "float64"), bins=30)
    return np.stack([edges[:-1], edges[1:], counts], axis=-1)


@pytest.mark.parametrize("devices", DEVICES)
def test_norms_and_histograms_equal_those_computed_by_hand(tmp_path, engine, devices):
    with several_devices(engine, devices) if devices > 1 else contextlib.nullcontext():
        model, x, y, weights, gradient = regression()
        train = fit(model, x, y, tmp_path, histograms_every=1)
    norm = np.linalg.norm
    after = weights - RATE * gradient
    ratio = RATE * norm(gradient) / norm(weights)
    assert values(train, "health/gradient_norm") == pytest.approx([norm(gradient)], rel=1e-5)
    assert values(train, "health/parameter_norm") == pytest.approx([norm(after)], rel=1e-5)
    assert values(train, "health/update_ratio") == pytest.approx([ratio], rel=1e-5)
    # The extra step runs at the weights after the training step.
    expected = {
        "weights/line/dense/kernel": after,
        "gradients/line/dense/kernel": 2 * x.T @ (x @ after - y) / (ROWS * OUT),
        "activations/dense": x @ after,
    }
    found = tensors(train)
    assert found.keys() == expected.keys()
    for tag, array in expected.items():
        ((step, buckets),) = found[tag]
        wanted = by_numpy(array)
        assert step == 1
        np.testing.assert_allclose(buckets[:, :2], wanted[:, :2], rtol=1e-4, atol=1e-5)
        # float32 may put a value that lies on an edge into the neighbouring bin.
        assert buckets[:, 2].sum() == array.size
        assert np.abs(buckets[:, 2] - wanted[:, 2]).sum() <= 2, tag


def test_histograms_leave_no_trace_in_training(tmp_path):
    def losses(every):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((WIDTH,)),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5, seed=3),
                keras.layers.Dense(OUT),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"])
        _, x, y, *_ = regression()
        folder = tmp_path / str(every)
        fit(model, x, y, folder, batch=4, epochs=2, histograms_every=every)
        found = scalars(folder / "run" / "train")
        return [found[tag] for tag in ("loss", "mae", "epoch_loss", "epoch_mae")]

    assert losses(every=2) == losses(every=0)


def test_histograms_come_on_schedule(tmp_path):
    model, x, y, *_ = regression()
    train = fit(model, x, y, tmp_path, batch=4, epochs=3, histograms_every=5)
    assert [step for step, _ in tensors(train)["weights/line/dense/kernel"]] == [5, 10]


def test_nonfinite_values_are_counted_apart(tmp_path):
    class Idle(keras.layers.Layer):
        def build(self, _):
            values = keras.initializers.Constant([1.0, 2.0, math.nan, math.inf, -math.inf])
            self.idle = self.add_weight(shape=(5,), initializer=values, name="idle")

        def call(self, x):
            return x

    model = keras.Sequential([keras.Input((WIDTH,)), Idle(), keras.layers.Dense(OUT)], name="m")
    model.compile(keras.optimizers.SGD(0.0), "mse")
    _, x, y, *_ = regression()
    train = fit(model, x, y, tmp_path, histograms_every=1)
    (tag,) = [tag for tag in tensors(train) if tag.endswith("idle/idle") and "weights" in tag]
    ((_, buckets),) = tensors(train)[tag]
    assert buckets[:, 2].sum() == 2
    assert (buckets[0, 0], buckets[-1, 1]) == (1.0, 2.0)
    assert values(train, f"nonfinite/{tag}") == [3.0]


def test_gradient_norm_sums_the_rows_of_a_repeated_token(tmp_path):
    # Token 1 occurs three times: its rows add up before they are squared.
    x = np.array([[1, 1, 1, 2]], "int32")
    table = np.arange(6, dtype="float32").reshape(3, 2)
    embedding = keras.layers.Embedding(3, 2)
    model = keras.Sequential([keras.Input((4,), dtype="int32"), embedding])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    embedding.set_weights([table])
    train = fit(model, x, np.zeros((1, 4, 2), "float32"), tmp_path, batch=1)
    gradient = np.array([0 * table[0], 3 * table[1], table[2]]) * 2 / 8
    assert values(train, "health/gradient_norm") == pytest.approx([np.linalg.norm(gradient)])


def test_gradient_norm_is_taken_before_clipping_on_one_device(tmp_path):
    model, x, y, _, gradient = regression(global_clipnorm=0.01)
    train = fit(model, x, y, tmp_path)
    norm = np.linalg.norm(gradient)
    assert values(train, "health/gradient_norm") == pytest.approx([norm], rel=1e-5)


class TwoChips:
    """A connection to two v5e chips, as far as the figures look."""

    engine = keras.backend.backend()
    device = "tpu"
    chip = chips.chip("v5e")
    num_cores = 2


def token_model():
    model = keras.Sequential([keras.Input((8,), dtype="int32"), keras.layers.Embedding(4, 4)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_mfu_equals_a_hand_count(tmp_path):
    x = np.ones((40, 8), "int32")
    train = fit(token_model(), x, x, tmp_path, batch=4, connection=TwoChips(), flops_per_token=1e9)
    speed = np.array(values(train, "speed/tokens_per_second"))
    # 10^9 FLOPs a token over twice the 197 TFLOP/s of a v5e chip, in per cent.
    expected = 100 * speed * 1e9 / (2 * 197e12)
    np.testing.assert_allclose(values(train, "speed/mfu_percent"), expected, rtol=1e-5)
    assert "3.94e+14 FLOP/s" in text(tmp_path / "run", "run/mfu")


def test_mfu_of_an_unknown_chip_is_zero(tmp_path):
    x = np.ones((40, 8), "int32")
    train = fit(token_model(), x, x, tmp_path, batch=4)
    assert set(values(train, "speed/mfu_percent")) == {0.0}
    assert "unknown chip" in text(tmp_path / "run", "run/mfu")


def test_bits_per_byte_come_from_the_texts_own_tokens_and_bytes(tmp_path):
    class Batches:
        tokens_per_step, num_tokens, num_bytes = 32, 1000, 4000

    x = np.ones((8, 8), "int32")
    train = fit(token_model(), x, x, tmp_path, batch=4, data=Batches())
    # A token covers four bytes: loss / ln 2 bits for each, so a quarter of that a byte.
    expected = np.array(values(train, "loss")) / math.log(2) / 4
    np.testing.assert_allclose(values(train, "bits_per_byte"), expected, rtol=1e-6)


def test_waiting_for_data_is_seen(tmp_path):
    import threading

    class Slow(keras.utils.PyDataset):
        def __init__(self, seconds):
            super().__init__()
            self.seconds = seconds

        def __len__(self):
            return 8

        def __getitem__(self, index):
            threading.Event().wait(self.seconds)
            return np.ones((4, 8), "int32"), np.ones((4, 8), "int32")

    def share(seconds):
        folder = tmp_path / str(seconds)
        logs = monitor.callbacks(folder, run="run", panel=False)
        token_model().fit(Slow(seconds), epochs=2, callbacks=logs, verbose=0)
        return values(folder / "run" / "train", "speed/data_wait_share")[-1]

    assert share(0.1) > 0.5


def test_host_memory_is_written(tmp_path):
    model, x, y, *_ = regression()
    (gib,) = values(fit(model, x, y, tmp_path), "memory/host_gib")
    assert 0.05 < gib < 64


def test_run_describes_itself(tmp_path):
    from monitor_helpers import reader
    from tensorboard.plugins.hparams import plugin_data_pb2

    model, x, y, *_ = regression()
    fit(model, x, y, tmp_path, hparams={"idea": "first", "layers": 3, "tied": True})
    run = reader(tmp_path / "run")
    content = run.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["learning_rate"].number_value == RATE
    assert hparams["optimizer"].string_value == "SGD"
    assert hparams["parameters"].number_value == WIDTH * OUT
    assert (hparams["idea"].string_value, hparams["layers"].number_value) == ("first", 3)
    assert hparams["tied"].bool_value
    assert "dense" in text(tmp_path / "run", "model/summary")
    assert '"units": 3' in text(tmp_path / "run", "model/config")


def test_failing_histogram_is_said_and_training_goes_on(tmp_path, capsys):
    armed = []

    class Arm(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            armed.append(True)

    class Odd(keras.layers.Layer):
        def call(self, x, training=None):
            if training is False and armed:
                raise NotImplementedError("only ever trained")
            return x

    model = keras.Sequential([keras.Input((WIDTH,)), Odd(), keras.layers.Dense(OUT)])
    model.compile("sgd", "mse")
    _, x, y, *_ = regression()
    train = fit(model, x, y, tmp_path, batch=4, histograms_every=1, extra=[Arm()])
    assert len(scalars(train)["loss"]) == 4
    assert capsys.readouterr().out.count("Histograms are off, training goes on") == 1
