"""What would starve the device: findings about where data lies and how it comes.

    for finding in lint(train): print(finding)
    lint("/content/drive/MyDrive/texts")       # before training, on a folder or file

Each finding says what is wrong (with the value seen), why it matters, and the next step.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

SMALL_FILE = 64 << 10
MANY_FILES = 1000
_SAMPLED = 3  # batches looked at; a shape that changes shows at once or at the epoch's end


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with an input: what, why, and the next step."""

    code: str
    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}\n  {self.why}\n  Next step: {self.fix}"


def lint(
    source: Any, *, mounts: str | Path = "/proc/mounts", memory_bytes: int | None = None
) -> list[Finding]:
    """Looks for what slows an input down or makes a TPU recompile.

    Args:
        source: `Batches`, a path to a file or folder, a `tf.data.Dataset`, or anything that
            yields batches. Of the last, three batches are taken.
        mounts: the system's table of mounts.
        memory_bytes: this machine's memory; read from the system if absent.

    Returns:
        The findings, none if all is well.
    """
    if isinstance(source, str | Path):
        paths, batches = [Path(source)], None
    elif hasattr(source, "examples"):
        paths, batches = [source.examples.path], source
    else:
        paths, batches = [], source
    found: list[Finding | None] = []
    for path in paths:
        found += [_on_fuse(path, Path(mounts)), _many_files(path)]
        found += [_larger_than_memory(path, memory_bytes or _memory_bytes())]
    if hasattr(batches, "examples"):
        found.append(_few_rows(batches))
    elif batches is not None:
        found += [_unknown_shape(batches) or _changing_shapes(batches)]
    return [finding for finding in found if finding]


def _on_fuse(path: Path, mounts: Path) -> Finding | None:
    place = path.resolve()
    kind, root = max(_mounts_over(place, mounts), key=lambda m: len(m[1]), default=("", ""))
    if not kind.startswith("fuse"):
        return None
    return Finding(
        "drive-fuse",
        f"{path} lies on {root}, a {kind} file system.",
        "Google Drive and other FUSE mounts answer each read through a process and a network: "
        "small or scattered reads take milliseconds each, and the mount can vanish.",
        f"Copy it to the local disk first: cp -r {path} /content/",
    )


def _mounts_over(place: Path, mounts: Path) -> Iterator[tuple[str, str]]:
    if mounts.exists():
        for line in mounts.read_text().splitlines():
            _, root, kind, *_ = line.split()
            root = root.replace("\\040", " ")
            if place.is_relative_to(root):
                yield kind, root


def _many_files(path: Path) -> Finding | None:
    if not path.is_dir():
        return None
    sizes = [each.stat().st_size for each in islice(_files(path), 20 * MANY_FILES)]
    if len(sizes) < MANY_FILES or sum(sizes) / len(sizes) >= SMALL_FILE:
        return None
    more = " or more" if len(sizes) == 20 * MANY_FILES else ""
    return Finding(
        "tiny-files",
        f"{path} holds {len(sizes):,}{more} files of {sum(sizes) / len(sizes) / 1024:,.1f} KiB "
        "on average.",
        "Opening a file costs more than reading one this small, on network disks by far.",
        "Put them in one jsonl or parquet file, or one archive, once; corpus() reads jsonl.",
    )


def _larger_than_memory(path: Path, memory_bytes: int | None) -> Finding | None:
    size = sum(each.stat().st_size for each in _files(path))
    if not memory_bytes or size < memory_bytes:
        return None
    return Finding(
        "larger-than-memory",
        f"{path} holds {size / 2**30:,.1f} GiB; this machine has {memory_bytes / 2**30:,.1f} GiB "
        "of memory.",
        "Shuffled reads of a file that memory cannot hold come from the disk each time, and "
        "`Dataset.cache()` in memory would end the process.",
        "Keep the cache on a local SSD, train on a part of the corpus, or take a runtime with "
        "more memory; never cache() it in memory.",
    )


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for folder, _, names in os.walk(path):
        for name in names:
            file = Path(folder, name)
            if file.is_file():
                yield file


def _few_rows(batches: Any) -> Finding | None:
    rows = len(batches.examples)
    if rows >= batches.batch:
        return None
    return Finding(
        "few-rows",
        f"{rows:,} rows do not fill one batch of {batches.batch:,}.",
        "In training one step would see some rows several times; in validation most of the "
        "batch would be filler.",
        "Use a smaller batch or shorter rows, or more text.",
    )


def _unknown_shape(batches: Any) -> Finding | None:
    spec = getattr(batches, "element_spec", None)
    shapes = [tuple(each.shape) for each in _leaves(spec) if hasattr(each, "shape")]
    if not any(None in shape for shape in shapes):
        return None
    return Finding(
        "unknown-shape",
        f"The data set's shapes have unknown sizes: {shapes}.",
        "A TPU program has fixed shapes: each new size compiles anew, which takes minutes.",
        "Use batch(..., drop_remainder=True) and pad or pack rows to one length; lm_batches "
        "does both.",
    )


def _changing_shapes(batches: Any) -> Finding | None:
    seen = [tuple(_shapes(batch)) for batch in islice(iter(batches), _SAMPLED)]
    if len(set(seen)) <= 1:
        return None
    return Finding(
        "changing-shapes",
        f"Batches differ in their shapes: {list(dict.fromkeys(seen))}.",
        "A TPU program has fixed shapes: each new one compiles anew, which takes minutes.",
        "Pad or pack rows to one length, and drop or fill up the last batch; lm_batches does.",
    )


def _shapes(batch: Any) -> Iterator[tuple[int, ...]]:
    return (tuple(leaf.shape) for leaf in _leaves(batch) if hasattr(leaf, "shape"))


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = [tree[key] for key in sorted(tree)]
    if isinstance(tree, list | tuple) and not hasattr(tree, "shape"):
        for branch in tree:
            yield from _leaves(branch)
    elif tree is not None:
        yield tree


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
