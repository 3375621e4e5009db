"""The callback that writes a run's curves, step by step, without holding the device up.

    model.fit(train, validation_data=valid, callbacks=callbacks("logs", tpu, data=train))

Curves land in `logs/<run>/train` and `logs/<run>/validation` under the same names, so that
TensorBoard overlays them. The value of step n is read when step n + lag has been enqueued:
the device always has work. Loss and metrics are those of the batch alone (Keras' own logs
are running means since the start of the epoch); `epoch_*` are Keras' epoch figures.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from colabtpu.monitor.figures import Figures
from colabtpu.monitor.histograms import Statistics
from colabtpu.monitor.meter import Meter
from colabtpu.monitor.pictures import Picture
from colabtpu.monitor.run_files import Mirror, RunFiles
from colabtpu.monitor.step import Values
from colabtpu.monitor.tap import Tap, is_ready


class TrainingLog(keras.callbacks.Callback):
    """Writes the scalars of each step and of each validation, and histograms on a schedule.

    It reads `self._model`, never `self.model`: on JAX that property puts the whole state back
    on the model, each time.

    Args:
        folder: the run's folder.
        figures: turns what a step returned into what is written.
        lag: how many steps stay enqueued while a value is read.
        histograms_every: steps between histograms; 0 for none.
        mirror: another tracker that gets the same values.
        pictures: drawn at the end of each epoch.

    Attributes:
        files: the run's event files, open while a fit runs.
        step: the last step that was enqueued.
        latest: the newest numbers that were read, by tag.
        read_steps: how many steps' numbers have been read in this fit.
        meter: throughput of this fit.
    """

    # Safe, because nothing here runs when Keras dispatches `on_train_batch_end` to threads.
    async_safe = True

    def __init__(
        self,
        folder: Path,
        figures: Figures,
        lag: int = 2,
        histograms_every: int = 0,
        mirror: Mirror | None = None,
        pictures: Sequence[Picture] = (),
    ) -> None:
        super().__init__()
        self.folder = folder
        self.files = RunFiles(folder)
        self.meter = Meter()
        self.step = 0
        self.latest: dict[str, float] = {}
        self.read_steps = 0
        self._figures = figures
        self._lag = lag
        self._histograms_every = histograms_every
        self._mirror = mirror
        self._pictures = list(pictures)
        self._statistics: Statistics | None = None
        self._pending: deque[_Step] = deque()
        self._tap = Tap(self._enqueued, on_enqueue=self._calling, on_wait=self._waited)
        self._ends_epoch = False
        self._described: Any = None

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        # An interrupted fit leaves values behind; they belong to steps that were done.
        self._read_all()
        self.files.close()
        self.latest, self.read_steps = {}, 0
        self.step = _steps_done(self._model.optimizer)
        self.meter = Meter()
        self.files = RunFiles(self.folder, start_step=self.step, mirror=self._mirror)
        self._tap.attach(self._model)
        # A checkpoint asks for this first, so that an interrupted run's curves have no gap.
        self._model.__dict__.setdefault("_colabtpu_flush", {})["monitor"] = self.flush
        if self._described is not self._model:
            self._described = self._model
            self._figures.describe(self._model, self.files)

    def flush(self) -> None:
        """Reads the steps that are still under way and waits until all curves are on disk."""
        self._read_all()
        self.files.flush()

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._tap.announce()
        steps = self._model.steps_per_execution
        self._tap.keep_batch = self._wants_histograms(self.step + steps)
        # Keras does much between an epoch's last step and the next callback, none of it a
        # step; so the clock must stop as soon as that last step is done.
        in_epoch = (self.params or {}).get("steps")
        self._ends_epoch = in_epoch is not None and batch + steps >= in_epoch

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        self.pause()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.pause()
        train = {k: v for k, v in (logs or {}).items() if not k.startswith("val_")}
        validation = {k[4:]: v for k, v in (logs or {}).items() if k.startswith("val_")}
        self.files.train(epoch, _prefixed(train))
        if validation:
            written = self._figures.validation(validation)
            self.latest |= {f"val_{name}": value for name, value in written.items()}
            self.files.validation(self.step, written)
            self.files.validation(epoch, _prefixed(validation))
        self._draw_pictures()

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        self.pause()
        self._tap.detach(self._model)
        self.files.close()

    def _calling(self) -> None:
        self._note_done()
        self.meter.resume(time.perf_counter())

    def _waited(self, seconds: float) -> None:
        self.meter.wait(seconds)

    def pause(self) -> None:
        """Reads what is pending and stops the clock, until the next step."""
        self._read_all()
        self.meter.pause(time.perf_counter())

    def _enqueued(self, values: Values) -> None:
        self.step += self._model.steps_per_execution
        for value in values.values():
            # Starts the copy now, so that reading it `lag` steps later finds it here.
            if hasattr(value, "copy_to_host_async"):
                value.copy_to_host_async()
        self._pending.append(_Step(self.step, values))
        self._note_done()
        if self._tap.keep_batch and self._tap.batch is not None:
            self.pause()
            self._write_histograms()
        elif self._ends_epoch:
            self.pause()
        elif len(self._pending) > self._lag:
            self._read_one()

    def _read_all(self) -> None:
        while self._pending:
            self._read_one()

    def _note_done(self) -> None:
        # Reading may come long after a step was done, so the time is noted by polling.
        for step in self._pending:
            if step.done_at is None and is_ready(step.values):
                step.done_at = time.perf_counter()

    def _read_one(self) -> None:
        step = self._pending.popleft()
        numbers = {name: float(value) for name, value in step.values.items()}
        done_at = step.done_at or time.perf_counter()
        steps = self._model.steps_per_execution
        self.meter.step(done_at, self._figures.tokens(numbers) * steps, steps)
        written = self._figures.training(numbers, self.meter)
        self.latest = self.latest | written
        self.read_steps += 1
        self.files.train(step.number, written)

    def _draw_pictures(self) -> None:
        for picture in list(self._pictures):
            try:
                picture(self.model, self.files, self.step)
            except Exception as error:  # noqa: BLE001 monitoring never stops training
                self._pictures.remove(picture)
                name = getattr(picture, "__name__", type(picture).__name__)
                print(f"{name} is off, training goes on: {type(error).__name__}: {error}")

    def _wants_histograms(self, step: int) -> bool:
        return self._histograms_every > 0 and step % self._histograms_every == 0

    def _write_histograms(self) -> None:
        batch, self._tap.batch = self._tap.batch, None
        try:
            if self._statistics is None:
                self._statistics = Statistics(self._model)
            for tag, found in self._statistics(batch, self._tap.state).items():
                if math.isfinite(found.edges[-1] - found.edges[0]):
                    self.files.histogram(self.step, tag, found.edges, found.counts)
                if found.nonfinite:
                    self.files.train(self.step, {f"nonfinite/{tag}": float(found.nonfinite)})
        except Exception as error:  # noqa: BLE001 monitoring never stops training
            self._histograms_every = 0
            print(f"Histograms are off, training goes on: {type(error).__name__}: {error}")


@dataclass
class _Step:
    """A step that was enqueued: its number, its unread values, when it was seen to be done."""

    number: int
    values: Values
    done_at: float | None = None


def _prefixed(numbers: dict[str, float]) -> dict[str, float]:
    return {f"epoch_{name}": value for name, value in numbers.items()}


def _steps_done(optimizer: Any) -> int:
    """Batches trained on so far, which a resumed optimizer remembers."""
    if optimizer is None:
        return 0
    accumulated = getattr(optimizer, "gradient_accumulation_steps", None) or 1
    return int(keras.ops.convert_to_numpy(optimizer.iterations)) * accumulated
