"""The token cache: every document once, whole or absent, built on after an interruption."""

import numpy as np
import pytest

from colabtpu.data import cache as cache_module
from colabtpu.data import cache_dir, corpus, token_cache, tokenizer


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COLABTPU_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text():
    return corpus([f"document {i}: " + "some words " * (i % 7) for i in range(200)])


@pytest.fixture
def tok(text):
    return tokenizer(text, vocab_size=270)


def test_stream_is_every_document_between_separators(text, tok):
    cache = token_cache(text, tok, progress=False)
    for split in ("train", "validation"):
        expected = [tok.separator_id]
        for document in text.documents(split):
            expected += [*tok.encode(document).tolist(), tok.separator_id]
        np.testing.assert_array_equal(cache.tokens(split), expected)
        assert cache.num_tokens[split] == len(expected)
        assert cache.num_bytes[split] == text.num_bytes(split)


def test_document_starts_find_each_document(text, tok):
    cache = token_cache(text, tok, progress=False)
    tokens, starts = cache.tokens("train"), cache.document_starts("train")
    documents = list(text.documents("train"))
    assert len(starts) == len(documents) + 1 == cache.num_documents["train"] + 1
    for i in (0, 17, len(documents) - 1):
        assert tok.decode(tokens[starts[i] : starts[i + 1] - 1]) == documents[i]


def test_second_call_reads_what_the_first_wrote(text, tok, monkeypatch):
    first = token_cache(text, tok, progress=False)
    monkeypatch.setattr(cache_module, "_build", None)  # would fail if it were called
    assert token_cache(text, tok, progress=False) == first


def test_other_tokenizer_gets_another_cache(text, tok):
    other = tokenizer(text, vocab_size=280)
    assert token_cache(text, tok, False).path != token_cache(text, other, False).path


def test_interrupted_build_goes_on_after_the_last_whole_shard(text, tok, monkeypatch):
    monkeypatch.setattr(cache_module, "SHARD_BYTES", 2000)
    whole = token_cache(text, tok, progress=False)
    expected = np.array(whole.tokens("train"))
    tokenised = []
    encode = tok.encode_batch

    def interrupted(texts):
        if len(tokenised) == 3:
            raise KeyboardInterrupt
        tokenised.append(len(texts))
        return encode(texts)

    monkeypatch.setenv("COLABTPU_CACHE", str(cache_dir() / "second"))
    monkeypatch.setattr(tok, "encode_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        token_cache(text, tok, progress=False)
    assert not list(cache_dir().rglob("cache.json"))
    torn = max(cache_dir().rglob("train-*.npz"))
    torn.write_bytes(torn.read_bytes()[:-100])

    again = []
    monkeypatch.setattr(tok, "encode_batch", lambda texts: again.append(texts) or encode(texts))
    finished = token_cache(text, tok, progress=False)
    np.testing.assert_array_equal(finished.tokens("train"), expected)
    every = [text.documents("train"), text.documents("validation")]
    total = sum(len(list(documents)) for documents in every)
    assert sum(map(len, again)) == total - sum(tokenised[:2])  # the torn shard was made anew
    assert not list(cache_dir().rglob("*.building"))
