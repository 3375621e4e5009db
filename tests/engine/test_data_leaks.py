"""The leak test: changing one document changes no logit of another in the same row."""

import keras
import numpy as np
import pytest
from keras import ops

from colabtpu import data, models
from colabtpu.errors import InvalidArgumentError

SEQ_LEN, BATCH = 32, 8


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLABTPU_CACHE", str(tmp_path_factory.mktemp("cache")))
        texts = data.corpus(" ".join(f"{i * k % 50}" for k in range(i % 9 + 2)) for i in range(90))
        tok = data.tokenizer(texts, vocab_size=280)
        train, valid = data.lm_batches(
            texts, tok, SEQ_LEN, BATCH, packing="best_fit", progress=False
        )
        yield tok, train, valid


def plain_attention(vocab_size):
    """One attention layer that keeps to segments, from Keras' own parts."""
    names = ("tokens", "segment_ids", "positions")
    x = {name: keras.Input((SEQ_LEN,), dtype="int32", name=name) for name in names}
    hidden = keras.layers.Embedding(vocab_size, 16)(x["tokens"])
    hidden += keras.layers.Embedding(SEQ_LEN, 16)(x["positions"])
    same = ops.equal(x["segment_ids"][:, :, None], x["segment_ids"][:, None, :])
    attention = keras.layers.MultiHeadAttention(2, 8)
    hidden += attention(hidden, hidden, attention_mask=same, use_causal_mask=True)
    return keras.Model(x, keras.layers.Dense(vocab_size)(hidden))


def our_transformer(vocab_size):
    return models.transformer_lm(
        vocab_size=vocab_size, seq_len=SEQ_LEN, layers=2, dim=32, heads=2, packed=True
    )


@pytest.mark.parametrize("build", [plain_attention, our_transformer])
def test_changing_one_document_changes_no_logit_of_another(packed, build):
    tok, train, _ = packed
    keras.utils.set_random_seed(0)
    model = build(tok.vocab_size)
    x, _, _ = train[0]
    row = int(np.argmax(x["segment_ids"].max(axis=1)))
    assert x["segment_ids"][row].max() >= 3
    before = model.predict_on_batch(x)[row]
    changed = {name: array.copy() for name, array in x.items()}
    mine = x["segment_ids"][row] == 2
    changed["tokens"][row][mine] = (changed["tokens"][row][mine] + 7) % tok.vocab_size
    after = model.predict_on_batch(changed)[row]
    others = (x["segment_ids"][row] != 2) & (x["segment_ids"][row] > 0)
    np.testing.assert_array_equal(after[others], before[others])
    assert (after[mine] != before[mine]).any(axis=-1).all()


def test_a_document_gets_the_same_logits_packed_as_alone(packed):
    tok, train, _ = packed
    keras.utils.set_random_seed(0)
    model = plain_attention(tok.vocab_size)
    x, _, _ = train[0]
    row = int(np.argmax(x["segment_ids"].max(axis=1)))
    mine = x["segment_ids"][row] == 2
    alone = {name: np.zeros_like(array) for name, array in x.items()}
    for name, array in alone.items():
        array[0, : mine.sum()] = x[name][row][mine]
    packed_logits = model.predict_on_batch(x)[row][mine]
    alone_logits = model.predict_on_batch(alone)[0, : mine.sum()]
    np.testing.assert_allclose(packed_logits, alone_logits, atol=1e-5)


def test_fit_takes_packed_batches(packed):
    tok, train, valid = packed
    model = plain_attention(tok.vocab_size)
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    model.compile("adam", loss)
    losses = model.fit(train, validation_data=valid, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    shapes = {spec.shape for spec in keras.tree.flatten(train.spec)}
    assert shapes == {(BATCH, SEQ_LEN)}


def test_packing_needs_a_known_name(packed):
    with pytest.raises(InvalidArgumentError, match="packing='tight'"):
        data.lm_batches(data.corpus(["x"] * 20), packed[0], packing="tight")
