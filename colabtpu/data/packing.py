"""Best-fit packing: documents side by side in rows, none of which sees its neighbours.

    examples = BestFit(cache, "train", seq_len=512, tok=tok)
    x, y, weights = examples.fetch(np.arange(64))
    x["tokens"], x["segment_ids"], x["positions"]        # (64, 512) int32 each

Documents longer than a row give whole rows first; what remains of each goes to the fullest
row that still has room, the longest first (best-fit decreasing; Ding et al. 2024, "Fewer
Truncations Improve Language Modeling", arXiv:2404.10830). Attention within a row must keep to
equal `segment_ids`, 1, 2, 3, … and 0 for padding; `positions` begin at 0 in each segment.

Grain's packing (first-fit over a stream) needs what this room avoids: it fills bins as data
flows, so a batch is no function of its step. Here the rows are planned once, on disk.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from colabtpu.data.cache import TokenCache
from colabtpu.data.examples import Fetched, token_pieces
from colabtpu.data.lengths import Lengths
from colabtpu.data.storage import save_array
from colabtpu.data.vocabulary import Tokenizer

PLAN_VERSION = 1


class BestFit:
    """A split's documents packed into rows of `seq_len`; every token is a label exactly once.

    Args:
        cache: the token streams.
        split: "train" or "validation".
        seq_len: tokens in a row.
        tok: the tokenizer.
        limit: rows to use at most, from the first on.
        whole: whether a document longer than a row is cut off there, not continued in others.
    """

    def __init__(
        self,
        cache: TokenCache,
        split: str,
        seq_len: int,
        tok: Tokenizer,
        limit: int | None = None,
        whole: bool = False,
    ) -> None:
        self.seq_len = seq_len
        self.path = cache.path
        self.lengths: Lengths | None = None
        self._tokens = cache.tokens(split)
        self._mask = cache.mask(split)
        self._byte_lengths = tok.byte_lengths
        kind = "whole" if whole else "cut"
        plan = cache.path / f"{split}.best_fit-{PLAN_VERSION}-{kind}-{seq_len}"
        if not _complete(plan):
            # A document's inputs are the separator before it and all its tokens; its labels
            # the same one further on, its own separator the last.
            _write_plan(plan, np.diff(cache.document_starts(split)), seq_len, whole)
        self._offsets = np.load(f"{plan}.offsets.npy", mmap_mode="r")
        self._lengths = np.load(f"{plan}.lengths.npy", mmap_mode="r")
        self._rows = np.load(f"{plan}.rows.npy", mmap_mode="r")
        if limit is not None:
            self._rows = self._rows[: limit + 1]
        self.identity = {
            "data": cache.fingerprint,
            "split": split,
            "seq_len": seq_len,
            "packing": f"best_fit, {kind}",
            "rows": len(self),
        }
        self.weighted = self._mask is not None or self.padding_share > 0

    def __len__(self) -> int:
        return len(self._rows) - 1

    def fetch(self, numbers: np.ndarray) -> Fetched:
        """Returns packed rows: three (rows, seq) int32 inputs, labels, and 0/1 weights."""
        offsets, lengths, row_of, segment = self._pieces(numbers)
        shape = (len(numbers), self.seq_len)
        # Where each token comes from, and where it goes: a piece's start, then one by one.
        along = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        source = np.repeat(offsets, lengths) + along
        place = np.repeat(_starts_in_rows(lengths, row_of, self.seq_len), lengths) + along

        def laid_out(values: np.ndarray) -> np.ndarray:
            flat = np.zeros(shape[0] * shape[1], np.int32)
            flat[place] = values
            return flat.reshape(shape)

        inputs = {
            "tokens": laid_out(self._tokens[source]),
            "segment_ids": laid_out(np.repeat(segment, lengths)),
            "positions": laid_out(along),
        }
        labels = laid_out(self._tokens[source + 1])
        counts = np.ones(len(source)) if self._mask is None else self._mask[source + 1]
        return inputs, labels, laid_out(counts).astype(np.float32)

    @cached_property
    def num_tokens(self) -> int:
        """Labels that count."""
        if self._mask is None:
            return self._num_packed
        return sum(map(len, self.labels()))

    @cached_property
    def _num_packed(self) -> int:
        return int(self._lengths[: self._rows[-1]].sum(dtype=np.int64))

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the text that the labels stand for."""
        return sum(int(self._byte_lengths[part].sum(dtype=np.int64)) for part in self.labels())

    @property
    def padding_share(self) -> float:
        """The share of positions that hold no token."""
        return 1 - self._num_packed / max(1, len(self) * self.seq_len)

    def labels(self) -> Iterator[np.ndarray]:
        """Yields every label that counts once, in the stream's order, in pieces."""
        offsets = np.array(self._offsets[: self._rows[-1]])
        lengths = np.array(self._lengths[: self._rows[-1]])
        order = np.argsort(offsets, kind="stable")
        return token_pieces(self._tokens, self._mask, offsets[order] + 1, lengths[order])

    def _pieces(self, numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        """Offset, length, row within the batch and segment id of the pieces of some rows."""
        first, end = self._rows[numbers], self._rows[numbers + 1]
        counts = end - first
        segment = 1 + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        piece = np.repeat(first, counts) + segment - 1
        row_of = np.repeat(np.arange(len(numbers)), counts)
        return self._offsets[piece], self._lengths[piece].astype(np.int64), row_of, segment


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Packs items into bins by best-fit decreasing.

    The items of one length meet only bins that are alike in what they have left, so they are
    placed together: the work grows with the number of different lengths, not of items.

    Args:
        lengths: of the items, (items,) whole numbers in 1 … capacity.
        capacity: of a bin.

    Returns:
        The bin of each item, (items,) int64, numbered from 0 without gaps.
    """
    order = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    bin_of = np.empty(len(lengths), np.int64)
    room: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]  # room left -> bins
    taken = opened = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        items = order[taken : taken + count]
        taken += count
        placed = 0
        for left in range(length, capacity + 1):
            if placed == count:
                break
            if room[left]:
                bins = np.concatenate(room[left])
                room[left] = []
                placed += _fill(bins, left, length, items[placed:], bin_of, room)
        if placed < count:
            needed = -(-(count - placed) // (capacity // length))
            bins = np.arange(opened, opened + needed)
            opened += needed
            _fill(bins, capacity, length, items[placed:], bin_of, room)
    return bin_of


def _fill(
    bins: np.ndarray,
    left: int,
    length: int,
    items: np.ndarray,
    bin_of: np.ndarray,
    room: list[list[np.ndarray]],
) -> int:
    """Fills bins that are alike one after the other; returns how many items they took."""
    each = left // length
    taken = min(len(items), each * len(bins))
    bin_of[items[:taken]] = np.repeat(bins, each)[:taken]
    full, rest = divmod(taken, each)
    groups = ((bins[:full], each), (bins[full : full + 1], rest), (bins[full + 1 :], 0))
    for group, used in groups:
        if len(group):
            room[left - used * length].append(group)
    return taken


def _write_plan(plan: Path, lengths: np.ndarray, seq_len: int, whole: bool) -> None:
    """Plans the rows of a split whose documents follow each other, and writes the plan."""
    pieces_in = np.ones_like(lengths) if whole else -(-lengths // seq_len)
    document = np.repeat(np.arange(len(lengths)), pieces_in)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(pieces_in) - pieces_in, pieces_in)
    offsets = np.repeat(np.cumsum(lengths) - lengths, pieces_in) + nth * seq_len
    cut = np.minimum(seq_len, lengths[document] - nth * seq_len)
    bins = best_fit(cut, seq_len)
    # Rows in the order of their first piece, pieces in the order of the text.
    firsts = np.full(bins.max(initial=-1) + 1, np.iinfo(np.int64).max)
    np.minimum.at(firsts, bins, offsets)
    rank = np.empty_like(firsts)
    rank[np.argsort(firsts)] = np.arange(len(firsts))
    order = np.lexsort((offsets, rank[bins]))
    row_counts = np.bincount(rank[bins], minlength=len(firsts))
    save_array(Path(f"{plan}.offsets.npy"), offsets[order])
    save_array(Path(f"{plan}.lengths.npy"), cut[order].astype(np.int32))
    save_array(Path(f"{plan}.rows.npy"), np.concatenate([[0], np.cumsum(row_counts)]))


def _complete(plan: Path) -> bool:
    return all(Path(f"{plan}.{part}.npy").exists() for part in ("offsets", "lengths", "rows"))


def _starts_in_rows(lengths: np.ndarray, row_of: np.ndarray, seq_len: int) -> np.ndarray:
    """Where each piece begins in the flattened rows: after those before it in its row."""
    before = np.cumsum(lengths) - lengths
    first_of_row = np.concatenate([[True], row_of[1:] != row_of[:-1]]) if len(row_of) else row_of
    row_start = np.maximum.accumulate(np.where(first_of_row, before, 0))
    return row_of * seq_len + before - row_start
