"""Best-fit packing: nothing lost, nothing twice, little padding; as good as the slow textbook."""

import numpy as np
import pytest

from colabtpu.data import corpus, token_cache, tokenizer
from colabtpu.data.packing import BestFit, best_fit

SEQ_LEN = 64


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLABTPU_CACHE", str(tmp_path_factory.mktemp("cache")))
        sizes = np.random.default_rng(0).geometric(1 / 25, 400)
        texts = corpus(" ".join(f"{(i * k) % 83}" for k in range(n)) for i, n in enumerate(sizes))
        tok = tokenizer(texts, vocab_size=300)
        cache = token_cache(texts, tok, progress=False)
        yield texts, tok, BestFit(cache, "train", SEQ_LEN, tok)


def textbook_best_fit(lengths, capacity):
    """Best-fit decreasing as it is defined: each item to the fullest bin that has room."""
    room, bin_of = [], np.empty(len(lengths), int)
    for item in np.argsort(-lengths, kind="stable"):
        fitting = [b for b, left in enumerate(room) if left >= lengths[item]]
        if not fitting:
            room.append(capacity)
            fitting = [len(room) - 1]
        best = min(fitting, key=lambda b: room[b])
        room[best] -= lengths[item]
        bin_of[item] = best
    return bin_of


@pytest.mark.parametrize("seed", range(6))
def test_bins_are_as_full_as_the_textbook_fills_them(seed):
    draw = np.random.default_rng(seed)
    capacity = int(draw.integers(5, 60))
    lengths = draw.integers(1, capacity + 1, 300)
    if seed % 2:
        lengths = np.minimum(draw.geometric(3 / capacity, 300), capacity)
    ours, theirs = best_fit(lengths, capacity), textbook_best_fit(lengths, capacity)
    loads = [np.sort(np.bincount(bins, lengths)) for bins in (ours, theirs)]
    np.testing.assert_array_equal(*loads)
    assert loads[0].max() <= capacity


def test_a_million_items_pack_tightly():
    lengths = np.minimum(np.random.default_rng(0).geometric(1 / 300, 10**6), 1024)
    bins = best_fit(lengths, 1024)
    loads = np.bincount(bins, lengths)
    assert loads.max() <= 1024
    assert 1 - lengths.sum() / (1024 * len(loads)) < 0.001


def test_no_items_need_no_bins():
    assert best_fit(np.zeros(0, int), 16).shape == (0,)


def test_every_document_is_found_once_in_its_own_segments(packed):
    texts, tok, rows = packed
    found = []
    x, y, weights = rows.fetch(np.arange(len(rows)))
    for i in range(len(rows)):
        for segment in range(1, x["segment_ids"][i].max() + 1):
            mine = x["segment_ids"][i] == segment
            assert weights[i][mine].all()
            np.testing.assert_array_equal(x["positions"][i][mine], np.arange(mine.sum()))
            inputs, labels = x["tokens"][i][mine], y[i][mine]
            np.testing.assert_array_equal(inputs[1:], labels[:-1])
            found.append((inputs.tolist(), labels.tolist()))
    separator = tok.separator_id
    expected = []
    for text in texts.documents("train"):
        whole = [separator, *tok.encode(text).tolist(), separator]
        for start in range(0, len(whole) - 1, SEQ_LEN):
            piece = whole[start : start + SEQ_LEN + 1]
            expected.append((piece[:-1], piece[1:]))
    assert sorted(found) == sorted(expected)
    assert len(expected) > 400 * 0.9  # some documents needed more than one row


def test_padding_is_zero_everywhere_and_counted(packed):
    _, _, rows = packed
    x, y, weights = rows.fetch(np.arange(len(rows)))
    padding = x["segment_ids"] == 0
    for array in (*x.values(), y, weights):
        assert array.shape == (len(rows), SEQ_LEN)
        assert not array[padding].any()
    assert rows.padding_share == pytest.approx(padding.mean())
    assert rows.padding_share < 0.01
    assert rows.num_tokens == weights.sum()


def test_rows_come_alone_as_they_come_together(packed):
    _, _, rows = packed
    together = rows.fetch(np.array([5, 2, 9]))
    for place, number in enumerate((5, 2, 9)):
        alone = rows.fetch(np.array([number]))
        for name, array in alone[0].items():
            np.testing.assert_array_equal(array[0], together[0][name][place])
        np.testing.assert_array_equal(alone[1][0], together[1][place])


def test_bytes_and_labels_are_those_of_the_text(packed):
    texts, tok, rows = packed
    labels = np.concatenate(list(rows.labels()))
    assert tok.decode(labels) == "".join(texts.documents("train"))
    assert rows.num_bytes == texts.num_bytes("train")
