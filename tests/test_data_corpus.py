"""Where text comes from: the embedded default, the user's files, iterables; and how it splits."""

import json
import os
import pydoc
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from colabtpu.data import corpus
from colabtpu.data.python_text.python_text_dataset_builder import python_texts
from colabtpu.errors import ColabTPUError, InvalidArgumentError

ROOT = Path(__file__).parents[1]

# Runs the default path with every connection that leaves this machine refused.
OFFLINE = """
import sys
def refuse(event, arguments):
    if event in ("socket.connect", "socket.sendto"):
        host = arguments[1][0] if isinstance(arguments[1], tuple) else "127.0.0.1"
        if not str(host).startswith("127.") and host != "::1":
            raise SystemExit(f"went out to {arguments[1]}")
    if event == "socket.getaddrinfo" and arguments[0] not in (None, "localhost", "127.0.0.1"):
        raise SystemExit(f"looked up {arguments[0]}")
sys.addaudithook(refuse)
import colabtpu as ct
corpus = ct.data.corpus()
tok = ct.data.tokenizer(corpus)
cache = ct.data.token_cache(corpus, tok)
# A compiled framework could open sockets that Python does not see.
assert not {"tensorflow", "jax", "keras", "torch"} & set(sys.modules), "imports a framework"
print(tok.vocab_size, cache.num_tokens["train"], cache.num_bytes["train"])
"""


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COLABTPU_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLABTPU_CACHE", str(tmp_path_factory.mktemp("embedded")))
        return corpus("python")


def test_default_path_touches_no_network_and_no_framework(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE],
        cwd=ROOT,
        env={**os.environ, "COLABTPU_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    vocab_size, num_tokens, num_bytes = map(int, done.stdout.split()[-3:])
    assert vocab_size == 8192
    assert num_bytes > 5_000_000
    assert 2 < num_bytes / num_tokens < 6  # what BPE of this size reaches on English and code


def test_embedded_corpus_holds_pydoc_and_the_library(embedded):
    texts = [*embedded.documents("train"), *embedded.documents("validation")]
    pydoc_source = Path(pydoc.__file__).read_text(encoding="utf-8")
    assert pydoc_source in texts
    assert any("The truth value testing" in text or "Truth Value Testing" in text for text in texts)


def test_embedded_splits_share_no_text(embedded):
    train, validation = set(embedded.documents("train")), set(embedded.documents("validation"))
    assert len(validation) > 10
    assert not train & validation
    assert 0.01 < embedded.num_bytes("validation") / embedded.num_bytes("train") < 0.12


def test_embedded_texts_come_without_tests_and_repeats():
    names = [name for name, _ in python_texts()]
    texts = [text for _, text in python_texts()]
    assert len(set(texts)) == len(texts)
    assert not any(name.startswith(("test/", "site-packages/", "idlelib/")) for name in names)
    assert (Path(sysconfig.get_path("stdlib")) / names[-1]).exists()


def test_order_and_fingerprint_are_the_same_each_time(embedded, monkeypatch, tmp_path):
    monkeypatch.setenv("COLABTPU_CACHE", str(tmp_path / "another"))
    again = corpus("python")
    assert again.fingerprint == embedded.fingerprint
    assert list(again.documents("validation")) == list(embedded.documents("validation"))


def test_folder_of_files_splits_by_file(tmp_path):
    texts = {f"{i:03}.txt": f"text number {i}\n" * 9 for i in range(100)}
    for name, text in texts.items():
        (tmp_path / "notes" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "notes" / name).write_text(text)
    (tmp_path / "notes" / "picture.png").write_bytes(b"\x89PNG")
    notes = corpus(tmp_path / "notes", validation_share=0.2)
    train, validation = list(notes.documents("train")), list(notes.documents("validation"))
    assert sorted(train + validation) == sorted(texts.values())
    assert len(validation) == 20
    (tmp_path / "notes").rename(tmp_path / "moved")
    moved = corpus(tmp_path / "moved", validation_share=0.2)
    assert moved.fingerprint == notes.fingerprint
    assert list(moved.documents("validation")) == validation
    assert moved.num_bytes("train") == sum(map(len, train))


def test_jsonl_parquet_and_bad_bytes_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"id": str(i), "story": f"story {i}"} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "latin.txt").write_bytes("déjà vu".encode("latin-1"))
    for file in ("rows.jsonl", "rows.parquet"):
        stories = corpus(tmp_path / file, text_feature="story")
        both = [*stories.documents("train"), *stories.documents("validation")]
        assert sorted(both) == sorted(row["story"] for row in rows)
    broken = corpus(tmp_path / "latin.txt", validation=["another text"])
    assert list(broken.documents("train")) == ["d\ufffdj\ufffd vu"]


def test_field_that_does_not_exist_is_named_with_those_that_do(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"title": "a", "body": "b"}\n')
    with pytest.raises(InvalidArgumentError, match=r"\['body', 'title'\]"):
        corpus(tmp_path / "rows.jsonl")


def test_few_documents_give_their_ends_to_validation():
    lines = [f"line {i}\n" for i in range(100)]
    book = corpus(["".join(lines)], validation_share=0.1)
    (train,), (validation,) = book.documents("train"), book.documents("validation")
    assert train + validation == "".join(lines)
    assert validation.startswith("line 9")


def test_generator_of_strings_can_be_read_twice():
    stories = corpus(f"story {i}" for i in range(50))
    assert list(stories.documents("train")) == list(stories.documents("train"))
    assert len([*stories.documents("train"), *stories.documents("validation")]) == 50


def test_fingerprint_follows_the_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one two three " * 50)
    before = corpus(path).fingerprint
    assert corpus(path).fingerprint == before
    path.write_text("one two threw " * 50)
    assert corpus(path).fingerprint != before


def test_validation_of_its_own_is_used_whole():
    both = corpus(["train text"] * 30, validation=["valid text"])
    assert list(both.documents("validation")) == ["valid text"]
    assert len(list(both.documents("train"))) == 30


def test_unknown_data_set_says_why_and_what_to_use_instead():
    with pytest.raises(ColabTPUError, match="cannot be had") as caught:
        corpus("no_such_data_set_anywhere")
    assert 'corpus("python")' in caught.value.fix


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (3, "Received: int"),
        ([3, 4], "Item 0 is no string"),
        ("missing/folder/file.txt", "no file or folder"),
        ([], "holds no text"),
    ],
)
def test_what_is_no_text_is_refused(source, message):
    with pytest.raises(InvalidArgumentError, match=message):
        corpus(source)
