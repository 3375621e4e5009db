"""Ten kinds of model, KerasHub's and keras.io's: each gets a right verdict or a clear refusal."""

import os

import keras
import pytest
from keras import ops

import colabtpu as ct
from colabtpu.preflight import compiler
from colabtpu.preflight.spec import ArraySpec

pytestmark = [
    pytest.mark.tpu_compiler,
    pytest.mark.skipif(bool(compiler.unavailable()), reason="no TPU compiler here"),
]
ENGINE = keras.backend.backend()
ROWS, LENGTH, VOCABULARY = 8, 128, 512
IDS = ArraySpec((ROWS, LENGTH), "int32")
slow = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    before = os.environ.get("COLABTPU_CACHE")
    os.environ["COLABTPU_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("COLABTPU_CACHE")
    if before is not None:
        os.environ["COLABTPU_CACHE"] = before


def compiled(inputs, outputs, loss):
    model = keras.Model(inputs, outputs)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def token_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def hub():
    return pytest.importorskip("keras_hub").models


def encoder():
    bert = hub().BertBackbone(VOCABULARY, 2, 2, 128, 256, max_sequence_length=LENGTH)
    out = keras.layers.Dense(3)(bert.output["pooled_output"])
    spec = {"token_ids": IDS, "segment_ids": IDS, "padding_mask": IDS}
    return compiled(bert.input, out, token_loss()), (spec, ArraySpec((ROWS,), "int32"))


def decoder():
    gpt = hub().GPT2Backbone(VOCABULARY, 2, 2, 128, 256, max_sequence_length=LENGTH)
    out = gpt.token_embedding(gpt.output, reverse=True)
    return compiled(gpt.input, out, token_loss()), ({"token_ids": IDS, "padding_mask": IDS}, IDS)


def encoder_decoder():
    bart = hub().BartBackbone(VOCABULARY, 2, 2, 128, 256, max_sequence_length=LENGTH)
    hidden = bart.output["decoder_sequence_output"]
    out = bart.token_embedding(hidden, reverse=True)
    names = ("encoder_token_ids", "encoder_padding_mask", "decoder_token_ids",
             "decoder_padding_mask")  # fmt: skip
    return compiled(bart.input, out, token_loss()), (dict.fromkeys(names, IDS), IDS)


def vision_transformer():
    image = keras.Input((32, 32, 3))
    patches = keras.layers.Conv2D(128, 4, strides=4, name="patches")(image)
    x = keras.layers.Reshape((64, 128))(patches)
    for _ in range(2):
        normed = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(2, 64)(normed, normed)
        x = x + keras.layers.Dense(128)(keras.layers.Dense(256, activation="gelu")(x))
    out = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(x))
    images = ArraySpec((ROWS, 32, 32, 3), "float32")
    return compiled(image, out, token_loss()), (images, ArraySpec((ROWS,), "int32"))


class MixtureOfExperts(keras.layers.Layer):
    """Two of four experts for each token, all computed, two weighed in."""

    def build(self, shape):
        self.gate = keras.layers.Dense(4)
        self.gate.build(shape)
        self.up = self.add_weight(shape=(4, shape[-1], 256), name="up")
        self.down = self.add_weight(shape=(4, 256, shape[-1]), name="down")

    def call(self, x):
        values, indices = ops.top_k(self.gate(x), 2)
        chosen = ops.sum(ops.one_hot(indices, 4) * ops.softmax(values)[..., None], axis=-2)
        hidden = ops.gelu(ops.einsum("btd,edh->beth", x, self.up))
        return ops.einsum("beth,ehd,bte->btd", hidden, self.down, chosen)

    def compute_output_shape(self, shape):
        return shape


def mixture_of_experts():
    ids = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 128)(ids)
    x = x + MixtureOfExperts(name="experts")(x)
    return compiled(ids, keras.layers.Dense(VOCABULARY)(x), token_loss()), (IDS, IDS)


def with_batch_norm():
    image = keras.Input((32, 32, 3))
    x = keras.layers.Conv2D(32, 3, padding="same", use_bias=False)(image)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    out = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x))
    images = ArraySpec((ROWS, 32, 32, 3), "float32")
    return compiled(image, out, token_loss()), (images, ArraySpec((ROWS,), "int32"))


def with_dropout():
    x = keras.Input((128,))
    out = keras.layers.Dense(10)(keras.layers.Dropout(0.5)(keras.layers.Dense(256)(x)))
    row = ArraySpec((ROWS, 128), "float32")
    return compiled(x, out, token_loss()), (row, ArraySpec((ROWS,), "int32"))


class Gated(keras.layers.Layer):
    """A layer of the user's own, with a loss of its own."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, x):
        self.add_loss(1e-4 * ops.sum(ops.square(self.kernel)))
        return x * ops.sigmoid(ops.matmul(x, self.kernel))


def with_a_custom_layer():
    x = keras.Input((128,))
    row = ArraySpec((ROWS, 128), "float32")
    return compiled(x, Gated(name="gated")(x), "mse"), (row, row)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(encoder, marks=slow),
        pytest.param(decoder, marks=slow),
        pytest.param(encoder_decoder, marks=slow),
        pytest.param(vision_transformer, marks=slow),
        pytest.param(mixture_of_experts, marks=slow),
        pytest.param(with_batch_norm, marks=slow),
        pytest.param(with_dropout, marks=slow),
        with_a_custom_layer,
    ],
)
def test_it_compiles_and_fits(build):
    model, data = build()
    report = ct.preflight(model, data, target="v5e-1", memory_only=True)
    assert (report.compiles, report.fits) == (True, True), report
    # All weights are there; small ones are padded to a tile of 4 KiB.
    weights = sum(v.value.nbytes if ENGINE == "jax" else v.numpy().nbytes for v in model.weights)
    assert weights <= dict(report.hbm_parts)["weights"] <= 3 * weights + 2**16


def test_ragged_rows_are_refused_with_the_way_out():
    tf = pytest.importorskip("tensorflow")
    rows = tf.data.Dataset.from_tensors(tf.ragged.constant([[1, 2, 3], [4]], dtype="int32"))
    model, _ = with_a_custom_layer()
    report = ct.preflight(model, rows.map(lambda x: (x, x)), target="v5e-1", batch=2)
    assert (report.compiles, report.status) == (False, "refused")
    assert "ragged" in report.summary
    assert "to_tensor" in report.fix


class Eigen(keras.layers.Layer):
    """Uses what no TPU has."""

    def call(self, x):
        square = ops.reshape(x, (-1, 8, 16))
        square = ops.matmul(square, ops.transpose(square, (0, 2, 1)))
        values, _ = ops.eig(square)
        return ops.real(values)

    def compute_output_shape(self, shape):
        return (shape[0], 8)


def test_an_op_that_the_tpu_lacks_is_named_with_its_layer_and_line():
    x = keras.Input((128,))
    model = compiled(x, keras.layers.Dense(1)(Eigen(name="spectrum")(x)), "mse")
    report = ct.preflight(
        model, (ArraySpec((ROWS, 128), "float32"), ArraySpec((ROWS, 1), "float32")), step="evaluate"
    )
    assert (report.compiles, report.status) == (False, "refused")
    assert "eig" in report.summary.lower()
    assert "spectrum" in report.summary
    assert "test_preflight_kinds.py" in report.summary
    assert report.fix
