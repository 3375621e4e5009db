"""Each known trap, in a model that has it and in the same model mended."""

import contextlib
from importlib.util import find_spec

import keras
import numpy as np
import pytest

import colabtpu as ct

ENGINE = keras.backend.backend()
tensorflow_only = pytest.mark.skipif(ENGINE != "tensorflow", reason="a TensorFlow trap")
jax_only = pytest.mark.skipif(ENGINE != "jax", reason="a JAX trap")


@pytest.fixture(scope="module")
def strategy():
    if ENGINE != "tensorflow":
        return None
    import tensorflow as tf

    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(8)])


def model_of(*layers, inputs=8, scope=None, optimizer="adam", loss="mse", **options):
    with scope or contextlib.nullcontext():
        model = keras.Sequential([keras.Input((inputs,)), *(make() for make in layers)])
        optimizer = optimizer if isinstance(optimizer, str) else optimizer()
        model.compile(optimizer, loss, **options)
    return model


def dense():
    return keras.layers.Dense(128)


def found(model, data=None, connection=None, target="v5e-1"):
    return ct.preflight.check(model, data, connection, target=target).codes


def adam(**options):
    return lambda: keras.optimizers.Adam(**options)


def test_a_clean_model_raises_nothing():
    model = model_of(dense)
    assert found(model, (np.zeros((16, 8), "float32"), np.zeros((16, 128), "float32"))) == ()
    assert "None of the known traps" in str(ct.preflight.check(model))


@tensorflow_only
@pytest.mark.parametrize(
    ("code", "wrong", "right"),
    [
        ("clip-before-all-reduce", {"optimizer": adam(global_clipnorm=1.0)}, {}),
        ("clip-before-all-reduce", {"optimizer": adam(clipnorm=1.0)}, {}),
        ("accumulation-under-strategy", {"optimizer": adam(gradient_accumulation_steps=2)}, {}),
        (
            "ema-overwrite-under-strategy",
            {"optimizer": adam(use_ema=True, ema_overwrite_frequency=10)},
            {"optimizer": adam(use_ema=True)},
        ),
        ("steps-per-execution-under-strategy", {"steps_per_execution": 4}, {}),
    ],
)
def test_what_fails_under_several_replicas(code, wrong, right, strategy):
    assert code in found(model_of(dense, scope=strategy.scope(), **wrong))
    assert code not in found(model_of(dense, scope=strategy.scope(), **right))
    # On one device all of it works.
    assert code not in found(model_of(dense, **wrong))


@tensorflow_only
def test_batch_norm_per_replica(strategy):
    def norm(**options):
        return lambda: keras.layers.BatchNormalization(**options)

    assert "batch-norm-per-replica" in found(model_of(dense, norm(), scope=strategy.scope()))
    mended = model_of(dense, norm(synchronized=True), scope=strategy.scope())
    assert "batch-norm-per-replica" not in found(mended)


@tensorflow_only
def test_a_train_step_of_one_s_own(strategy):
    class Own(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    with strategy.scope():
        own = Own([keras.Input((8,)), dense()])
        own.compile("adam", "mse")
    assert "own-train-step" in found(own)
    assert "own-train-step" not in found(model_of(dense, scope=strategy.scope()))


@tensorflow_only
def test_built_outside_of_the_strategy(strategy):
    assert "outside-scope" in found(model_of(dense), connection=strategy)
    inside = model_of(dense, scope=strategy.scope())
    assert "outside-scope" not in found(inside, connection=strategy)


@tensorflow_only
def test_a_distribution_that_tensorflow_ignores():
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
    try:
        assert "distribution-on-tensorflow" in found(model_of(dense))
    finally:
        keras.distribution.set_distribution(None)
    assert "distribution-on-tensorflow" not in found(model_of(dense))


@jax_only
def test_built_before_the_distribution_was_set():
    distribution = keras.distribution.DataParallel()
    early = model_of(dense)
    with distribution.scope():
        assert "outside-scope" in found(early)
        assert "outside-scope" not in found(model_of(dense))


@jax_only
def test_a_layout_that_matches_nothing():
    mesh = keras.distribution.DeviceMesh((2, 4), ("batch", "model"))
    for pattern, caught in (("never/kernel", True), (".*kernel", False)):
        layout = keras.distribution.LayoutMap(mesh)
        layout[pattern] = (None, "model")
        with keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch").scope():
            assert ("layout-matches-nothing" in found(model_of(dense))) == caught


def test_a_schedule_that_counts_batches():
    schedule = keras.optimizers.schedules.CosineDecay(1e-3, 100)
    fast = model_of(dense, optimizer=adam(learning_rate=schedule, gradient_accumulation_steps=4))
    assert "schedule-runs-fast" in found(fast)
    assert "schedule-runs-fast" not in found(
        model_of(dense, optimizer=adam(learning_rate=1e-3, gradient_accumulation_steps=4))
    )
    assert "schedule-runs-fast" not in found(
        model_of(dense, optimizer=adam(learning_rate=schedule))
    )


def test_losses_in_bfloat16():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="bfloat16")
    assert "loss-in-low-precision" in found(model_of(dense, loss=loss))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    assert "loss-in-low-precision" not in found(model_of(dense, loss=loss))


def test_float16():
    def layer(policy):
        return lambda: keras.layers.Dense(128, dtype=policy)

    assert "float16" in found(model_of(layer("mixed_float16")))
    assert "float16" not in found(model_of(layer("mixed_bfloat16")))


def test_run_eagerly():
    assert "eager" in found(model_of(dense, run_eagerly=True))
    assert "eager" not in found(model_of(dense))


def test_a_loss_that_depends_on_padding():
    batch = (np.zeros((8, 8), "float32"), np.zeros((8, 128), "float32"), np.ones(8, "float32"))
    assert "loss-divided-by-padding" in found(model_of(dense), batch)
    mended = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    assert "loss-divided-by-padding" not in found(model_of(dense, loss=mended), batch)
    assert "loss-divided-by-padding" not in found(model_of(dense), batch[:2])
    assert "metrics-count-padding" in found(model_of(dense, metrics=["mae"]), batch)
    assert "metrics-count-padding" not in found(model_of(dense, weighted_metrics=["mae"]), batch)


def test_widths_off_the_matrix_unit_and_their_waste():
    def wide(units):
        return lambda: keras.layers.Dense(units)

    # 1,000 of 1,024 columns are used.
    traps = ct.preflight.check(model_of(wide(1000), inputs=1024))
    assert traps.codes == ("width-off-the-matrix-unit",)
    assert "1,000 -> 1,024, 2%" in traps[0].why
    assert found(model_of(wide(1024), inputs=1024)) == ()
    # 1,152 = 9 x 128 is right on v5e and 4.5 x 256 on v6e.
    assert found(model_of(wide(1152), inputs=1024)) == ()
    v6e = ct.preflight.check(model_of(wide(1152), inputs=1024), target="v6e-1")
    assert "1,152 -> 1,280, 11%" in v6e[0].why


def test_a_batch_that_does_not_divide(strategy):
    scope = strategy.scope() if strategy else keras.distribution.DataParallel().scope()
    with scope:
        model = model_of(dense)
        for rows, caught in ((20, True), (24, False)):
            batch = (np.zeros((rows, 8), "float32"), np.zeros((rows, 128), "float32"))
            assert ("batch-not-divisible" in found(model, batch, strategy)) == caught


def test_dtypes_in_the_batch():
    model = model_of(dense)
    for dtype, code in (("float64", "float64"), ("<U5", "strings")):
        assert code in found(model, (np.zeros((8, 8), dtype), np.zeros((8, 128), "float32")))
    assert found(model, (np.zeros((8, 8), "float32"), np.zeros((8, 128), "float32"))) == ()


def test_the_last_batch_of_an_indexed_data_set():
    class Rows(keras.utils.PyDataset):
        def __init__(self, sizes):
            super().__init__()
            self.sizes = sizes

        def __len__(self):
            return len(self.sizes)

        def __getitem__(self, index):
            rows = self.sizes[index]
            return np.zeros((rows, 8), "float32"), np.zeros((rows, 128), "float32")

    assert "ragged-last-batch" in found(model_of(dense), Rows([16, 16, 5]))
    assert found(model_of(dense), Rows([16, 16, 16])) == ()


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="a tf.data pipeline")
class TestTfData:
    """Pipelines of tf.data, which train on both engines."""

    @property
    def tf(self):
        import tensorflow

        return tensorflow

    def pipeline(self, rows=40, width=8):
        return self.tf.data.Dataset.from_tensor_slices(
            (np.zeros((rows, width), "float32"), np.zeros((rows, 128), "float32"))
        )

    def test_a_ragged_last_batch(self):
        assert "ragged-last-batch" in found(model_of(dense), self.pipeline().batch(16))
        mended = self.pipeline().batch(16, drop_remainder=True)
        assert found(model_of(dense), mended) == ()

    def test_unknown_dimensions_and_ragged_rows(self):
        texts = self.tf.data.Dataset.from_generator(
            lambda: iter([[1, 2], [3]]), output_signature=self.tf.TensorSpec([None], "int32")
        )
        open_ended = texts.padded_batch(2, drop_remainder=True)
        assert "unknown-dimension" in found(model_of(dense), open_ended)
        fixed = texts.padded_batch(2, padded_shapes=[8], drop_remainder=True)
        assert found(model_of(dense), fixed) == ()
        assert "ragged" in found(model_of(dense), texts.ragged_batch(2, drop_remainder=True))

    def test_buffers_larger_than_the_host_s_memory(self, monkeypatch):
        from colabtpu.preflight import traps_data

        # 40 rows of (8 + 128) float32 are 21,760 bytes; pretend that the host has 30,000.
        monkeypatch.setattr(traps_data, "host_bytes", lambda: 30_000)
        for stage in (lambda d: d.shuffle(1000), lambda d: d.cache()):
            heavy = stage(self.pipeline()).batch(8, drop_remainder=True)
            assert "host-memory" in found(model_of(dense), heavy)
        light = self.pipeline().shuffle(10).batch(8, drop_remainder=True)
        assert found(model_of(dense), light) == ()
        on_disk = self.pipeline().cache("/tmp/kept").batch(8, drop_remainder=True)
        assert found(model_of(dense), on_disk) == ()


def test_findings_read_well_as_text_and_table():
    traps = ct.preflight.check(model_of(dense, run_eagerly=True))
    assert "Next step: " in str(traps)
    assert "<table>" in traps._repr_html_()
    assert traps[0].fix in traps._repr_html_().replace("&#x27;", "'")
