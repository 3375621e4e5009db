"""Text from TensorFlow Datasets, read without TensorFlow wherever the files allow it.

    name, fingerprint, splits = data_set("imdb_reviews", None, None)

Data sets are prepared as ArrayRecord files, which TFDS writes and reads without TensorFlow.
One that somebody prepared as TFRecord files is read with `tf.data`, if TensorFlow is there.
"""

import contextlib
import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colabtpu.data.corpora import Documents
from colabtpu.data.storage import cache_dir
from colabtpu.errors import ColabTPUError, InvalidArgumentError


def python_text() -> tuple[str, str, dict[str, Documents]]:
    """Returns the embedded corpus: prepared once per Python version, without a network."""
    tfds = _tfds("python")
    from colabtpu.data.python_text.python_text_dataset_builder import Builder

    # The standard library is the data, so each Python version is a data set of its own.
    folder = cache_dir() / "tfds" / f"python-{platform.python_version()}"
    builder = Builder(data_dir=str(folder), file_format=_file_format())
    with contextlib.redirect_stdout(None):  # TFDS would announce a download, and there is none
        _prepare(tfds, builder)
    splits = {split: _documents(builder, split, "text") for split in ("train", "validation")}
    name = f"python {platform.python_version()}: standard library and documentation"
    return name, _fingerprint(builder, "text"), splits


def data_set(
    name: str, text_feature: str | None, data_dir: str | Path | None
) -> tuple[str, str, dict[str, Documents]]:
    """Returns a TFDS data set's text; its test split serves where it has no validation."""
    tfds = _tfds(name)
    try:
        builder = _builder(tfds, name, data_dir)
        _prepare(tfds, builder)
    except Exception as error:
        raise _unreachable(name, error) from error
    feature = _text_feature(builder, name, text_feature)
    splits = {}
    for ours, theirs in (("train", ("train",)), ("validation", ("validation", "test"))):
        found = next((split for split in theirs if split in builder.info.splits), None)
        if found:
            splits[ours] = _documents(builder, found, feature)
    if "train" not in splits:
        splits = {"train": _documents(builder, next(iter(builder.info.splits)), feature)}
    return builder.info.full_name, _fingerprint(builder, feature), splits


def _tfds(name: str) -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ColabTPUError(
            f"The data set {name!r} comes from TensorFlow Datasets, which does not load here: "
            f"{error}",
            "pip install tensorflow-datasets importlib_resources array-record "
            "(it works without TensorFlow).",
        ) from error
    return tfds


def _file_format() -> str:
    try:
        import array_record  # noqa: F401
    except ImportError:  # no wheel for this platform; TFRecord files need TensorFlow
        return "tfrecord"
    return "array_record"


def _builder(tfds: Any, name: str, data_dir: str | Path | None) -> Any:
    where: dict[str, Any] = {"data_dir": str(data_dir)} if data_dir else {}
    found = tfds.core.file_utils.find_builder_dir(name, **where)
    if found:  # prepared already, in whichever format
        return tfds.builder_from_directory(found)
    if not where and "COLAB_RELEASE_TAG" in os.environ:
        where = {"try_gcs": True}
    return tfds.builder(name, file_format=_file_format(), **where)


def _prepare(tfds: Any, builder: Any) -> None:
    if not builder.info.splits:
        config = tfds.download.DownloadConfig(try_download_gcs=False)
        tfds.disable_progress_bar()
        builder.download_and_prepare(download_config=config)


def _unreachable(name: str, error: Exception) -> ColabTPUError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ColabTPUError(
        f"The data set {name!r} cannot be had: {type(error).__name__}: {reason}",
        'Use corpus("python"), which needs no network, or corpus("path/to/your/files"); '
        "names are listed at https://www.tensorflow.org/datasets/catalog/overview, and a "
        "folder of your own needs a path that exists.",
    )


def _text_feature(builder: Any, name: str, wanted: str | None) -> str:
    features = builder.info.features
    texts = [key for key, each in features.items() if type(each).__name__ == "Text"]
    if wanted in texts:
        return str(wanted)
    if wanted is None and "text" in texts:
        return "text"
    if wanted is None and len(texts) == 1:
        return texts[0]
    raise InvalidArgumentError(
        f"{name!r} has the text features {texts}. Received: text_feature={wanted!r}",
        f"Pass text_feature={texts[0]!r}." if texts else "Choose a data set with text.",
    )


def _fingerprint(builder: Any, feature: str) -> str:
    parts = [builder.info.full_name, feature]
    for split, info in sorted(builder.info.splits.items()):
        parts.append(f"{split} {info.num_examples} {int(info.num_bytes)} {info.shard_lengths}")
    parts.append(platform.python_version() if "python_text" in parts[0] else "")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _documents(builder: Any, split: str, feature: str) -> Documents:
    def documents() -> Iterator[tuple[str, str]]:
        for number, text in enumerate(_texts(builder, split, feature)):
            yield f"{split}/{number}", text.decode("utf-8", errors="replace")

    return documents


def _texts(builder: Any, split: str, feature: str) -> Iterator[bytes]:
    if builder.info.file_format.value == "array_record":
        source = builder.as_data_source(split=split)
        yield from (source[i][feature] for i in range(len(source)))
    else:
        # Sequential and unshuffled: the order is part of what a run can be resumed from.
        import tensorflow_datasets as tfds

        read = tfds.ReadConfig(interleave_cycle_length=1, shuffle_seed=0)
        examples = builder.as_dataset(split=split, shuffle_files=False, read_config=read)
        yield from (example[feature] for example in tfds.as_numpy(examples))
