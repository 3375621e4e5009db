"""Examples by number: plain numpy, no ML framework, nothing held in memory.

    examples = Continuous(cache, "train", seq_len=512, tok=tok)
    x, y, weights = examples.fetch(np.array([7, 3]))       # (2, 512) int32 each

An example is made when it is asked for, from the memory-mapped token stream. `Batches`
decides which numbers come when.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from colabtpu.data.cache import TokenCache
from colabtpu.data.vocabulary import Tokenizer

CHUNK = 1 << 22  # tokens read at once when a whole split is gone through

Fetched = tuple[Any, np.ndarray, np.ndarray | None]
"""Inputs, labels (rows, seq) int32, and loss weights (rows, seq) float32 or None for all one."""


@dataclass(frozen=True)
class ArraySpec:
    """The shape and dtype of one array of a batch."""

    shape: tuple[int, ...]
    dtype: str


class Examples(Protocol):
    """What `Batches` needs to know about a set of examples."""

    seq_len: int
    path: Path
    """The folder of the cache that is read while training."""
    identity: dict[str, Any]
    """What a resumed run compares: the data's fingerprint and the way it is cut."""
    weighted: bool
    """Whether some weights may be 0."""

    def __len__(self) -> int: ...
    def fetch(self, numbers: np.ndarray) -> Fetched: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def padding_share(self) -> float: ...
    def labels(self) -> Iterator[np.ndarray]: ...


class Continuous:
    """A split's stream cut into rows: no padding, documents run on across rows.

    Row i holds tokens i * seq_len to (i + 1) * seq_len, its labels are the same one token on,
    so that every token but the stream's first is a label exactly once.

    Args:
        cache: the token streams.
        split: "train" or "validation".
        seq_len: tokens in a row.
        tok: the tokenizer; its byte lengths turn losses into bits per byte.
        keep_rest: whether a last row, shorter than the others, is kept and padded with
            weight 0. Without it up to `seq_len` - 1 tokens at the end are left out.
        limit: rows to use at most, from the start.
    """

    def __init__(
        self,
        cache: TokenCache,
        split: str,
        seq_len: int,
        tok: Tokenizer,
        keep_rest: bool = False,
        limit: int | None = None,
    ) -> None:
        self.seq_len = seq_len
        self.path = cache.path
        self._tokens = cache.tokens(split)
        self._byte_lengths = tok.byte_lengths
        num_labels = len(self._tokens) - 1
        self._whole = num_labels // seq_len
        rows = -(-num_labels // seq_len) if keep_rest else self._whole
        self._rows = rows if limit is None else min(rows, limit)
        self._num_labels = min(num_labels, self._rows * seq_len)
        self.identity = {
            "data": cache.fingerprint,
            "split": split,
            "seq_len": seq_len,
            "packing": "continuous",
            "rows": self._rows,
        }
        self.weighted = self._rows > self._whole

    def __len__(self) -> int:
        return self._rows

    def fetch(self, numbers: np.ndarray) -> Fetched:
        """Returns inputs and labels of some rows, (rows, seq) int32, and their weights."""
        width = self.seq_len + 1
        windows = np.lib.stride_tricks.as_strided(
            self._tokens,
            (self._whole, width),
            (self.seq_len * self._tokens.itemsize, self._tokens.itemsize),
            writeable=False,
        )
        short = numbers >= self._whole
        rows = np.zeros((len(numbers), width), np.int32)
        rows[~short] = windows[numbers[~short]]
        weights = None
        if short.any():
            rest = self._tokens[self._whole * self.seq_len :]
            rows[short, : len(rest)] = rest
            weights = np.ones((len(numbers), self.seq_len), np.float32)
            weights[short, len(rest) - 1 :] = 0
        return rows[:, :-1], rows[:, 1:], weights

    @property
    def num_tokens(self) -> int:
        """Labels that count."""
        return self._num_labels

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the text that the labels stand for."""
        return sum(int(self._byte_lengths[part].sum(dtype=np.int64)) for part in self.labels())

    @property
    def padding_share(self) -> float:
        """The share of positions with weight 0."""
        return 1 - self._num_labels / (self._rows * self.seq_len)

    def labels(self) -> Iterator[np.ndarray]:
        """Yields every label that counts once, in the stream's order, in pieces."""
        for start in range(1, self._num_labels + 1, CHUNK):
            yield self._tokens[start : min(start + CHUNK, self._num_labels + 1)]


def token_pieces(
    tokens: np.ndarray, mask: np.ndarray | None, offsets: np.ndarray, lengths: np.ndarray
) -> Iterator[np.ndarray]:
    """Yields stretches of a stream, without what is masked, joined to a few megabytes each."""
    held: list[np.ndarray] = []
    size = 0
    for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        part = tokens[offset : offset + length]
        held.append(part if mask is None else part[mask[offset : offset + length] > 0])
        size += length
        if size >= CHUNK:
            yield np.concatenate(held)
            held, size = [], 0
    if held:
        yield np.concatenate(held)
