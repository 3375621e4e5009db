"""The callback that writes a run's curves, step by step, without holding the device up.

    model.fit(train, validation_data=valid, callbacks=callbacks("logs", tpu, data=train))

Curves land in `logs/<run>/train` and `logs/<run>/validation` under the same names, so that
TensorBoard overlays them. The value of step n is read when step n + lag has been enqueued:
the device always has work. Loss and metrics are those of the batch alone (Keras' own logs
are running means since the start of the epoch); `epoch_*` are Keras' epoch figures.
"""

import math
import os
import time
from collections import deque
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import keras

from colabtpu.errors import InvalidArgumentError
from colabtpu.monitor.events import EventWriter
from colabtpu.monitor.meter import Meter
from colabtpu.monitor.tap import Tap, Values


def callbacks(
    logdir: str | os.PathLike[str],
    connection: Any = None,
    data: Any = None,
    *,
    run: str | None = None,
    lag: int = 2,
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that log a training run for TensorBoard.

    Args:
        logdir: the folder that holds all runs, the one to give to `tensorboard`.
        connection: what `connect()` returned.
        data: the training batches; their `tokens_per_step` is the token count of a step.
            Without it tokens are counted where the input is `(batch, seq)` of whole numbers.
        run: the name of this run's folder; the same name continues an earlier run's curves.
            `None` makes a new one from the date and time.
        lag: how many steps stay enqueued while a value is read.

    Returns:
        Callbacks for `model.fit`, usable beside any others, and for several fits in a row.

    Raises:
        InvalidArgumentError: `lag` is negative, or `run` is not a plain folder name.
    """
    if lag < 0:
        raise InvalidArgumentError(
            f"`lag` must be 0 or more. Received: lag={lag}", "Pass 2, the default."
        )
    if run is not None and (not run or Path(run).is_absolute() or ".." in Path(run).parts):
        raise InvalidArgumentError(
            f"`run` must be a folder name inside `logdir`. Received: run={run!r}",
            "Pass a name such as 'first-try', or None for the date and time.",
        )
    folder = Path(logdir).expanduser() / (run or datetime.now().strftime("%Y%m%d-%H%M%S"))
    return [TrainingLog(folder, tokens_per_step=getattr(data, "tokens_per_step", None), lag=lag)]


class TrainingLog(keras.callbacks.Callback):
    """Writes the scalars of each step, and of each validation.

    It reads `self._model`, never `self.model`: on JAX that property puts the whole state back
    on the model, each time.

    Args:
        folder: the run's folder.
        tokens_per_step: tokens in a global batch; `None` counts them from the input.
        lag: how many steps stay enqueued while a value is read.
    """

    # Safe, because nothing here runs when Keras dispatches `on_train_batch_end` to threads.
    async_safe = True

    def __init__(self, folder: Path, tokens_per_step: int | None = None, lag: int = 2) -> None:
        super().__init__()
        self.folder = folder
        self.meter = Meter()
        self.step = 0
        self._tokens_per_step = tokens_per_step
        self._lag = lag
        self._pending: deque[_Step] = deque()
        self._tap = Tap(on_step=self._enqueued, on_enqueue=self._calling)
        self._train: EventWriter | None = None
        self._validation: EventWriter | None = None
        self._ends_epoch = False
        self._said_no_tokens = False
        self._has_tokens = False

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        # An interrupted fit leaves values behind; they belong to steps that were done.
        self._read_all()
        self._close()
        self.step = _steps_done(self._model.optimizer)
        self.meter = Meter()
        self._train = EventWriter(self.folder / "train", start_step=self.step)
        self._tap.attach(self._model)

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._tap.announce()
        # Keras does much between an epoch's last step and the next callback, none of it a
        # step; so the clock must stop as soon as that last step is done.
        steps = (self.params or {}).get("steps")
        self._ends_epoch = steps is not None and batch + self._model.steps_per_execution >= steps

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        self._pause()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._pause()
        train = {k: v for k, v in (logs or {}).items() if not k.startswith("val_")}
        validation = {k[4:]: v for k, v in (logs or {}).items() if k.startswith("val_")}
        self._write(self._train, epoch, _prefixed(train))
        if validation:
            if self._validation is None:
                start = max(self.step - 1, 0)
                self._validation = EventWriter(self.folder / "validation", start_step=start)
            self._write(self._validation, self.step, self._with_perplexity(validation))
            self._write(self._validation, epoch, _prefixed(validation))

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        self._pause()
        self._tap.detach(self._model)
        self._close()

    def _calling(self) -> None:
        self._note_done()
        self.meter.resume(time.perf_counter())

    def _pause(self) -> None:
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
        if self._ends_epoch:
            self._pause()
        elif len(self._pending) > self._lag:
            self._read_one()

    def _read_all(self) -> None:
        while self._pending:
            self._read_one()

    def _note_done(self) -> None:
        # Reading may come long after a step was done, so the time is noted by polling.
        for step in self._pending:
            if step.done_at is None and _is_ready(step.values):
                step.done_at = time.perf_counter()

    def _read_one(self) -> None:
        step = self._pending.popleft()
        numbers = {name: float(value) for name, value in step.values.items()}
        done_at = step.done_at or time.perf_counter()
        steps = self._model.steps_per_execution
        tokens = numbers.pop("tokens", 0.0)
        if self._tokens_per_step is not None:
            tokens = float(self._tokens_per_step)
        numbers.pop("examples", None)
        self._has_tokens = tokens > 0
        self.meter.step(done_at, tokens * steps, steps)
        self._write(self._train, step.number, self._with_perplexity(numbers) | self._speed())

    def _speed(self) -> dict[str, float]:
        speed = {"step_seconds": self.meter.step_seconds}
        speed["tokens_per_second"] = self.meter.tokens_per_second
        if not self._has_tokens and not self._said_no_tokens:
            self._said_no_tokens = True
            print(
                "No tokens per second: the input is not (batch, seq) of whole numbers. "
                "Pass data= with `tokens_per_step` to have it."
            )
        return {name: value for name, value in speed.items() if value is not None}

    def _with_perplexity(self, numbers: dict[str, float]) -> dict[str, float]:
        # exp of a mean cross-entropy; for other inputs the loss need not be one.
        if not self._has_tokens or "loss" not in numbers:
            return numbers
        loss = numbers["loss"]
        return numbers | {"perplexity": math.exp(loss) if loss < 700 else math.inf}

    def _write(self, writer: EventWriter | None, step: int, numbers: dict[str, float]) -> None:
        if writer is not None and numbers:
            writer.scalars(step, numbers)

    def _close(self) -> None:
        for writer in (self._train, self._validation):
            if writer is not None:
                writer.close()
        self._train = self._validation = None


@dataclass
class _Step:
    """A step that was enqueued: its number, its unread values, when it was seen to be done."""

    number: int
    values: Values
    done_at: float | None = None


def _is_ready(values: Values) -> bool:
    """Whether the device has finished these values, as far as that can be told without waiting."""
    value = next(iter(values.values()))
    if hasattr(value, "is_ready"):
        return bool(value.is_ready())
    # TensorFlow does not say; on a CPU its functions return when they are done.
    return "CPU" in getattr(value, "device", "")


def _prefixed(numbers: dict[str, float]) -> dict[str, float]:
    return {f"epoch_{name}": value for name, value in numbers.items()}


def _steps_done(optimizer: Any) -> int:
    """Batches trained on so far, which a resumed optimizer remembers."""
    if optimizer is None:
        return 0
    accumulated = getattr(optimizer, "gradient_accumulation_steps", None) or 1
    return int(keras.ops.convert_to_numpy(optimizer.iterations)) * accumulated
