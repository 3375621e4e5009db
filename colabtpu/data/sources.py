"""The user's own text: files and folders, Hugging Face data sets, iterables of strings.

    name, fingerprint, splits = files(["notes/"], text_feature=None)

Files stream: a text file is one document, a line of jsonl or a row of parquet another each.
"""

import hashlib
import json
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from colabtpu.data.corpora import Documents
from colabtpu.data.storage import cache_dir
from colabtpu.errors import ColabTPUError, InvalidArgumentError

Opened = tuple[str, str, dict[str, Documents]]

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".parquet")
_PIECE = 256 << 10  # bytes read at a file's start, middle and end to tell its versions apart


def files(paths: list[str | Path], text_feature: str | None) -> Opened:
    """Returns the text of files, and of every readable file in folders, by name order."""
    named = [each for path in paths for each in _readable(Path(path))]
    if not named:
        raise InvalidArgumentError(
            f"No file in {[str(path) for path in paths]} ends in one of {', '.join(SUFFIXES)}.",
            "Save the text as one of these, or pass an iterable of strings.",
        )
    digest = hashlib.sha256(repr(text_feature).encode())
    for name, path in named:
        digest.update(name.encode("utf-8", "surrogateescape") + _sample(path))

    def documents() -> Iterator[tuple[str, str]]:
        for name, path in named:
            yield from _read(name, path, text_feature)

    return ", ".join(map(str, paths)), digest.hexdigest()[:16], {"train": documents}


def hugging_face(source: Any, text_feature: str | None) -> Opened:
    """Returns the text of a `datasets.Dataset` or `DatasetDict`."""
    if not hasattr(source, "keys"):
        splits = {"train": _column(source, _text_column(source, text_feature))}
        return "Hugging Face data set", str(source._fingerprint), splits
    splits = {}
    for ours, theirs in (("train", ("train",)), ("validation", ("validation", "test"))):
        found = next((split for split in theirs if split in source), None)
        if found:
            splits[ours] = _column(source[found], _text_column(source[found], text_feature))
    if "train" not in splits:
        raise InvalidArgumentError(
            f"The data set has no split named 'train'. Received: {sorted(source)}",
            "Pass one of its splits instead: corpus(data_set['…']).",
        )
    digest = "-".join(str(source[split]._fingerprint) for split in sorted(source))
    fingerprint = hashlib.sha256(digest.encode()).hexdigest()[:16]
    return "Hugging Face data set", fingerprint, splits


def strings(source: Iterable[Any]) -> Opened:
    """Returns texts from memory or from a generator, through a copy in the cache folder.

    The copy makes a generator readable again, and keeps nothing in memory.
    """
    folder = cache_dir() / "strings"
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{uuid.uuid4().hex}.partial"
    digest = hashlib.sha256()
    with open(temporary, "w", encoding="utf-8") as out:
        for number, text in enumerate(source):
            if not isinstance(text, str):
                temporary.unlink()
                raise InvalidArgumentError(
                    f"Item {number} is no string. Received: {type(text).__name__}",
                    "Pass strings, for instance (row['text'] for row in rows).",
                )
            line = json.dumps({"text": text}) + "\n"
            digest.update(line.encode())
            out.write(line)
    fingerprint = digest.hexdigest()[:16]
    path = folder / f"{fingerprint}.jsonl"
    temporary.replace(path)
    return "strings", fingerprint, {"train": lambda: _read(fingerprint, path, "text")}


def _readable(path: Path) -> list[tuple[str, Path]]:
    """The files of a path, each with a name that stays the same where the folder is moved."""
    if path.is_dir():
        found = (each for each in path.rglob("*") if each.suffix in SUFFIXES and each.is_file())
        named = sorted((each.relative_to(path), each) for each in found)
        return [(name.as_posix(), each) for name, each in named if not _hidden(name)]
    if not path.exists():
        raise InvalidArgumentError(f"There is no file {str(path)!r}.", "Check the path.")
    return [(path.name, path)]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read(name: str, path: Path, text_feature: str | None) -> Iterator[tuple[str, str]]:
    if path.suffix == ".jsonl":
        rows: Iterable[Any] = _json_rows(path)
    elif path.suffix == ".parquet":
        rows = _parquet_rows(path, text_feature)
    else:
        yield name, path.read_text(encoding="utf-8", errors="replace")
        return
    for number, row in enumerate(rows):
        yield f"{name}:{number}", _text_of(row, text_feature, f"{path}, row {number}")


def _json_rows(path: Path) -> Iterator[Any]:
    with open(path, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise InvalidArgumentError(
                        f"Line {number + 1} of {str(path)!r} is not JSON: {error}",
                        "Write one JSON object, or one JSON string, a line.",
                    ) from error


def _parquet_rows(path: Path, text_feature: str | None) -> Iterator[Any]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ColabTPUError(
            f"Reading {str(path)!r} needs pyarrow, which is not installed.",
            "pip install pyarrow, or save the text as jsonl.",
        ) from error
    file = parquet.ParquetFile(path)
    strings = [field.name for field in file.schema_arrow if "string" in str(field.type)]
    if text_feature and text_feature not in strings:
        raise InvalidArgumentError(
            f"{str(path)!r} has the string columns {strings}. "
            f"Received: text_feature={text_feature!r}",
            "Pass the name of one of them.",
        )
    for batch in file.iter_batches(columns=[text_feature] if text_feature else strings):
        yield from batch.to_pylist()


def _text_of(row: Any, text_feature: str | None, where: str) -> str:
    """The text of a row: the row itself, the named field, "text", or the only string."""
    if isinstance(row, str):
        return row
    texts = {k: v for k, v in row.items() if isinstance(v, str)} if isinstance(row, dict) else {}
    wanted = text_feature or ("text" if "text" in texts or len(texts) != 1 else next(iter(texts)))
    if wanted not in texts:
        raise InvalidArgumentError(
            f"No text {wanted!r} in {where}, which holds the strings {sorted(texts)}.",
            "Pass text_feature= with the name of the field that holds the text.",
        )
    # JSON can spell half a surrogate pair, which no tokenizer takes.
    return texts[wanted].encode("utf-8", "replace").decode("utf-8")


def _text_column(data_set: Any, wanted: str | None) -> str:
    columns = list(data_set.column_names)
    texts = [c for c in columns if getattr(data_set.features[c], "dtype", "") == "string"]
    choice = wanted or ("text" if "text" in texts else texts[0] if len(texts) == 1 else None)
    if choice not in columns:
        raise InvalidArgumentError(
            f"The data set has the columns {columns}. Received: text_feature={wanted!r}",
            f"Pass the name of the one that holds the text, such as {(texts or columns)[0]!r}.",
        )
    return str(choice)


def _column(data_set: Any, column: str) -> Documents:
    def documents() -> Iterator[tuple[str, str]]:
        for number, row in enumerate(data_set.select_columns([column])):
            yield str(number), row[column]

    return documents


def _sample(path: Path) -> bytes:
    """The size and three pieces of a file: enough to notice a change without reading it all."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for start in sorted({0, max(0, size // 2 - _PIECE // 2), max(0, size - _PIECE)}):
            file.seek(start)
            digest.update(file.read(_PIECE))
    return digest.digest()
