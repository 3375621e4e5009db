"""The tokenizer: any text goes in and comes out unchanged, and the same corpus trains the same."""

import random

import numpy as np
import pytest

from colabtpu.data import Tokenizer, corpus, tokenizer
from colabtpu.errors import InvalidArgumentError

HARD = [
    "",
    " leading and  double   spaces\t\n\r\n",
    "naïve façade — “quotes” 你好 🎉👩‍👩‍👧 ḧ\u0300",
    "\x00\x01\x7f control",
    "ends a document? <|endoftext|> no",
    "Ġ Ċ stand-ins for bytes",
]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COLABTPU_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def texts():
    words = ["the", "quick", "fox", "jumps", "over", "lazy", "def", "return", "class", "self"]
    pick = random.Random(0)
    return [" ".join(pick.choices(words, k=60)) for _ in range(100)]


@pytest.fixture
def tok(texts):
    return tokenizer(corpus(texts), vocab_size=300)


@pytest.mark.parametrize("text", HARD)
def test_any_text_comes_back_unchanged(tok, text):
    ids = tok.encode(text)
    assert ids.dtype == np.int32
    assert tok.decode(ids) == text
    assert tok.separator_id not in ids


def test_random_characters_come_back_unchanged(tok):
    pick = random.Random(1)
    planes = [*range(0xD800), *range(0xE000, 0x110000, 37)]
    text = "".join(chr(pick.choice(planes)) for _ in range(5000))
    assert tok.decode(tok.encode(text)) == text


@pytest.mark.parametrize("text", HARD)
def test_byte_lengths_add_up_to_the_text(tok, text):
    assert tok.byte_lengths[tok.encode(text)].sum() == len(text.encode())
    assert tok.byte_lengths[tok.separator_id] == 0


def test_same_corpus_trains_the_same_tokenizer(tok, texts, monkeypatch, tmp_path):
    monkeypatch.setenv("COLABTPU_CACHE", str(tmp_path / "elsewhere"))
    again = tokenizer(corpus(texts), vocab_size=300)
    assert again.fingerprint == tok.fingerprint
    assert tokenizer(corpus(texts), vocab_size=290).fingerprint != tok.fingerprint


def test_saved_tokenizer_loads_the_same(tok, tmp_path):
    tok.save(tmp_path / "model" / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "model" / "tokenizer.json")
    assert loaded.fingerprint == tok.fingerprint
    assert loaded.vocab_size == tok.vocab_size > 257
    np.testing.assert_array_equal(loaded.encode("the fox 🎉"), tok.encode("the fox 🎉"))


def test_merges_shorten_the_text_it_was_trained_on(tok, texts):
    assert len(tok.encode(texts[0])) < 0.6 * len(texts[0].encode())


def test_half_a_surrogate_pair_is_refused(tok):
    with pytest.raises(InvalidArgumentError, match="surrogate"):
        tok.encode("\ud800")


def test_vocabulary_without_room_for_the_bytes_is_refused(texts):
    with pytest.raises(InvalidArgumentError, match="vocab_size=100"):
        tokenizer(corpus(texts), vocab_size=100)


def test_file_that_is_no_tokenizer_of_ours_is_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match="no tokenizer"):
        Tokenizer.load(tmp_path / "nothing.json")
