"""TensorBoard's kinds of record, built from plain values: text, images, histograms, HParams.

    writer.add(step, text("config", "layers: 6"))
    writer.add(step, histogram("weights/kernel", edges, counts))

Only protocol buffers of the tensorboard package; no TensorFlow.
"""

import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def text(tag: str, markdown: str) -> Any:
    """Returns a text record, shown as Markdown."""
    from tensorboard.plugins.text import metadata

    return _tensor(tag, np.array([markdown.encode()], object), metadata)


def image(tag: str, pixels: np.ndarray) -> Any:
    """Returns an image record from `pixels`, `(height, width, 3)` uint8."""
    from tensorboard.plugins.image import metadata

    height, width = pixels.shape[:2]
    strings = [str(width).encode(), str(height).encode(), png(pixels)]
    return _tensor(tag, np.array(strings, object), metadata)


def histogram(tag: str, edges: np.ndarray, counts: np.ndarray) -> Any:
    """Returns a histogram record: `counts` `(bins,)` between `edges` `(bins + 1,)`."""
    from tensorboard.plugins.histogram import metadata

    buckets = np.stack([edges[:-1], edges[1:], counts], axis=-1).astype("float64")
    return _tensor(tag, buckets, metadata)


def hparams(values: Mapping[str, Any], metrics: Sequence[str] = (), group: str = "") -> list[Any]:
    """Returns the two records that the HParams tab needs from one run.

    Args:
        values: name -> bool, number or text; anything else is shown as text.
        metrics: tags of scalars to show beside them, such as `"loss"`.
        group: the session's name.
    """
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    names = [
        api_pb2.HParamInfo(name=name, type=_kind(api_pb2, value)) for name, value in values.items()
    ]
    shown = [
        api_pb2.MetricInfo(name=api_pb2.MetricName(group=folder, tag=tag), display_name=name)
        for tag in metrics
        for folder, name in (("train", tag), ("validation", f"val_{tag}"))
    ]
    experiment = api_pb2.Experiment(hparam_infos=names, metric_infos=shown)
    start = plugin_data_pb2.SessionStartInfo(group_name=group, start_time_secs=time.time())
    for name, value in values.items():
        field = start.hparams[name]
        if isinstance(value, bool):
            field.bool_value = value
        elif isinstance(value, int | float):
            field.number_value = value
        else:
            field.string_value = str(value)
    contents = (
        (metadata.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=experiment)),
        (
            metadata.SESSION_START_INFO_TAG,
            plugin_data_pb2.HParamsPluginData(session_start_info=start),
        ),
    )
    records = []
    for tag, content in contents:
        record = _summary()
        value = record.value.add(tag=tag, metadata=metadata.create_summary_metadata(content))
        value.tensor.CopyFrom(metadata.NULL_TENSOR)
        records.append(record)
    return records


def png(pixels: np.ndarray) -> bytes:
    """Returns `pixels`, `(height, width, 3)` uint8, as a PNG file (RFC 2083)."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), "uint8"), pixels.reshape(height, -1)], axis=1)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows.tobytes())),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def _kind(api: Any, value: Any) -> Any:
    if isinstance(value, bool):
        return api.DATA_TYPE_BOOL
    return api.DATA_TYPE_FLOAT64 if isinstance(value, int | float) else api.DATA_TYPE_STRING


def _tensor(tag: str, array: np.ndarray, plugin: Any) -> Any:
    from tensorboard.util.tensor_util import make_tensor_proto

    record = _summary()
    metadata = plugin.create_summary_metadata(display_name="", description="")
    value = record.value.add(tag=tag, metadata=metadata)
    value.tensor.CopyFrom(make_tensor_proto(array))
    return record


def _summary() -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary()
