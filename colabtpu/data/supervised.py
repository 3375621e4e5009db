"""Batches for fine-tuning: texts with labels, and conversations of which the answers are learned.

    train, valid = text_batches([("great film", 1), ("dull", 0), ...], tok, batch=32)
    train, valid = chat_batches([("2 + 2?", "4"), ...], tok, batch=8)
    print(train.lengths)

Inputs are a dict of `tokens`, `segment_ids` and `positions`, (batch, seq_len) int32, as best-fit
packing gives them: segment 0 is padding. Call `ct.connect()` first: this module imports Keras.
"""

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from colabtpu.data.batches import Batches, check_positive
from colabtpu.data.cache import TokenCache
from colabtpu.data.examples import Fetched
from colabtpu.data.lengths import Lengths, measure
from colabtpu.data.packing import BestFit
from colabtpu.data.storage import cache_dir, save_array
from colabtpu.data.vocabulary import Tokenizer
from colabtpu.errors import InvalidArgumentError

Segments = list[tuple[str, bool]]
"""A conversation as text to be tokenised in turn, each piece with whether it is learned."""

_AT_ONCE = 1000  # rows tokenised together


def text_batches(
    rows: Iterable[tuple[str, int | float]],
    tok: Tokenizer,
    batch: int = 32,
    *,
    max_len: int | None = None,
    validation: Iterable[tuple[str, int | float]] | None = None,
    validation_share: float = 0.1,
    seed: int = 0,
) -> tuple[Batches, Batches]:
    """Returns training and validation batches of single texts with labels.

    Args:
        rows: (text, label) pairs.
        tok: the tokenizer.
        batch: rows in a global batch.
        max_len: tokens in a row, the separator before the text included; longer texts lose
            their ends. The recommended length if absent: see `Batches.lengths`.
        validation: pairs to validate on; otherwise one row in every 1 / `validation_share`.
        validation_share: above 0 and at most 0.5.
        seed: chooses the order of the training rows.

    Returns:
        (train, valid). A batch is (inputs, labels), or (inputs, labels, weights) where fillers
        have weight 0; labels are (batch,) int32, or float32 if one of them is no whole number.

    Raises:
        InvalidArgumentError: a row is no pair of text and number, or there are no rows.
    """
    check_positive(batch=batch, max_len=max_len)
    others = None if validation is None else _texts(validation)
    store = _store(_texts(rows), others, tok, validation_share)
    lengths = _measure(store, max_len)
    return (
        Batches(_Texts(store, "train", lengths), batch, seed=seed),
        Batches(_Texts(store, "validation", lengths), batch, repeats=False),
    )


def chat_batches(
    conversations: Iterable[Any],
    tok: Tokenizer,
    batch: int = 8,
    *,
    max_len: int | None = None,
    template: Callable[[Any], Segments] | None = None,
    validation: Iterable[Any] | None = None,
    validation_share: float = 0.1,
    seed: int = 0,
) -> tuple[Batches, Batches]:
    """Returns training and validation batches of conversations, packed, prompts not learned.

    Args:
        conversations: (prompt, answer) pairs, lists of {"role", "content"} messages, or dicts
            with such a list under "messages".
        tok: the tokenizer.
        batch: rows in a global batch; several short conversations share a row, apart.
        max_len: tokens in a row; longer conversations lose their ends. The recommended length
            if absent: see `Batches.lengths`.
        template: turns one conversation into (text, learned) pieces; a separator follows each
            learned piece and is learned too. `plain_chat` if absent.
        validation: conversations to validate on; otherwise one in 1 / `validation_share`.
        validation_share: above 0 and at most 0.5.
        seed: chooses the order of the training rows.

    Returns:
        (train, valid). A batch is (inputs, labels, weights): labels (batch, max_len) int32 are
        the tokens one further on; weights float32 are 1 on answers and their ends alone.

    Raises:
        InvalidArgumentError: a conversation holds nothing to learn, or there are none.
    """
    check_positive(batch=batch, max_len=max_len)
    template = template or plain_chat
    others = None if validation is None else _chats(validation, template)
    store = _store(_chats(conversations, template), others, tok, validation_share)
    lengths = _measure(store, max_len)

    def packed(split: str) -> BestFit:
        examples = BestFit(store, split, lengths.seq_len, tok, whole=True)
        examples.lengths = lengths
        return examples

    return (
        Batches(packed("train"), batch, seed=seed),
        Batches(packed("validation"), batch, repeats=False),
    )


def plain_chat(conversation: Any) -> Segments:
    """Writes a conversation as "User: …" and "Assistant: …"; the assistant's words are learned."""
    if isinstance(conversation, dict):
        conversation = conversation["messages"]
    if len(conversation) == 2 and all(isinstance(part, str) for part in conversation):
        roles = ("user", "assistant")
        conversation = [
            {"role": role, "content": content}
            for role, content in zip(roles, conversation, strict=True)
        ]
    segments: Segments = []
    for message in conversation:
        learned = message["role"] == "assistant"
        segments.append((f"{message['role'].capitalize()}: ", False))
        segments.append((message["content"] if learned else f"{message['content']}\n\n", learned))
    return segments


class _Row(NamedTuple):
    """One example before it is tokenised."""

    segments: Segments
    label: float


class _Texts:
    """Single texts, one a row."""

    weighted = False

    def __init__(self, store: TokenCache, split: str, lengths: Lengths) -> None:
        self.lengths = lengths
        self.seq_len = lengths.seq_len
        self.path = store.path
        self._tokens = store.tokens(split)
        self._starts = store.document_starts(split)
        labels = np.load(store.path / f"{split}.labels.npy")
        self._labels = labels.astype(np.float32 if (labels % 1).any() else np.int32)
        self.identity = {
            "data": store.fingerprint,
            "split": split,
            "seq_len": self.seq_len,
            "packing": "one text a row",
            "rows": len(self),
        }

    def __len__(self) -> int:
        return len(self._labels)

    def fetch(self, numbers: np.ndarray) -> Fetched:
        names = ("tokens", "segment_ids", "positions")
        inputs = {name: np.zeros((len(numbers), self.seq_len), np.int32) for name in names}
        for row, number in enumerate(numbers.tolist()):
            # From the separator before the text to its last token.
            start, end = self._starts[number] - 1, self._starts[number + 1] - 1
            text = self._tokens[start : min(end, start + self.seq_len)]
            inputs["tokens"][row, : len(text)] = text
            inputs["segment_ids"][row, : len(text)] = 1
            inputs["positions"][row, : len(text)] = np.arange(len(text))
        return inputs, self._labels[numbers], None

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return int(np.minimum(np.diff(self._starts), self.seq_len).sum())

    @property
    def num_bytes(self) -> int:
        raise InvalidArgumentError(
            "Bits per byte measure language models; these batches have labels.",
            "Use lm_batches for a language model.",
        )

    @property
    def padding_share(self) -> float:
        """The share of positions that hold no token."""
        return 1 - self.num_tokens / (len(self) * self.seq_len)

    def labels(self) -> Iterator[np.ndarray]:
        yield self._labels


def _texts(rows: Iterable[Any]) -> Iterator[_Row]:
    for number, row in enumerate(rows):
        pair = tuple(row.values()) if isinstance(row, dict) else tuple(row)
        try:
            text, label = pair
            value = float(label)
        except (ValueError, TypeError) as error:
            raise InvalidArgumentError(
                f"Row {number} is no pair of a text and a number. Received: {row!r:.100}",
                "Pass pairs such as ('a fine film', 1); number classes from 0.",
            ) from error
        if not isinstance(text, str):
            raise InvalidArgumentError(
                f"The text of row {number} is no string. Received: {text!r:.100}",
                "Pass pairs such as ('a fine film', 1).",
            )
        yield _Row([(text, False)], value)


def _chats(conversations: Iterable[Any], template: Callable[[Any], Segments]) -> Iterator[_Row]:
    for number, conversation in enumerate(conversations):
        segments = template(conversation)
        if not any(text for text, learned in segments if learned):
            raise InvalidArgumentError(
                f"Conversation {number} holds no answer to learn. Received: {conversation!r:.100}",
                "Leave it out, or give it a message whose role is 'assistant'.",
            )
        yield _Row(segments, 0)


def _measure(store: TokenCache, max_len: int | None) -> Lengths:
    splits = [np.diff(store.document_starts(split)) for split in ("train", "validation")]
    return measure(np.concatenate(splits), max_len)


def _store(
    rows: Iterator[_Row], validation: Iterator[_Row] | None, tok: Tokenizer, share: float
) -> TokenCache:
    """Tokenises rows into a folder of the cache that is named by what it holds."""
    folder = cache_dir() / "rows"
    building = folder / f"{uuid.uuid4().hex}.partial"
    building.mkdir(parents=True)
    splits = {split: _Writer(building, split, tok) for split in ("train", "validation")}
    for number, row in enumerate(rows):
        own = validation is None and _drawn(number, share)
        splits["validation" if own else "train"].add(row)
    for row in validation or ():
        splits["validation"].add(row)
    counts = {split: writer.close() for split, writer in splits.items()}
    for split, count in counts.items():
        if not count:
            shutil.rmtree(building)
            raise InvalidArgumentError(
                f"The {split} split has no rows.", "Pass more rows, or `validation=` rows."
            )
    digest = hashlib.sha256(json.dumps([w.digest.hexdigest() for w in splits.values()]).encode())
    fingerprint = digest.hexdigest()[:16]
    path = folder / fingerprint
    try:
        building.rename(path)
    except OSError:  # the same rows are there already
        shutil.rmtree(building)
    return TokenCache(
        path=path,
        fingerprint=fingerprint,
        dtype=splits["train"].dtype,
        num_tokens={split: writer.num_tokens for split, writer in splits.items()},
        num_documents=counts,
        num_bytes={},
    )


def _drawn(number: int, share: float) -> bool:
    """Whether a row is for validation: one of every 1 / share rows, no regular one."""
    block, place = divmod(number, max(2, round(1 / share)))
    digest = hashlib.sha256(str(block).encode()).digest()
    return place == int.from_bytes(digest[:4], "big") % max(2, round(1 / share))


class _Writer:
    """Writes one split: tokens, which of them are learned, where rows start, and labels."""

    def __init__(self, folder: Any, split: str, tok: Tokenizer) -> None:
        self.dtype = "uint16" if tok.vocab_size <= 1 << 16 else "uint32"
        self.digest = hashlib.sha256(f"rows-1 {tok.fingerprint}".encode())
        self.num_tokens = 1
        self._tok, self._folder, self._split = tok, folder, split
        self._tokens = open(folder / f"{split}.tokens", "wb")  # noqa: SIM115
        self._mask = open(folder / f"{split}.mask", "wb")  # noqa: SIM115
        self._starts, self._labels = [1], []  # type: tuple[list[int], list[float]]
        self._waiting: list[_Row] = []
        self._write(np.array([tok.separator_id]), np.zeros(1))

    def add(self, row: _Row) -> None:
        self._waiting.append(row)
        if len(self._waiting) == _AT_ONCE:
            self._flush()

    def close(self) -> int:
        self._flush()
        self._tokens.close()
        self._mask.close()
        save_array(self._folder / f"{self._split}.starts.npy", np.array(self._starts))
        save_array(self._folder / f"{self._split}.labels.npy", np.array(self._labels))
        self.digest.update(np.array(self._labels).tobytes())
        return len(self._labels)

    def _flush(self) -> None:
        texts = [text for row in self._waiting for text, _ in row.segments]
        encoded = iter(self._tok.encode_batch(texts))
        for row in self._waiting:
            ids, learned = self._joined(row, list(islice(encoded, len(row.segments))))
            self._write(ids, learned)
            self.num_tokens += len(ids)
            self._starts.append(self.num_tokens)
            self._labels.append(row.label)
        self._waiting = []

    def _joined(self, row: _Row, encoded: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """A row's ids, with a separator after what is learned and at the end, and their mask."""
        ids: list[int] = []
        learned: list[int] = []
        for (_, learn), part in zip(row.segments, encoded, strict=True):
            ends = [self._tok.separator_id] if learn else []
            ids += [*part.tolist(), *ends]
            learned += [int(learn)] * (len(part) + len(ends))
        if not row.segments[-1][1]:
            ids.append(self._tok.separator_id)
            learned.append(0)
        return np.array(ids), np.array(learned)

    def _write(self, ids: np.ndarray, learned: np.ndarray) -> None:
        tokens, mask = ids.astype(self.dtype).tobytes(), learned.astype(np.uint8).tobytes()
        self._tokens.write(tokens)
        self._mask.write(mask)
        self.digest.update(tokens + mask)
