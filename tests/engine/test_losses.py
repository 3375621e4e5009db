"""The loss against numpy and Keras, on one device and on eight with unequal padding."""

import keras
import numpy as np
import pytest

import colabtpu as ct
from colabtpu.models import cross_entropy

VOCAB = 50
DIMS = {"vocab_size": VOCAB, "seq_len": 8, "layers": 1, "dim": 16, "heads": 2}


def example(seed=0, batch=4, seq=8):
    random = np.random.default_rng(seed)
    logits = random.normal(size=(batch, seq, VOCAB)).astype("float32")
    labels = random.integers(0, VOCAB, (batch, seq)).astype("int32")
    weights = (random.random((batch, seq)) < 0.6).astype("float32")
    return logits, labels, weights


def by_hand(logits, labels, weights, smoothing=0.0, z=0.0):
    """The mean over weighted tokens of cross-entropy against smoothed labels plus z log²Z."""
    logits = logits.astype("float64")
    partition = np.log(np.exp(logits).sum(-1))
    goal = np.eye(VOCAB)[labels] * (1 - smoothing) + smoothing / VOCAB
    losses = partition - (goal * logits).sum(-1) + z * partition**2
    return (losses * weights).sum() / weights.sum()


def value(*args, **options):
    return float(ct.losses.next_token(**options)(*args))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z", [0.0, 1e-2])
def test_it_is_the_formula(smoothing, z):
    logits, labels, weights = example()
    got = value(labels, logits, weights, label_smoothing=smoothing, z_loss=z)
    assert got == pytest.approx(by_hand(logits, labels, weights, smoothing, z), rel=1e-6)


def test_it_equals_keras_where_nothing_is_padded():
    logits, labels, _ = example()
    keras_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    assert value(labels, logits) == pytest.approx(float(keras_loss(labels, logits)), rel=1e-6)


def test_ignored_labels_and_zero_weights_count_the_same():
    logits, labels, weights = example()
    ignored = np.where(weights > 0, labels, -100)
    expected = by_hand(logits, labels, weights)
    assert value(ignored, logits, ignore_index=-100) == pytest.approx(expected, rel=1e-6)


def test_a_weight_for_each_row_counts_for_all_its_tokens():
    logits, labels, _ = example()
    rows = np.array([1.0, 0.0, 2.0, 0.5], "float32")
    expected = by_hand(logits, labels, np.repeat(rows[:, None], 8, 1))
    assert value(labels, logits, rows) == pytest.approx(expected, rel=1e-6)


def test_a_batch_without_a_valid_token_has_loss_zero():
    logits, labels, weights = example()
    assert value(labels, logits, 0 * weights) == 0


def test_bfloat16_logits_do_not_round_the_labels():
    # Keras' own loss under a bfloat16 dtype reads token 1001 as 1000.
    logits = np.zeros((1, 1, 1024), "float32")
    logits[0, 0, 1001] = 20.0
    half = keras.ops.cast(logits, "bfloat16")
    assert value(np.array([[1001]]), half) < 1e-4


def compiled():
    keras.utils.set_random_seed(1)
    model = ct.models.transformer_lm(**DIMS)
    model.compile(
        keras.optimizers.Adam(1e-2),
        loss=ct.losses.next_token(model),
        metrics=ct.losses.metrics(model),
    )
    return model


def padded_batch():
    random = np.random.default_rng(5)
    x = random.integers(0, VOCAB, (16, 8)).astype("int32")
    weights = np.zeros((16, 8), "float32")
    for row, valid in enumerate(random.integers(1, 9, 16)):  # replicas differ in valid tokens
        weights[row, :valid] = 1
    return x, np.roll(x, -1, 1), weights


def test_fit_lowers_the_loss_and_logs_accuracy_over_valid_tokens():
    model = compiled()
    x, y, weights = padded_batch()
    y = np.where(weights > 0, y, 49)  # labels that padding must hide
    many = [np.concatenate([part] * 60) for part in (x, y, weights)]
    log = model.fit(*many[:2], sample_weight=many[2], batch_size=16, shuffle=False, verbose=0)
    assert set(log.history) == {"loss", "accuracy"}
    logs = model.evaluate(x, y, sample_weight=weights, batch_size=16, verbose=0, return_dict=True)
    logits = model.predict(x, verbose=0)[..., :VOCAB]
    right = ((logits.argmax(-1) == y) * weights).sum() / weights.sum()
    assert logs["loss"] < 0.3 * np.log(VOCAB)  # where a model that knows nothing starts
    assert logs["accuracy"] == pytest.approx(right, abs=1e-6)
    assert logs["loss"] == pytest.approx(by_hand(logits, y, weights), rel=1e-4)


def test_eight_replicas_with_unequal_padding_train_like_one_device(eight_devices):
    x, y, weights = (np.concatenate([part] * 2) for part in padded_batch())

    def run():
        model = compiled()
        # Naming the steps keeps TensorFlow's replicas from racing for the end of the data.
        log = model.fit(
            x, y, sample_weight=weights, batch_size=16, steps_per_epoch=2, shuffle=False, verbose=0
        )
        return log.history, [keras.ops.convert_to_numpy(w) for w in model.weights]

    alone, alone_weights = run()
    with eight_devices.scope():
        together, together_weights = run()
    np.testing.assert_allclose(together["loss"], alone["loss"], rtol=1e-5)
    np.testing.assert_allclose(together["accuracy"], alone["accuracy"], rtol=1e-5)
    for one, other in zip(alone_weights, together_weights, strict=True):
        np.testing.assert_allclose(other, one, atol=2e-4)


def test_it_trains_a_foreign_keras_model():
    tokens = keras.Input((8,), dtype="int32")
    hidden = keras.layers.Embedding(VOCAB, 16)(tokens)
    model = keras.Model(tokens, keras.layers.Dense(VOCAB)(hidden))
    model.compile(
        keras.optimizers.Adam(0.1),
        loss=ct.losses.next_token(model),
        weighted_metrics=ct.losses.metrics(model),
    )
    x, _, weights = padded_batch()
    model.fit(x, (x + 1) % VOCAB, sample_weight=weights, epochs=20, batch_size=16, verbose=0)
    logs = model.evaluate(x, (x + 1) % VOCAB, sample_weight=weights, verbose=0, return_dict=True)
    assert logs["accuracy"] == 1.0


def test_a_foreign_loss_and_metric_read_the_logits_of_our_model():
    model = ct.models.transformer_lm(**DIMS)
    model.compile(
        "adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="theirs")],
    )
    x, y, _ = padded_batch()
    logs = model.fit(x, y, batch_size=16, verbose=0).history
    assert logs["loss"][0] == pytest.approx(np.log(VOCAB), abs=0.3)
    assert "theirs" in logs


def gradient_of(function, *arrays):
    """Value and gradients of a scalar function."""
    if keras.backend.backend() == "jax":
        import jax

        value, grads = jax.jit(jax.value_and_grad(function, argnums=(0, 1)))(*arrays)
        return float(value), [np.asarray(g) for g in grads]
    import tensorflow as tf

    @tf.function
    def run(*tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = function(*tensors)
        return value, tape.gradient(value, tensors)

    value, grads = run(*(tf.constant(a) for a in arrays))
    return float(value), [g.numpy() for g in grads]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2}], ids=["plain", "smoothing-z"]
)
def test_chunks_equal_keras_loss_and_gradients(tied, options):
    random = np.random.default_rng(4)
    hidden = random.normal(size=(4, 16, 32)).astype("float32")
    kernel = random.normal(size=(128, 32) if tied else (32, 128)).astype("float32")
    labels = random.integers(0, VOCAB, (4, 16)).astype("int32")
    weights = (random.random((4, 16)) < 0.7).astype("float32")
    share = weights / weights.sum()

    def ours(hidden, kernel):
        objective = cross_entropy.Objective(VOCAB, **options)
        loss, _ = cross_entropy.chunked(
            hidden, kernel, labels, share, objective, tied=tied, chunks=4
        )
        return loss

    def theirs(hidden, kernel):
        ops = keras.ops
        logits = ops.matmul(hidden, ops.transpose(kernel) if tied else kernel)[..., :VOCAB]
        goal = ops.one_hot(labels, VOCAB)
        losses = keras.losses.categorical_crossentropy(
            goal, logits, from_logits=True, label_smoothing=options.get("label_smoothing", 0.0)
        )
        losses = losses + options.get("z_loss", 0.0) * ops.square(ops.logsumexp(logits, axis=-1))
        return ops.sum(losses * share)

    value, grads = gradient_of(ours, hidden, kernel)
    expected, expected_grads = gradient_of(theirs, hidden, kernel)
    assert value == pytest.approx(expected, rel=1e-6)
    for got, wanted in zip(grads, expected_grads, strict=True):
        assert np.abs(got - wanted).max() < 2e-6 * np.abs(wanted).max()


def test_the_number_of_chunks_changes_nothing_but_the_memory():
    random = np.random.default_rng(4)
    hidden = random.normal(size=(2, 16, 8)).astype("float32")
    kernel = random.normal(size=(64, 8)).astype("float32")
    labels = random.integers(0, VOCAB, (2, 16)).astype("int32")
    share = np.full((2, 16), 1 / 32, "float32")
    found = [
        [float(x) for x in cross_entropy.chunked(
            hidden, kernel, labels, share, cross_entropy.Objective(VOCAB),
            tied=True, training=training, chunks=chunks,
        )]
        for chunks in (1, 2, 16) for training in (True, False)
    ]  # fmt: skip
    np.testing.assert_allclose(found, [found[0]] * 6, rtol=1e-6)


def train_program(model, batch, seq):
    """The text of the training step that `fit` would compile."""
    x = np.zeros((batch, seq), "int32")
    if keras.backend.backend() == "jax":
        import jax

        model._symbolic_build(data_batch=(x, x))
        model.optimizer.build(model.trainable_variables)
        state = tuple(
            [jax.ShapeDtypeStruct(tuple(v.shape), v.dtype) for v in variables]
            for variables in (
                model.trainable_variables, model.non_trainable_variables,
                model.optimizer.variables, model.metrics_variables,
            )
        )  # fmt: skip
        return jax.jit(model.train_step).lower(state, (x, x)).compile().as_text()
    import tensorflow as tf

    model.optimizer.build(model.trainable_variables)
    step = tf.function(lambda x: model.train_step((x, x)), jit_compile=True, autograph=False)
    return step.experimental_get_compiler_ir(tf.constant(x))(stage="optimized_hlo")


def test_training_never_holds_the_logits():
    model = ct.models.transformer_lm(1000, 256, layers=1, dim=16, heads=1)
    model.compile(
        "adam", loss=ct.losses.next_token(model), metrics=ct.losses.metrics(model)
    )  # 8 x 256 tokens: 2 chunks of 8 x 128
    program = train_program(model, 8, 256)
    for whole in ("[8,256,1024]", "[2048,1024]"):
        assert whole not in program
    assert "[1024,1024]" in program
    model.compile("adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert "256,1024]" in train_program(model, 8, 256) or "2048,1024]" in train_program(
        model, 8, 256
    )
