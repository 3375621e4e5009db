"""Traps in what is given to `fit`; `check.py` runs them.

A `tf.data` pipeline is read from its end to its source without being run; of other data sets the
first and the last batch are looked at, where they can be had by number.
"""

import os
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import keras

from colabtpu.preflight import spec as specs
from colabtpu.preflight.check import RISK, SLOW, WRONG, Setting, Trap
from colabtpu.preflight.messages import size

Found = Iterator[Trap]
RAM_SHARE = 0.6  # of the host's memory, what a pipeline may keep


def unknown_shapes(setting: Setting) -> Found:
    """Every new shape is a new program."""
    for leaf in _leaves(setting):
        if leaf.ragged:
            yield Trap(
                "ragged", WRONG, f"a ragged array of {leaf.dtype}",
                "Rows of different length have no TPU program.",
                "`.to_tensor(shape=(None, seq_len))` in the pipeline, or pack rows.",
            )  # fmt: skip
        elif None in leaf.shape[1:]:
            yield Trap(
                "unknown-dimension", WRONG, f"an array of shape {leaf.shape}",
                "A TPU program has fixed shapes: it is compiled anew for every length.",
                "Pad to one length, or bucket into a few (`padded_batch(…, padded_shapes=…)`).",
            )  # fmt: skip
        elif leaf.shape and leaf.shape[0] is None and _is_tf_dataset(setting.data):
            yield Trap(
                "ragged-last-batch", SLOW, f"an array of shape {leaf.shape}",
                "The last batch has fewer rows: one more compilation, and on several devices an "
                "error when it does not divide.",
                "`.batch(n, drop_remainder=True)`.",
            )  # fmt: skip
            return


def last_batch(setting: Setting) -> Found:
    """The last batch of a data set that can be indexed."""
    data = setting.data
    if _is_tf_dataset(data) or isinstance(data, tuple | list | dict) or data is None:
        return
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or len(data) < 2:
        return
    first, last = (specs.rows(specs.batch_spec(data[i])) for i in (0, len(data) - 1))
    if first != last:
        yield Trap(
            "ragged-last-batch", SLOW, f"the last of {len(data)} batches",
            f"It has {last} rows where the first has {first}: one more compilation, and on "
            "several devices an error when it does not divide.",
            "Drop it, or fill it up with rows of weight 0.",
        )  # fmt: skip


def divisible(setting: Setting) -> Found:
    """A batch that cannot be shared out evenly."""
    leaves = [leaf for leaf in _leaves(setting) if leaf.shape and leaf.shape[0]]
    if leaves and leaves[0].shape[0] % setting.replicas:
        rows = leaves[0].shape[0]
        more = -(-rows // setting.replicas) * setting.replicas
        yield Trap(
            "batch-not-divisible", WRONG, f"a batch of {rows} rows",
            f"{setting.replicas} devices share it, and {rows} does not divide.",
            f"Use {more} rows, or `tpu.batch_size(per_core=…)`.",
        )  # fmt: skip


def dtypes(setting: Setting) -> Found:
    """Strings cannot be had on a TPU; 64-bit numbers are emulated or cut."""
    kinds = {leaf.dtype for leaf in _leaves(setting)}
    if "string" in kinds:
        yield Trap(
            "strings", WRONG, "an array of strings",
            "A TPU knows numbers only.",
            "Tokenize in the pipeline, so that the model sees ids.",
        )  # fmt: skip
    if "float64" in kinds:
        yield Trap(
            "float64", SLOW, "an array of float64",
            "TPUs have no 64-bit arithmetic: JAX cuts it to 32 bits, TensorFlow emulates it.",
            "`.astype('float32')` in the pipeline.",
        )  # fmt: skip


def padding(setting: Setting) -> Found:
    """A mean over all positions depends on how much of the batch is padding."""
    structure = _structure(setting)
    weighted = isinstance(structure, tuple) and len(structure) == 3 and structure[2] is not None
    if not weighted:
        return
    for loss in _losses(setting.model):
        if getattr(loss, "reduction", None) == "sum_over_batch_size":
            yield Trap(
                "loss-divided-by-padding", WRONG, f"loss `{loss.name}`",
                "The batch carries weights, and the loss divides by all positions, those of "
                "weight 0 too: it falls when there is more padding.",
                "Pass `reduction='mean_with_sample_weight'`, or use `ct.losses.next_token`.",
            )  # fmt: skip
            break
    metrics = getattr(getattr(setting.model, "_compile_metrics", None), "_user_metrics", None)
    if any(m is not None and type(m).__name__ != "TokenAccuracy"
           for m in keras.tree.flatten(metrics)):  # fmt: skip
        yield Trap(
            "metrics-count-padding", RISK, "`compile(metrics=…)`",
            "The batch carries weights, and `metrics` ignores them: padding counts as tokens.",
            "Pass them as `weighted_metrics=…`.",
        )  # fmt: skip


def host_memory(setting: Setting) -> Found:
    """Shuffle buffers and caches live in the host's memory."""
    available = host_bytes()
    if not _is_tf_dataset(setting.data) or available is None:
        return
    for stage in _stages(setting.data):
        kept = _kept_bytes(stage)
        if kept is not None and kept > RAM_SHARE * available:
            name = type(stage).__name__.removeprefix("_").removesuffix("Dataset").lower()
            yield Trap(
                "host-memory", WRONG, f"`{name}` in the tf.data pipeline",
                f"It keeps {size(kept)} and the host has {size(available)}: the kernel dies, with "
                "no word about why.",
                "Shuffle file names or indices, then a small buffer of rows; cache to a file.",
            )  # fmt: skip


def host_bytes() -> int | None:
    """Returns the host's memory in bytes, or `None` where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _losses(model: Any) -> list[Any]:
    """The losses as Keras will call them; a name stands for one with the default reduction."""
    losses = []
    for given in keras.tree.flatten(getattr(model, "loss", None)):
        if isinstance(given, keras.losses.Loss):
            losses.append(given)
        elif given is not None:
            name = given if isinstance(given, str) else getattr(given, "__name__", "loss")
            losses.append(keras.losses.MeanSquaredError(name=name))
    return losses


def _structure(setting: Setting) -> Any:
    data = setting.data
    if data is None:
        return None
    try:
        return specs.look_at(data)
    except Exception:  # noqa: BLE001  (what cannot be looked at is not judged)
        return None


def _leaves(setting: Setting) -> list[Any]:
    return specs.leaves(_structure(setting))


def _is_tf_dataset(data: Any) -> bool:
    return hasattr(data, "element_spec") and hasattr(data, "cardinality")


def _stages(dataset: Any) -> Iterator[Any]:
    """The pipeline's stages, last first."""
    yield dataset
    for source in dataset._inputs():
        yield from _stages(source)


def _kept_bytes(stage: Any) -> int | None:
    """What a stage holds in memory, where that can be told without running it."""
    name = type(stage).__name__.lower()
    if "shuffle" in name:
        rows = int(stage._buffer_size)
        known = int(stage.cardinality())
        return (min(rows, known) if known >= 0 else rows) * _element_bytes(stage)
    if "cache" in name and not str(_text(getattr(stage, "_filename", ""))):
        known = int(stage.cardinality())
        return known * _element_bytes(stage) if known > 0 else None
    return None


def _text(value: Any) -> str:
    value = value.numpy() if hasattr(value, "numpy") else value
    return value.decode() if isinstance(value, bytes) else str(value)


def _element_bytes(stage: Any) -> int:
    leaves = specs.leaves(specs.look_at(stage))
    return sum(prod(d or 1 for d in leaf.shape) * specs.item_bytes(leaf.dtype) for leaf in leaves)


TRAPS: tuple[Callable[[Setting], Found], ...] = (
    unknown_shapes, last_batch, divisible, dtypes, padding, host_memory,
)  # fmt: skip
