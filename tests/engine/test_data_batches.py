"""Batches under `fit` on both engines: which rows come when, in which shapes, from where on."""

import lzma
import math
from collections import Counter

import keras
import numpy as np
import pytest

from colabtpu import data
from colabtpu.errors import InvalidArgumentError

SEQ_LEN, BATCH = 16, 8


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLABTPU_CACHE", str(tmp_path_factory.mktemp("cache")))
        words = [f"{'abcdefghij'[i % 10]}{i * i % 97} " for i in range(40)]
        texts = ("".join(words[i % 40 :]) + f"number {i}" for i in range(40))
        yield data.corpus(texts, validation_share=0.3)


@pytest.fixture(scope="module")
def tok(text):
    return data.tokenizer(text, vocab_size=300)


@pytest.fixture
def batches(text, tok):
    return data.lm_batches(text, tok, SEQ_LEN, BATCH, seed=3, progress=False)


def small_model(vocab_size):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(vocab_size, 4), keras.layers.Dense(vocab_size)]
    model = keras.Sequential([keras.Input((SEQ_LEN,), dtype="int32"), *layers])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Steps(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(batch)


def weights_after(vocab_size, batches, steps):
    """What one gradient step on each of these batches leads to, without `fit`."""
    model = small_model(vocab_size)
    for step in steps:
        model.train_on_batch(*batches[step])
    return model.get_weights()


def assert_same_weights(model, expected):
    for got, wanted in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_labels_are_the_tokens_one_further_on(batches):
    train, _ = batches
    x, y = train[5]
    assert x.shape == y.shape == (BATCH, SEQ_LEN)
    assert x.dtype == y.dtype == np.int32
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])


def test_rows_hold_the_corpus(batches, text, tok):
    train, _ = batches
    stream = [tok.separator_id]
    for document in text.documents("train"):
        stream += [*tok.encode(document).tolist(), tok.separator_id]
    for number, row in zip(train.example_numbers(2), train[2][0], strict=True):
        assert row.tolist() == stream[number * SEQ_LEN : (number + 1) * SEQ_LEN]


def test_each_pass_takes_every_row_once_and_drops_none(batches):
    train, _ = batches
    rows = len(train.examples)
    assert rows % BATCH  # else the test would not see a batch that spans two passes
    steps = -(-3 * rows // BATCH)
    numbers = np.concatenate([train.example_numbers(step) for step in range(steps)])
    for i in range(3):
        one = numbers[i * rows : (i + 1) * rows]
        np.testing.assert_array_equal(np.sort(one), np.arange(rows))
    assert (numbers[:rows] != numbers[rows : 2 * rows]).mean() > 0.9


def test_batch_depends_on_seed_and_step_alone(text, tok, batches):
    train, _ = batches
    again, _ = data.lm_batches(text, tok, SEQ_LEN, BATCH, seed=3)
    other, _ = data.lm_batches(text, tok, SEQ_LEN, BATCH, seed=4)
    np.testing.assert_array_equal(train[7][0], again[7][0])
    assert (train.example_numbers(7) != other.example_numbers(7)).any()


def test_hosts_together_read_the_batch_of_one(batches):
    train, valid = batches
    for each in (train, valid):
        shares = [
            data.Batches(each.examples, BATCH, seed=3, repeats=each.repeats, host=h, hosts=4)
            for h in range(4)
        ]
        for step in (0, len(each) - 1):
            parts = [share[step] for share in shares]
            for i, whole in enumerate(each[step]):
                np.testing.assert_array_equal(np.concatenate([p[i] for p in parts]), whole)
            assert parts[0][0].shape == (BATCH // 4, SEQ_LEN)


def test_validation_takes_every_token_once_in_full_batches(batches, text, tok):
    _, valid = batches
    labels = []
    for _, y, weights in valid:
        assert y.shape == weights.shape == (BATCH, SEQ_LEN)
        labels += y[weights == 1].tolist()
    expected = []
    for document in text.documents("validation"):
        expected += [*tok.encode(document).tolist(), tok.separator_id]
    assert labels == expected
    assert valid.num_tokens == len(expected)
    assert valid.num_bytes == text.num_bytes("validation")
    positions = sum(weights.size for _, _, weights in valid)
    assert positions == len(valid) * BATCH * SEQ_LEN


def test_validation_can_be_shortened_exactly(text, tok):
    _, valid = data.lm_batches(text, tok, SEQ_LEN, BATCH, validation_batches=2)
    labels = np.concatenate([y.ravel() for _, y in valid])
    assert len(valid) == 2
    assert valid.num_tokens == len(labels) == 2 * BATCH * SEQ_LEN
    assert valid.num_bytes == len(tok.decode_bytes(labels))


def test_fit_trains_on_the_batches_in_order(batches, tok):
    train, valid = batches
    model = small_model(tok.vocab_size)
    steps = Steps()
    model.fit(train, validation_data=valid, epochs=2, verbose=0, callbacks=[steps])
    assert steps.seen == [*range(len(train))] * 2
    assert train.step == 2 * len(train)
    assert_same_weights(model, weights_after(tok.vocab_size, train, range(2 * len(train))))


def test_second_fit_goes_on_where_the_first_ended(batches, tok):
    train, _ = batches
    model = small_model(tok.vocab_size)
    model.fit(train, epochs=1, steps_per_epoch=3, verbose=0)
    model.fit(train, epochs=1, steps_per_epoch=4, verbose=0)
    assert_same_weights(model, weights_after(tok.vocab_size, train, range(7)))


def test_epoch_begins_in_the_middle_when_told(batches, tok):
    train, _ = batches
    size = len(train)
    train.seek(size + 5, 5)
    model = small_model(tok.vocab_size)
    steps = Steps()
    model.fit(train, initial_epoch=1, epochs=3, verbose=0, callbacks=[steps])
    assert steps.seen == [*range(5, size), *range(size)]
    assert_same_weights(model, weights_after(tok.vocab_size, train, range(size + 5, 3 * size)))


def test_eight_devices_train_like_one_in_static_shapes(batches, tok, engine, eight_devices):
    train, valid = batches
    expected = weights_after(tok.vocab_size, train, range(4))
    shapes = []

    class Watch(keras.layers.Layer):
        def call(self, x):
            shapes.append(x.shape)
            return x

    def fit():
        keras.utils.set_random_seed(0)
        vocab = tok.vocab_size
        layers = [Watch(), keras.layers.Embedding(vocab, 4), keras.layers.Dense(vocab)]
        model = keras.Sequential([keras.Input((SEQ_LEN,), dtype="int32"), *layers])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        shapes.clear()
        return model, lambda: model.fit(train, steps_per_epoch=4, verbose=0)

    if engine == "tensorflow":
        with eight_devices.scope():
            model, run = fit()
        run()
        traced = [shape for shape in shapes if shape[0] is not None]
        assert set(map(tuple, traced)) == {(BATCH // 8, SEQ_LEN)}
        spread = eight_devices.experimental_distribute_dataset(valid.get_tf_dataset())
        for spec in spread.element_spec[0]._component_specs:
            assert spec.shape == (BATCH // 8, SEQ_LEN)
    else:
        with eight_devices.scope():
            model, run = fit()
            run()
        traced = [shape for shape in shapes if shape[0] is not None]
        assert set(map(tuple, traced)) <= {(BATCH, SEQ_LEN)}
    assert_same_weights(model, expected)


def test_baselines_agree_with_a_count_by_hand(batches, text, tok):
    _, valid = batches
    train = Counter([tok.separator_id])
    for document in text.documents("train"):
        train.update([*tok.encode(document).tolist(), tok.separator_id])
    total = sum(train.values()) + tok.vocab_size
    bits = 0.0
    for document in text.documents("validation"):
        for token in [*tok.encode(document).tolist(), tok.separator_id]:
            bits -= math.log2((train[token] + 1) / total)
    found = data.baselines(text, tok, valid)
    assert found.unigram == pytest.approx(bits / text.num_bytes("validation"), rel=1e-9)
    assert found.num_bytes == text.num_bytes("validation")
    validation = "".join(text.documents("validation")).encode()
    packed = lzma.compress(validation, preset=9 | lzma.PRESET_EXTREME)
    assert found.xz == pytest.approx(8 * len(packed) / len(validation))


def test_bits_per_byte_of_a_uniform_guess(batches, tok):
    _, valid = batches
    expected = math.log2(tok.vocab_size) * valid.num_tokens / valid.num_bytes
    assert data.bits_per_byte(math.log(tok.vocab_size), valid) == pytest.approx(expected)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seq_len": -1}, {"batch": 2.5}])
def test_sizes_that_cannot_work_are_refused(text, tok, sizes):
    with pytest.raises(InvalidArgumentError, match="positive whole number"):
        data.lm_batches(text, tok, **{"seq_len": SEQ_LEN, "batch": BATCH, **sizes})


def test_row_longer_than_the_corpus_is_refused(text, tok):
    with pytest.raises(InvalidArgumentError, match="shorter `seq_len`"):
        data.lm_batches(text, tok, seq_len=10**6, batch=1)
