"""What the monitoring tests share: a reader of event files, and devices to run on."""

from pathlib import Path
from typing import Any

import keras
import numpy as np


def reader(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = reader(folder)
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def values(folder: Path, tag: str) -> list[float]:
    return [value for _, value in scalars(folder)[tag]]


def tensors(folder: Path) -> dict[str, list[tuple[int, np.ndarray]]]:
    from tensorboard.util.tensor_util import make_ndarray

    found = reader(folder)
    return {
        tag: [(e.step, make_ndarray(e.tensor_proto)) for e in found.Tensors(tag)]
        for tag in found.Tags()["tensors"]
    }


def text(folder: Path, tag: str) -> str:
    return tensors(folder)[tag][-1][1][0].decode()


def several_devices(engine: str, number: int) -> Any:
    """A scope over `number` logical CPU devices."""
    if engine == "tensorflow":
        import tensorflow as tf

        # Not collectives, which keep the group of the first strategy for the whole process.
        names = [f"CPU:{i}" for i in range(number)]
        reduce = tf.distribute.ReductionToOneDevice()
        return tf.distribute.MirroredStrategy(names, cross_device_ops=reduce).scope()
    devices = keras.distribution.list_devices("cpu")[:number]
    return keras.distribution.DataParallel(devices=devices).scope()
