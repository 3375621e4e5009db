"""A corpus as token ids on disk: tokenised once, memory-mapped ever after.

    cache = token_cache(corpus, tok)
    cache.tokens("train")           # np.memmap, (tokens,) uint16 or uint32

One folder per corpus, tokenizer and format version, under $COLABTPU_CACHE or
~/.cache/colabtpu. Each split is one stream: a separator, then every document followed by a
separator. Text is tokenised in shards of 4 MiB on all cores; a build that was interrupted
goes on after the last whole shard, and the folder appears under its name only when complete.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from colabtpu.data.corpora import SPLITS, Corpus
from colabtpu.data.storage import cache_dir, write_atomically

if TYPE_CHECKING:
    from colabtpu.data.vocabulary import Tokenizer

FORMAT_VERSION = 1
SHARD_BYTES = 4 << 20


@dataclass(frozen=True)
class TokenCache:
    """The token streams of one corpus.

    Attributes:
        path: the folder that holds them.
        fingerprint: names the corpus, the tokenizer and the format together.
        num_tokens: tokens in each split, separators included.
        num_documents: documents in each split.
        num_bytes: bytes of UTF-8 text in each split.
    """

    path: Path
    fingerprint: str
    dtype: str
    num_tokens: dict[str, int]
    num_documents: dict[str, int]
    num_bytes: dict[str, int]

    def tokens(self, split: str) -> np.ndarray:
        """Returns the stream of a split, (tokens,), memory-mapped and read-only."""
        return np.memmap(self.path / f"{split}.tokens", self.dtype, "r")

    def mask(self, split: str) -> np.ndarray | None:
        """Returns which tokens are learned, (tokens,) uint8, or None where all are."""
        path = self.path / f"{split}.mask"
        return np.memmap(path, "uint8", "r") if path.exists() else None

    def document_starts(self, split: str) -> np.ndarray:
        """Returns where each document's first token stands, (documents + 1,) int64.

        Document i is `tokens[starts[i] : starts[i + 1] - 1]`, its separator follows.
        """
        return np.load(self.path / f"{split}.starts.npy", mmap_mode="r")


def token_cache(corpus: Corpus, tok: "Tokenizer", progress: bool = True) -> TokenCache:
    """Tokenises a corpus into the on-disk cache, or finds it there.

    Args:
        corpus: what `colabtpu.data.corpus` returned.
        tok: the tokenizer.
        progress: whether to show a progress bar.

    Returns:
        The cache, with both splits complete.
    """
    key = f"{FORMAT_VERSION} {corpus.fingerprint} {tok.fingerprint}"
    fingerprint = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = cache_dir() / "tokens" / fingerprint
    if not (path / "cache.json").exists():
        _build(path, fingerprint, corpus, tok, progress)
    about = json.loads((path / "cache.json").read_text())
    return TokenCache(path=path, **about)


def _build(path: Path, fingerprint: str, corpus: Corpus, tok: "Tokenizer", progress: bool) -> None:
    building = path.with_name(f"{fingerprint}.building")
    building.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {"fingerprint": fingerprint, "dtype": _dtype(tok)}
    for split in SPLITS:
        with _bar(f"tokenising {corpus.name}, {split}", progress) as advance:
            for shard, texts in enumerate(_shards(corpus, split)):
                file = building / f"{split}-{shard:05d}.npz"
                advance(_tokenise(file, texts, tok))
    # Assembled under a name of its own: two builders may reach this point at once.
    whole = path.with_name(f"{fingerprint}.{uuid.uuid4().hex[:8]}.partial")
    whole.mkdir()
    for split in SPLITS:
        for name, count in _assemble(building, whole, split, about["dtype"], tok).items():
            about.setdefault(name, {})[split] = count
    write_atomically(whole / "cache.json", json.dumps(about).encode())
    try:
        os.rename(whole, path)
    except OSError:  # another process finished first; its folder holds the same
        shutil.rmtree(whole)
    shutil.rmtree(building, ignore_errors=True)


def _dtype(tok: "Tokenizer") -> str:
    return "uint16" if tok.vocab_size <= 1 << 16 else "uint32"


def _shards(corpus: Corpus, split: str) -> Iterator[list[str]]:
    texts: list[str] = []
    size = 0
    for text in corpus.documents(split):
        texts.append(text)
        size += len(text)
        if size >= SHARD_BYTES:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


def _tokenise(file: Path, texts: list[str], tok: "Tokenizer") -> int:
    """Writes one shard unless it is there; returns how many characters it covers."""
    if not _whole(file):
        ids = tok.encode_batch(texts)
        temporary = file.with_name(f"{file.name}.{uuid.uuid4().hex[:8]}.partial")
        with open(temporary, "wb") as out:
            np.savez(
                out,
                tokens=np.concatenate(ids).astype(_dtype(tok)),
                lengths=np.array([len(each) for each in ids], np.int64),
                num_bytes=sum(len(text.encode()) for text in texts),
            )
        os.replace(temporary, file)
    return sum(map(len, texts))


def _whole(file: Path) -> bool:
    try:
        with np.load(file) as shard:
            return len(shard["tokens"]) == shard["lengths"].sum()
    except (OSError, ValueError, KeyError, BadZipFile):
        return False


def _assemble(
    building: Path, whole: Path, split: str, dtype: str, tok: "Tokenizer"
) -> dict[str, int]:
    """Joins a split's shards into one stream and returns its counts."""
    separator = np.array([tok.separator_id], dtype)
    lengths: list[np.ndarray] = []
    num_bytes = 0
    with open(whole / f"{split}.tokens", "wb") as stream:
        stream.write(separator.tobytes())
        for file in sorted(building.glob(f"{split}-*.npz")):
            with np.load(file) as shard:
                ends = np.cumsum(shard["lengths"])
                stream.write(np.insert(shard["tokens"], ends, separator).tobytes())
                lengths.append(shard["lengths"])
                num_bytes += int(shard["num_bytes"])
        stream.flush()
        os.fsync(stream.fileno())
    every = np.concatenate([np.zeros(0, np.int64), *lengths])
    starts = np.concatenate([[1], 1 + np.cumsum(every + 1)])
    np.save(whole / f"{split}.starts.npy", starts)
    return {
        "num_tokens": int(starts[-1]),
        "num_documents": len(every),
        "num_bytes": num_bytes,
    }


class _bar:
    """A rich progress bar of characters read, or nothing."""

    def __init__(self, title: str, shown: bool) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[read]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, disable=not shown)
        self._task = self._progress.add_task(title, total=None, read="")
        self._read = 0

    def __enter__(self) -> Any:
        self._progress.start()
        return self._advance

    def __exit__(self, *_: object) -> None:
        self._progress.update(self._task, total=1, completed=1)
        self._progress.stop()

    def _advance(self, characters: int) -> None:
        self._read += characters
        self._progress.update(self._task, read=f"{self._read / 1e6:,.1f} M characters")
