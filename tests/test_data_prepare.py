"""`python -m colabtpu data prepare`: what it makes is what a training run then finds."""

import argparse
import json

import pytest

from colabtpu.data import cache, corpus, prepare, token_cache, tokenizer


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setenv("COLABTPU_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for i in range(30):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"text number {i} " * 20)
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    words = ["prepare", str(tmp_path / "texts"), "--vocab-size", "280"]
    return tmp_path / "texts", lambda *more: parser.parse_args([*words, *more])


def test_training_finds_what_was_prepared(options, capsys, monkeypatch):
    texts, parse = options
    assert prepare.run(parse("--json")) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["num_documents"] == {"train": 28, "validation": 2}
    monkeypatch.setattr(cache, "_build", None)  # would fail if anything were tokenised again
    text = corpus(texts)
    found = token_cache(text, tokenizer(text, vocab_size=280), progress=False)
    assert str(found.path) == about["tokens"]
    assert found.num_tokens == about["num_tokens"]


def test_result_says_how_to_train_on_it(options, capsys, tmp_path):
    _, parse = options
    assert prepare.run(parse("--cache", str(tmp_path / "drive"))) == 0
    printed = capsys.readouterr().out
    assert "train: 28 documents" in printed
    assert f"COLABTPU_CACHE={tmp_path / 'drive'}" in printed
