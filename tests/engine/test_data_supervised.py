"""Fine-tuning batches: texts with their labels, conversations of which only answers are learned."""

import keras
import numpy as np
import pytest

from colabtpu import data
from colabtpu.errors import InvalidArgumentError


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLABTPU_CACHE", str(tmp_path_factory.mktemp("cache")))
        texts = [f"User: what is {i} + {i}? Assistant: it is {2 * i}" for i in range(40)]
        yield data.tokenizer(data.corpus(texts), vocab_size=290)


def reviews(count):
    return [(f"film {i} was {'fine ' * (i % 5)}", i % 3) for i in range(count)]


def test_each_text_comes_with_its_label(tok):
    rows = reviews(50)
    train, valid = data.text_batches(rows, tok, batch=8, max_len=128)
    found = set()
    for batches, steps in ((train, -(-len(train.examples) // 8)), (valid, len(valid))):
        for step in range(steps):
            x, y, *weights = batches[step]
            assert y.dtype == np.int32
            for row in range(8):
                if not weights or weights[0][row]:
                    real = x["segment_ids"][row] == 1
                    assert x["tokens"][row][0] == tok.separator_id
                    assert x["positions"][row].max() == real.sum() - 1
                    found.add((tok.decode(x["tokens"][row][real]), int(y[row])))
    assert found == set(rows)


def test_one_row_in_ten_validates_each_once(tok):
    train, valid = data.text_batches(reviews(100), tok, batch=8, max_len=128)
    assert len(train.examples) == 90
    assert sum(weights.sum() for _, _, weights in valid) == 10
    assert {spec.shape for spec in keras.tree.flatten(valid.spec)} == {(8, 128), (8,)}


def test_labels_with_fractions_are_floats(tok):
    train, _ = data.text_batches([("a text", i / 2) for i in range(20)], tok, batch=2)
    assert train[0][1].dtype == np.float32


def test_recommended_length_holds_99_percent_and_is_a_multiple_of_128(tok):
    rows = [("a " * (i % 200), 0) for i in range(400)]
    train, _ = data.text_batches(rows, tok, batch=2)
    lengths = np.array([1 + len(tok.encode(text)) for text, _ in rows])
    assert train.seq_len == train.lengths.recommended
    assert train.seq_len % 128 == 0
    assert np.mean(lengths <= train.seq_len) >= 0.99 > np.mean(lengths <= train.seq_len - 128)
    assert sum(count for _, count in train.lengths.bins) == 400
    short, _ = data.text_batches(rows, tok, batch=2, max_len=128)
    assert short.lengths.cut == (lengths > 128).sum()
    assert f"cuts {short.lengths.cut}" in str(short.lengths)


def test_fit_learns_the_labels(tok):
    rows = [("good " * 3 if i % 2 else "bad " * 3, i % 2) for i in range(80)]
    train, valid = data.text_batches(rows, tok, batch=8, max_len=128)
    keras.utils.set_random_seed(0)
    x = {name: keras.Input((128,), dtype="int32", name=name) for name in train.spec[0]}
    hidden = keras.layers.Embedding(tok.vocab_size, 8)(x["tokens"])
    hidden += keras.layers.Embedding(128, 8)(x["positions"])
    hidden *= keras.ops.cast(x["segment_ids"], "float32")[..., None]
    model = keras.Model(x, keras.layers.Dense(2)(keras.ops.sum(hidden, axis=1)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, weighted_metrics=["accuracy"])
    history = model.fit(train, validation_data=valid, epochs=3, verbose=0)
    assert history.history["val_accuracy"][-1] == 1


def learned(tok, batch):
    """The labels that count, segment by segment, as text and its number of separators."""
    x, y, weights = batch
    found = []
    for row in np.flatnonzero(weights.any(axis=1)):  # the others are fillers
        for segment in range(1, x["segment_ids"][row].max() + 1):
            counts = (x["segment_ids"][row] == segment) & (weights[row] == 1)
            labels = y[row][counts]
            found.append((tok.decode(labels), int((labels == tok.separator_id).sum())))
    return found


def test_answers_and_their_ends_are_learned_and_prompts_are_not(tok):
    pairs = [(f"what is {i} + {i}?", f"it is {2 * i}") for i in range(40)]
    train, valid = data.chat_batches(pairs, tok, batch=2, max_len=128)
    found = [
        each
        for batches, steps in ((train, len(train.examples) // 2 + 1), (valid, len(valid)))
        for step in range(steps)
        for each in learned(tok, batches[step])
    ]
    assert set(found) == {(answer, 1) for _, answer in pairs}
    assert train.padding_share < 0.2


def test_every_answer_of_a_conversation_is_learned(tok):
    talk = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "2"},
    ]
    train, _ = data.chat_batches([{"messages": talk}], tok, batch=1, validation=[talk], max_len=128)
    assert learned(tok, train[0]) == [("12", 2)]
    inputs = train[0][0]
    text = tok.decode(inputs["tokens"][0][inputs["segment_ids"][0] == 1])
    assert text.startswith("System: be brief\n\nUser: one?\n\nAssistant: 1User: two?")


def test_template_of_ones_own_decides_what_is_learned(tok):
    train, _ = data.chat_batches(
        ["abc"] * 20,
        tok,
        batch=1,
        max_len=128,
        template=lambda text: [(f"<{text}>", False), (text.upper(), True)],
    )
    assert set(learned(tok, train[0])) == {("ABC", 1)}


@pytest.mark.parametrize("rows", [["no pair"], [("text", "label")], [(1, 2)]])
def test_rows_that_are_no_labelled_texts_are_refused(tok, rows):
    with pytest.raises(InvalidArgumentError, match=r"[Rr]ow 0"):
        data.text_batches(rows, tok)


def test_conversation_without_an_answer_is_refused(tok):
    with pytest.raises(InvalidArgumentError, match="Conversation 1 holds no answer"):
        data.chat_batches([("a", "b"), ("a", "")], tok)
