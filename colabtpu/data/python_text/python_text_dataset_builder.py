"""The TFDS builder `python_text`: pydoc's topics and the standard library's source.

    from colabtpu.data.python_text.python_text_dataset_builder import Builder
    Builder(data_dir=..., file_format="array_record").download_and_prepare()

It downloads nothing. About 9 MB: 0.5 MB of English prose (the language reference, from
`pydoc_data.topics`) and the library's modules, without its tests, its code-page tables and
what Linux distributions leave out. Every file lands whole in one split, by a hash of its
name, so that the split is the same on every machine; repeated contents are dropped.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds

VALIDATION_SHARE = 0.05

# Left out: tests (not prose, not in every installation), data tables in Python's clothes, and
# folders that Debian and Colab package apart, so that machines differ as little as they can.
_SKIPPED_FOLDERS = {
    *("__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3"),
    *("pydoc_data", "site-packages", "test", "tests", "turtledemo"),
}


class Builder(tfds.core.GeneratorBasedBuilder):
    """Text with its name, in two splits that share no file."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar = {"1.0.0": "pydoc topics and standard library source, split by file."}

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict({"name": text(), "text": text()}),
            homepage="https://docs.python.org/3/license.html",
            license="PSF-2.0",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[Any]]:
        return {
            "train": self._generate_examples(validation=False),
            "validation": self._generate_examples(validation=True),
        }

    def _generate_examples(self, validation: bool) -> Iterator[tuple[str, dict[str, str]]]:
        for name, text in python_texts():
            if in_validation(name) == validation:
                yield name, {"name": name, "text": text}


def python_texts() -> Iterator[tuple[str, str]]:
    """Yields (name, text) of every text, each content once, in the order of their names."""
    seen = set()
    for name, text in [*_topics(), *_library()]:
        digest = hashlib.sha256(text.encode()).digest()
        if text.strip() and digest not in seen:
            seen.add(digest)
            yield name, text


def in_validation(name: str) -> bool:
    """Whether the text of this name belongs to the validation split."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < VALIDATION_SHARE * 2**64


def _topics() -> list[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some slim Pythons leave the documentation out
        return []
    return [(f"pydoc_data/topics/{name}", text) for name, text in sorted(topics.items())]


def _library() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(
            name
            for name in subfolders
            if name not in _SKIPPED_FOLDERS and not name.startswith("config-")
        )
        for file in sorted(files):
            # `_sysconfigdata…` holds this machine's compiler flags, not text.
            if file.endswith(".py") and not file.startswith("_sysconfigdata"):
                path = Path(folder, file)
                text = path.read_text(encoding="utf-8", errors="replace")
                yield path.relative_to(root).as_posix(), text
