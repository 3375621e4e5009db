"""One callback for `fit`: saves the whole run, and continues it when the notebook is run again.

    model.fit(train, epochs=3, callbacks=[ct.checkpoint.resume("checkpoints", train)])

Put it first, so that the other callbacks see the restored step. What is saved is copied to host
memory between two steps and written by another thread. Call `ct.connect()` first: this module
imports Keras.
"""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from colabtpu.checkpoint import state
from colabtpu.checkpoint.ledger import Ledger, release_runtime
from colabtpu.checkpoint.signals import Interruptions
from colabtpu.checkpoint.store import Checkpoint, Store
from colabtpu.data.storage import write_atomically
from colabtpu.errors import ColabTPUError, InvalidArgumentError

ON_NAN = ("stop", "roll back", "ignore")
MOST_ROLLBACKS = 3
HEARTBEAT_SECONDS = 5.0
# A callback that writes curves puts its flush here, `model.__dict__.setdefault(FLUSH, {})[name]`:
# what it wrote up to a checkpoint must not be lost with the process, or the curve has a gap.
FLUSH = "_colabtpu_flush"


def resume(
    directory: str | Path,
    data: Any = None,
    *,
    every_minutes: float | None = 5.0,
    every_steps: int | None = None,
    keep: int = 2,
    best: str | None = "val_loss",
    on_nan: str = "stop",
    new_run: bool = False,
    fallback: str | Path | None = None,
    release: bool = False,
) -> "Resume":
    """Returns the callback that saves a run and continues the newest one in a directory.

    Args:
        directory: a local folder, a mounted Google Drive, or a gs:// address.
        data: the `Batches` that `fit` trains on. With them the run continues at the very
            batch; with other data, at the beginning of the epoch that was interrupted.
        every_minutes: time between two checkpoints; None for none by the clock.
        every_steps: steps between two checkpoints, counted from the run's start.
        keep: how many of the newest checkpoints to keep, besides the best.
        best: the validation value whose smallest (for names with "acc", largest) checkpoint
            is kept; None for none.
        on_nan: when the loss is no number, "stop", "roll back" to the last good checkpoint and
            go on with the next batches (three times at most), or "ignore". The batch is saved.
        new_run: begin a new run, whatever is there; nothing is deleted.
        fallback: the local folder to write to while `directory` cannot be written.
        release: give the Colab runtime back when training has ended.

    Returns:
        A Keras callback; `.initial_step` is the step it continued at, `.ledger` says where
        the time went.

    Raises:
        InvalidArgumentError: a number that is not positive, or an unknown `on_nan`.
        ColabTPUError: from `fit`, when the saved run had another model, optimizer, tokenizer,
            corpus, packing, seed or batch size; says which.
    """
    for name, value in {"every_minutes": every_minutes, "every_steps": every_steps}.items():
        if value is not None and not value > 0:
            raise InvalidArgumentError(
                f"`{name}` must be positive. Received: {name}={value}", "Pass None for never."
            )
    if keep < 1:
        raise InvalidArgumentError(f"`keep` must be 1 or more. Received: keep={keep}", "Pass 2.")
    if on_nan not in ON_NAN:
        raise InvalidArgumentError(
            f"`on_nan` must be one of {ON_NAN}. Received: on_nan={on_nan!r}", 'Pass "stop".'
        )
    pace = _Pace(every_minutes and every_minutes * 60, every_steps)
    store = Store(directory, fallback)
    return Resume(store, data, pace, keep, best, on_nan, new_run, release)


@dataclass(frozen=True)
class Position:
    """Where a run stands.

    Attributes:
        step: batches trained since the run's start.
        epoch: the epoch that comes next, or is under way, counted from 0.
        batch: batches of that epoch that are done.
        steps_per_epoch: batches in an epoch; None if `fit` does not know.
        data_step: the step of the data whose batch comes next.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    steps_per_epoch: int | None = None
    data_step: int = 0

    def __str__(self) -> str:
        share = f", {self.batch / self.steps_per_epoch:.0%}" if self.steps_per_epoch else ""
        return f"step {self.step:,} (epoch {self.epoch + 1}{share})"


@dataclass
class _Pace:
    """When the next checkpoint is due."""

    seconds: float | None
    steps: int | None
    last: float = 0.0

    def due(self, step: int) -> bool:
        by_clock = self.seconds is not None and time.monotonic() - self.last >= self.seconds
        return by_clock or self.due_by_count(step)

    def due_by_count(self, step: int) -> bool:
        return self.steps is not None and step % self.steps == 0


class Resume(keras.callbacks.Callback):
    """What `resume` returns.

    It reads `self._model` while steps run, never `self.model`: on JAX that property puts the
    whole state back on the model, each time.

    Attributes:
        run: the run's name, such as "run-0003".
        initial_step: the step this `fit` continued at; 0 for a new run.
        position: where the run stands.
        ledger: where the time went.
        messages: what it has told the user, oldest first.
    """

    def __init__(
        self,
        store: Store,
        data: Any,
        pace: _Pace,
        keep: int,
        best: str | None,
        on_nan: str,
        new_run: bool,
        release: bool,
    ) -> None:
        super().__init__()
        self.store, self.data = store, data
        self.run = ""
        self.initial_step = 0
        self.position = Position()
        self.ledger = Ledger()
        self.messages: list[str] = []
        self._pace, self._keep, self._best_name, self._on_nan = pace, keep, best, on_nan
        self._new_run, self._release = new_run, release
        self._best: tuple[float, int] | None = None  # value and step
        self._snapshot = state.Snapshot()
        self._writer = ThreadPoolExecutor(1, "colabtpu-checkpoint")
        self._writing: Future[Checkpoint] | None = None
        self._interrupted = Interruptions()
        self._loss: deque[tuple[int, Any]] = deque()  # steps and losses not yet looked at
        self._watched: Any = None
        self._begun: int | None = None  # the batch under way
        self._saved: Position | None = None
        self._epoch_metrics: dict[str, np.ndarray] | None = None
        self._restored: dict[str, np.ndarray] | None = None
        self._rollbacks = 0
        self._clock = 0.0
        self._compiled = False

    # What Keras calls. Not the ends of batches: for those Keras would wait for the device at
    # every step, to turn the logs into numbers.

    def on_train_begin(self, logs: Any = None) -> None:
        self._build()
        self._about = {"model": state.describe(self.model), "data": self._identity()}
        previous = None if self._new_run else self.store.newest_run()
        self._new_run = False  # a second fit of this callback continues
        self.run = previous or self.store.new_run()
        self._token = self.store.claim(self.run)
        folder = self.store.directory / self.run
        self.ledger = Ledger(folder / "ledger.json" if isinstance(folder, Path) else None)
        self.position = Position(data_step=getattr(self.data, "step", 0))
        self._restored = self._saved = None
        self._rollbacks = 0
        if previous:
            self._continue()
        elif self._knows_data:
            self.data.seek(self.position.data_step)
        self.initial_step = self.position.step
        self._interrupted.catch()
        self._pace.last = self._clock = self._beat = time.monotonic()
        self._compiled = False
        self._loss.clear()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._model._initial_epoch = None  # it must not outlive this fit
        first = 0
        if self._restored is not None and epoch == self.position.epoch:
            first = self.position.batch
            if first:
                state.restore_metrics(self.model, self._restored)
        self._restored = self._epoch_metrics = None
        data_step = getattr(self.data, "step", self.position.data_step)
        steps = (self.params or {}).get("steps")
        self.position = Position(self.position.step, epoch, first, steps, data_step)
        self._begun = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._watch()
        self._advance(batch)
        self._begun = batch
        if not self._compiled:
            return
        if self._interrupted.number is not None:
            self._stop()
        elif self._is_sound() and self.position.batch and self._pace.due(self.position.step):
            self._save()

    def on_test_begin(self, logs: Any = None) -> None:
        self._end_batches()
        if self.position.batch != self.position.steps_per_epoch:  # stopped inside the epoch
            self._epoch_metrics = state.metrics(self.model)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._interrupted.number is not None and self._interrupted.caught:
            self._finish_epoch()
            self._stop()

    def on_test_end(self, logs: Any = None) -> None:
        self._account("evaluate")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end_batches()
        if not self._is_sound(now=True):
            return
        self._finish_epoch()
        if self._interrupted.number is not None:
            self._stop()
        elif self._is_best(logs or {}):
            self._collect()
            self._save()
        elif self._pace.due(self.position.step):
            self._save()

    def on_train_end(self, logs: Any = None) -> None:
        self._unwatch()
        if self._rollbacks <= MOST_ROLLBACKS:
            self._save(finish=True)
        self._interrupted.release()
        self.ledger.save()
        if self._release:
            release_runtime()

    # Continuing.

    @property
    def _knows_data(self) -> bool:
        return hasattr(self.data, "seek")

    def _build(self) -> None:
        if self._knows_data:
            state.build(self.model, self.data[0])
        elif not self.model.built or not self.model.optimizer.built:
            raise ColabTPUError(
                "The model or its optimizer has no variables before the first step, so a saved "
                "state cannot be put into them.",
                "Pass the batches, resume(directory, train), or call model.build(...) and "
                "model.optimizer.build(model.trainable_variables) first.",
            )

    def _identity(self) -> dict[str, Any]:
        return dict(getattr(self.data, "identity", {}))

    def _continue(self) -> None:
        found, damaged = self.store.newest_whole(self.run)
        for folder, damage in damaged:
            self._say(f"damaged and ignored: {folder}: {damage}")
            self.store.set_aside(folder)
        if found is None:
            self._say(f"{self.run} holds no whole checkpoint: starting it from the beginning")
            if self._knows_data:
                self.data.seek(self.position.data_step)
            return
        changed = list(state.differences(found.manifest["about"], self._about))
        if changed:
            raise ColabTPUError(
                f"{self.run} was saved by something else (saved -> now):\n    "
                + "\n    ".join(changed[:12])
                + (f"\n    and {len(changed) - 12} more" if len(changed) > 12 else ""),
                "Undo the change to continue that run, or pass new_run=True to begin another "
                f"beside it; {found.path} is kept.",
            )
        arrays = found.arrays()
        state.restore(self.model, arrays)
        saved = Position(**found.manifest["position"])
        self._best = tuple(found.manifest["best"]) if found.manifest["best"] else None
        self.position = self._in_this_fit(saved)
        self._restored, self._saved = arrays, self.position
        self._model._initial_epoch = self.position.epoch
        if self._knows_data:
            self.data.seek(self.position.data_step, self.position.batch)
        self._say(self._continuing(found))

    def _in_this_fit(self, saved: Position) -> Position:
        """The saved position, with epochs counted as this `fit` counts them."""
        steps = (self.params or {}).get("steps")
        if not self._knows_data and saved.batch:
            self._say(
                f"these data cannot begin inside an epoch: {saved.batch:,} batches of epoch "
                f"{saved.epoch + 1} come again"
            )
            return Position(saved.step, saved.epoch, 0, steps, 0)
        if saved.steps_per_epoch and steps and steps != saved.steps_per_epoch:
            done = saved.epoch * saved.steps_per_epoch + saved.batch
            self._say(f"an epoch had {saved.steps_per_epoch:,} steps and now has {steps:,}")
            return Position(saved.step, done // steps, done % steps, steps, saved.data_step)
        return Position(saved.step, saved.epoch, saved.batch, steps, saved.data_step)

    def _continuing(self, found: Checkpoint) -> str:
        number = int(self.run[4:])
        ended, reached = self._last_heartbeat()
        lost = max(0.0, ended - found.manifest["time"]) if ended else 0.0
        said = f"continuing run {number} at {self.position}"
        if reached > found.step:
            self.ledger.add("lost", lost)
            self.ledger.add("train", -lost)
            said += f", saved {lost:,.0f} s before the interruption"
        if self.position.epoch >= (self.params or {}).get("epochs", np.inf):
            said += ": all its epochs are done; raise `epochs`, or pass new_run=True"
        return said

    # Saving.

    def _advance(self, batches: int) -> None:
        """Notes that so many batches of this epoch are done."""
        here = self.position
        done = batches - here.batch
        if done <= 0:
            return
        self.position = replace(
            here, step=here.step + done, batch=batches, data_step=here.data_step + done
        )
        self._account("train" if self._compiled else "compile")
        self._compiled = True
        self._heartbeat()

    def _end_batches(self) -> None:
        if self._begun is not None:
            self._advance(self._begun + self._model.steps_per_execution)
            self._begun = None

    def _finish_epoch(self) -> None:
        """The next epoch comes next, unless this one was stopped inside."""
        here = self.position
        if here.steps_per_epoch is not None and here.batch != here.steps_per_epoch:
            return
        self.position = Position(here.step, here.epoch + 1, 0, here.steps_per_epoch, here.data_step)

    def _save(self, finish: bool = False) -> None:
        """Copies the state, and has it written.

        While the last one is still being written, a checkpoint by the clock comes a step later;
        one by the count of steps waits, so that it is the state of that step.
        """
        wait = finish or self._pace.due_by_count(self.position.step)
        if self._writing is not None and not wait and not self._writing.done():
            return
        start = time.monotonic()
        self._collect()
        for flush in self._model.__dict__.get(FLUSH, {}).values():
            flush()
        if self.position in (self._saved, Position(data_step=self.position.data_step)):
            return  # saved already, or nothing to save yet
        arrays = self._snapshot.take(self.model) | (self._epoch_metrics or {})
        manifest = {
            "position": vars(self.position),
            "about": self._about,
            "best": self._best,
            "time": time.time(),
            "token": self._token,
            "keras": keras.__version__,
            "engine": keras.backend.backend(),
        }
        step, best = self.position.step, self._best and self._best[1]
        self._saved = self.position
        self._writing = self._writer.submit(self._write, step, arrays, manifest, best)
        self._pace.last = time.monotonic()
        self.ledger.add("checkpoint", time.monotonic() - start)
        self._clock = time.monotonic()
        if finish:
            self._collect()

    def _write(
        self, step: int, arrays: dict[str, np.ndarray], manifest: dict[str, Any], best: int | None
    ) -> Checkpoint:
        made = self.store.commit(self.run, step, arrays, manifest)
        self.store.prune(self.run, self._keep, best)
        self.ledger.save()
        return made

    def _collect(self) -> None:
        """Waits for the checkpoint that is being written, and says what went wrong with it."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            made = writing.result()
        except OSError as error:
            self._saved = None
            self._say(
                f"no checkpoint at {self.store.directory}: {error.strerror or error}; training "
                "goes on, the last whole checkpoint stays, the next save tries again"
            )
            return
        if made.path.is_relative_to(self.store.directory):
            return
        self._say(
            f"{self.store.directory} cannot be written: the newest checkpoint is in "
            f"{made.path} on this machine only; the next save tries again"
        )

    def _stop(self) -> None:
        self._save(finish=True)
        self._say(f"saved at {self.position}; run this again to continue")
        self.ledger.save()
        self._unwatch()
        self._model.stop_training = True
        self._interrupted.deliver()

    def _is_best(self, logs: dict[str, Any]) -> bool:
        value = logs.get(self._best_name) if self._best_name else None
        if value is None or not np.isfinite(value):
            return False
        better = np.greater if "acc" in str(self._best_name) else np.less
        if self._best is not None and not better(value, self._best[0]):
            return False
        self._best = (float(value), self.position.step)
        return True

    # A loss that is no number.

    def _watch(self) -> None:
        """Sees each step's logs on the device, where Keras hands callbacks numbers."""
        if self._watched is not None or self._on_nan == "ignore":
            return
        function = self._model.train_function

        def watched(*args: Any) -> Any:
            out = function(*args)
            logs = out[0] if isinstance(out, tuple) else out
            if isinstance(logs, dict) and "loss" in logs:
                self._loss.append((self.position.step + 1, logs["loss"]))
            return out

        self._model.train_function = watched
        self._watched = (watched, function)

    def _unwatch(self) -> None:
        if self._watched and self._model.train_function is self._watched[0]:
            self._model.train_function = self._watched[1]
        self._watched = None

    def _is_sound(self, now: bool = False) -> bool:
        """Looks at the loss of the step before the last, which the device has done: no waiting.

        `now` looks at the last one too; no state is saved before its own loss was seen.
        """
        if self._rollbacks > MOST_ROLLBACKS:
            return False
        now = now or self._pace.due(self.position.step)
        while len(self._loss) > (0 if now else 1):
            step, loss = self._loss.popleft()
            if not np.isfinite(float(loss)):
                self._broken(step)
                return False
        return True

    def _broken(self, step: int) -> None:
        self._loss.clear()
        where = self._keep_batch(step)
        said = f"the loss of step {step:,} is no number{where}"
        self._collect()
        good, _ = self.store.newest_whole(self.run)
        self._rollbacks += 1
        if self._on_nan == "roll back" and good and self._rollbacks <= MOST_ROLLBACKS:
            # The step count goes on: the schedule and the curves have seen those batches.
            iterations = self._iterations()
            state.restore(self.model, good.arrays(), skip=(state.RANDOM,))
            self._model.optimizer._iterations.assign(iterations)
            self._say(f"{said}; back to the state of step {good.step:,}, on with the next batch")
            return
        self._rollbacks = MOST_ROLLBACKS + 1  # nothing of this state is saved
        self._model.stop_training = True
        last = f"; the last good checkpoint is step {good.step:,}" if good else ""
        self._say(f"{said}; stopped{last}. Lower the learning rate, or clip the gradients")

    def _iterations(self) -> Any:
        return keras.ops.convert_to_numpy(self.model.optimizer._iterations)

    def _keep_batch(self, step: int) -> str:
        if not self._knows_data:
            return ""
        data_step = self.position.data_step - (self.position.step - step) - 1
        arrays = {
            f"array_{i}": array for i, array in enumerate(keras.tree.flatten(self.data[data_step]))
        }
        arrays["example_numbers"] = self.data.example_numbers(data_step)
        path = Path(str(self.store.directory / self.run), f"no-number-step-{step:08}.npz")
        try:
            np.savez(path, **arrays)
        except OSError:
            return f" (its batch is data[{data_step}])"
        return f" (its batch is data[{data_step}], kept in {path})"

    # Telling the time.

    def _account(self, kind: str) -> None:
        now = time.monotonic()
        self.ledger.add(kind, now - self._clock)
        self._clock = now

    def _heartbeat(self) -> None:
        """Notes how far the run got, for the next start to know what was lost."""
        if self._clock - self._beat < HEARTBEAT_SECONDS and self.position.step > 1:
            return
        self._beat = self._clock
        path = self.store.directory / self.run / "heartbeat"
        self._writer.submit(_beat, path, f"{time.time()} {self.position.step}")

    def _last_heartbeat(self) -> tuple[float, int]:
        try:
            moment, step = (self.store.directory / self.run / "heartbeat").read_text().split()
        except (OSError, ValueError):
            return 0.0, 0
        return float(moment), int(step)

    def _say(self, message: str) -> None:
        self.messages.append(message)
        print(f"checkpoint: {message}", flush=True)


def _beat(path: Path, text: str) -> None:
    try:
        write_atomically(path, text.encode())
    except OSError:
        return  # only the count of what was lost is poorer for it
