"""Text to learn from, whatever it comes from, as documents in two splits.

    corpus("python")                          # needs no network: text that Python brings along
    corpus("imdb_reviews")                    # any TFDS data set with text
    corpus("notes/"), corpus("books.jsonl")   # your own files: txt, md, py, jsonl, parquet
    corpus(load_dataset("roneneldan/TinyStories"))   # a Hugging Face data set
    corpus(["one text", "another text"])      # any iterable of strings

Nothing here imports TensorFlow, JAX or Keras; of TFDS only what reads ArrayRecord files.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from colabtpu.errors import InvalidArgumentError

SPLITS = ("train", "validation")
FEW_DOCUMENTS = 20  # below this a split by document would be a lottery
MANY_DOCUMENTS = 1000  # from here on a hash alone gives about the right share

Documents = Callable[[], Iterator[tuple[str, str]]]
"""Gives (key, text) of every document, in the same order each time it is called."""


@dataclass(frozen=True)
class Corpus:
    """Documents in a training and a validation split.

    Attributes:
        name: what it is, for people.
        fingerprint: changes when the text does; caches and checkpoints compare it.
    """

    name: str
    fingerprint: str
    _splits: dict[str, Documents] = field(repr=False)

    def documents(self, split: str) -> Iterator[str]:
        """Yields the texts of "train" or "validation", in the same order each time."""
        if split not in self._splits:
            raise InvalidArgumentError(
                f"`split` must be one of {SPLITS}. Received: split={split!r}",
                'Pass "train" or "validation".',
            )
        return (text for _, text in self._splits[split]())

    def num_bytes(self, split: str) -> int:
        """Returns the bytes of UTF-8 text in a split; reads it once through."""
        return sum(len(text.encode()) for text in self.documents(split))


def corpus(
    source: Any = "python",
    *,
    text_feature: str | None = None,
    validation: Any = None,
    validation_share: float = 0.05,
    data_dir: str | Path | None = None,
) -> Corpus:
    """Returns text to train on: the embedded default, a TFDS name, or your own.

    A source that has its own validation (or else test) split keeps it. Any other is split by
    a hash of each document's name or number, so that the split never changes; one of fewer
    than 20 documents gives the end of every document instead.

    Args:
        source: "python"; the name of a TFDS data set; a path to a file or folder, or a list
            of paths (txt, md, rst, py, jsonl, parquet); a Hugging Face `Dataset` or
            `DatasetDict`; or any iterable of strings.
        text_feature: the column or field that holds the text, where there are several.
        validation: a second source to validate on, of the same kinds.
        validation_share: of the documents, between 0 and 0.5, when the source has no split.
        data_dir: where TFDS keeps data sets; its own default if absent.

    Returns:
        The corpus. A folder's files are read when they are needed.

    Raises:
        InvalidArgumentError: the source is nothing of the above, or holds no text.
        ColabTPUError: the data set cannot be reached; says why and what to use instead.
    """
    if not 0 < validation_share <= 0.5:
        raise InvalidArgumentError(
            f"`validation_share` must lie above 0 and be at most 0.5. "
            f"Received: validation_share={validation_share}",
            "Pass for instance 0.05.",
        )
    name, fingerprint, splits = _open(source, text_feature, data_dir)
    if validation is not None:
        other_name, other_fingerprint, other = _open(validation, text_feature, data_dir)
        merged = [splits[key] for key in sorted(splits)]
        splits = {"train": _chain(merged), "validation": _chain([other[k] for k in sorted(other)])}
        name = f"{name} / {other_name}"
        fingerprint = _digest(fingerprint, other_fingerprint)
    elif "validation" not in splits:
        splits = split_documents(splits["train"], validation_share)
        fingerprint = _digest(fingerprint, f"{validation_share}")
    _refuse_empty(name, splits)
    return Corpus(name, fingerprint, splits)


def split_documents(documents: Documents, share: float) -> dict[str, Documents]:
    """Splits documents by a hash of their keys, or each in two when there are few of them."""
    keys = [key for key, _ in islice(documents(), MANY_DOCUMENTS)]
    if len(keys) < FEW_DOCUMENTS:
        return {
            "train": lambda: _parts(documents, share, tail=False),
            "validation": lambda: _parts(documents, share, tail=True),
        }
    limit = int(share * 2**64)
    if len(keys) < MANY_DOCUMENTS:  # take that share exactly, which chance alone might not
        limit = sorted(map(_hash, keys))[max(1, round(share * len(keys)))]
    return {
        "train": lambda: (d for d in documents() if _hash(d[0]) >= limit),
        "validation": lambda: (d for d in documents() if _hash(d[0]) < limit),
    }


def _open(
    source: Any, text_feature: str | None, data_dir: str | Path | None
) -> tuple[str, str, dict[str, Documents]]:
    """Returns (name, fingerprint, splits), "train" alone where the source has no other."""
    from colabtpu.data import sources, tfds_source

    if isinstance(source, Corpus):
        return source.name, source.fingerprint, source._splits
    if source == "python":
        return tfds_source.python_text()
    if isinstance(source, Path) or (isinstance(source, str) and os.path.exists(source)):
        return sources.files([source], text_feature)
    if isinstance(source, str):
        if "://" in source or Path(source).suffix in sources.SUFFIXES or "\\" in source:
            raise InvalidArgumentError(
                f"There is no file or folder {source!r}.",
                f"Check the path; it is looked up from {Path.cwd()}.",
            )
        return tfds_source.data_set(source, text_feature, data_dir)
    if hasattr(source, "column_names"):
        return sources.hugging_face(source, text_feature)
    if isinstance(source, (list, tuple)) and _all_paths(source):
        return sources.files(list(source), text_feature)
    if isinstance(source, Iterable):
        return sources.strings(source)
    raise InvalidArgumentError(
        "`source` must be a data set's name, a path, a Hugging Face data set or an iterable "
        f"of strings. Received: {type(source).__name__}",
        'Pass "python" for the embedded text.',
    )


def _all_paths(source: list[Any] | tuple[Any, ...]) -> bool:
    return bool(source) and all(
        isinstance(each, Path)
        or (
            (isinstance(each, str) and len(each) < 1024 and "\n" not in each)
            and os.path.exists(each)
        )
        for each in source
    )


def _refuse_empty(name: str, splits: dict[str, Documents]) -> None:
    for split in SPLITS:
        if not any(text for _, text in splits[split]()):
            raise InvalidArgumentError(
                f"The {split} split of {name!r} holds no text.",
                "Pass more text, or a `validation=` source of its own.",
            )


def _chain(parts: list[Documents]) -> Documents:
    return lambda: (document for part in parts for document in part())


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _hash(key: str) -> int:
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big")


def _parts(documents: Documents, share: float, tail: bool) -> Iterator[tuple[str, str]]:
    for key, text in documents():
        cut = _cut(text, share)
        part = text[cut:] if tail else text[:cut]
        if part:
            yield key, part


def _cut(text: str, share: float) -> int:
    """Where the validation part of a text begins: at a line's start if one is near."""
    cut = int(len(text) * (1 - share))
    line = text.rfind("\n", 0, cut) + 1
    return line if cut - line < 0.1 * len(text) and line else cut
