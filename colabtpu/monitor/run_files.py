"""A run's folder: where its curves, texts and pictures go.

    files = RunFiles(Path("logs/first"), start_step=0)
    files.train(step, {"loss": 2.3}); files.close()

`<run>/train` and `<run>/validation` hold scalars under the same names, so that TensorBoard
overlays them; `<run>` itself holds what belongs to the run as a whole: hyper-parameters, the
model's summary and configuration, samples, pictures.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from colabtpu.monitor import summaries
from colabtpu.monitor.events import EventWriter

Mirror = Callable[[str, int, dict[str, Any]], None]
"""Gets `(folder, step, name -> number, text or picture)` as well: another tracker."""


class RunFiles:
    """The event files of one run, each opened when it is first written to.

    Args:
        folder: the run's folder.
        start_step: the last step that was done before.
        mirror: also gets everything but histograms.
    """

    def __init__(self, folder: Path, start_step: int = 0, mirror: Mirror | None = None) -> None:
        self.folder = folder
        self._start_step = start_step
        self._mirror = mirror
        self._writers: dict[str, EventWriter] = {}

    def train(self, step: int, numbers: Mapping[str, float]) -> None:
        """Writes a training step's scalars."""
        self._scalars("train", step, numbers)

    def validation(self, step: int, numbers: Mapping[str, float]) -> None:
        """Writes a validation's scalars."""
        # A validation belongs to the last step done, which a resumed run may not have repeated.
        self._scalars("validation", step, numbers)

    def histogram(self, step: int, tag: str, edges: np.ndarray, counts: np.ndarray) -> None:
        """Writes `counts` `(bins,)` between `edges` `(bins + 1,)`."""
        self._writer("train").add(step, summaries.histogram(tag, edges, counts))

    def text(self, step: int, tag: str, markdown: str) -> None:
        """Writes a text, shown as Markdown."""
        self._writer("").add(step, summaries.text(tag, markdown))
        self._tell("", step, {tag: markdown})

    def image(self, step: int, tag: str, pixels: np.ndarray) -> None:
        """Writes a picture, `(height, width, 3)` uint8."""
        self._writer("").add(step, summaries.image(tag, pixels))
        self._tell("", step, {tag: pixels})

    def hparams(self, values: Mapping[str, Any], metrics: tuple[str, ...]) -> None:
        """Writes the run's hyper-parameters, and which scalars to compare runs by."""
        for record in summaries.hparams(values, metrics, group=self.folder.name):
            self._writer("").add(0, record)

    @property
    def lost_events(self) -> int:
        """Events that could not be written."""
        return sum(writer.lost_events for writer in self._writers.values())

    def flush(self) -> None:
        """Waits until everything so far is on disk."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Writes what is queued and ends the writers' threads."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _scalars(self, folder: str, step: int, numbers: Mapping[str, float]) -> None:
        if numbers:
            self._writer(folder).scalars(step, numbers)
            self._tell(folder, step, dict(numbers))

    def _tell(self, folder: str, step: int, values: dict[str, Any]) -> None:
        if self._mirror is not None:
            self._mirror(folder, step, values)

    def _writer(self, folder: str) -> EventWriter:
        if folder not in self._writers:
            # Only the steps' curves are cut back on a resume: other tags are written rarely.
            start = self._start_step if folder == "train" else None
            self._writers[folder] = EventWriter(self.folder / folder, start_step=start)
        return self._writers[folder]
