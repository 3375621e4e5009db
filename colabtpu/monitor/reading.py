"""Reads a run's curves back, without TensorBoard and without TensorFlow.

loss = curves("logs/first/train")["loss"]
plt.plot(loss.steps, loss.values)
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from colabtpu.errors import ColabTPUError


@dataclass(frozen=True)
class Curve:
    """One scalar over time.

    Attributes:
        steps: `(points,)` int64, rising.
        values: `(points,)` float32.
    """

    steps: np.ndarray
    values: np.ndarray


def curves(folder: str | os.PathLike[str]) -> dict[str, Curve]:
    """Returns the scalars of one folder of event files, by tag.

    Args:
        folder: such as `logs/<run>/train`. Where a resumed run repeated a step, the later
            value counts.

    Raises:
        ColabTPUError: the folder holds no event files.
    """
    files = sorted(Path(folder).glob("events.out.tfevents.*"))
    if not files:
        raise ColabTPUError(
            f"No event files in {folder}.", "Pass a run's folder, such as logs/<run>/train."
        )
    points: dict[str, dict[int, float]] = {}
    for file in files:
        for event in _events(file):
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    points.setdefault(value.tag, {})[event.step] = value.simple_value
    return {tag: _curve(by_step) for tag, by_step in points.items()}


def _curve(by_step: dict[int, float]) -> Curve:
    steps = sorted(by_step)
    return Curve(np.array(steps, "int64"), np.array([by_step[s] for s in steps], "float32"))


def _events(file: Path) -> Iterator[Any]:
    from tensorboard.compat.proto.event_pb2 import Event

    with file.open("rb") as records:
        # A record: length, its checksum, the data, its checksum. The last may be unfinished.
        while len(header := records.read(12)) == 12:
            (length,) = struct.unpack("<Q", header[:8])
            data = records.read(length)
            if len(records.read(4)) < 4:
                return
            yield Event.FromString(data)
