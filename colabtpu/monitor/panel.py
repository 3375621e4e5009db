"""The live panel: what a fit is doing, in one place that updates, with a stop button.

    model.fit(..., callbacks=callbacks("logs", tpu, panel=True))

Core ipywidgets only, 7.7.1 (Colab) to 8.x: one HTML widget whose value is replaced, so that
an hour of training and a reconnect leave one picture, not thousands. Without widgets the same
goes to one display that is updated; without a notebook to lines of text, ever more rarely.
A thread of its own draws, so that the time goes on while the program compiles.
"""

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import keras

from colabtpu.monitor import comms, status
from colabtpu.monitor.panel_state import PanelState, as_html, as_text, duration
from colabtpu.monitor.training import TrainingLog

CURVE_POINTS = 120
POLL_SECONDS = 0.5
# A drawing a second while somebody is likely to look, then ever fewer.
DRAW_SECONDS = (1.0, 2.0, 5.0)
# Where the data wait is worth a warning, and how much of the gradient's usual size is too much.
WAIT_SHARE = 0.2
EXPLODING = 10.0


class View(Protocol):
    """Where a state is shown."""

    def show(self, state: PanelState) -> None: ...


class Panel(keras.callbacks.Callback):
    """Shows the state of a fit while it runs.

    Args:
        log: the callback that measures.
        save: called when the run was stopped by the button; `None` saves the model to
            `stopped.keras` in the run's folder.
        view: where to show it; `None` picks widgets, a notebook's display, or text.
    """

    async_safe = True

    def __init__(
        self,
        log: TrainingLog,
        save: Callable[[keras.Model], None] | None = None,
        view: View | None = None,
    ) -> None:
        super().__init__()
        self._log = log
        self._save = save
        self._given_view = view
        self._view: View | None = None
        self._stop_asked = threading.Event()
        self._thread: _Drawing | None = None
        self._phase = status.Phase("starting", time.monotonic())
        self._losses: deque[float] = deque(maxlen=2 * CURVE_POINTS)
        self._gradients: deque[float] = deque(maxlen=200)
        self._epoch = 0
        self._first_step = 0
        self._last_read = -1
        self._next_poll = 0.0

    def ask_to_stop(self) -> None:
        """Stops the fit after the step that runs, and saves; what the button does."""
        self._stop_asked.set()

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        self._stop_drawing()
        self._stop_asked.clear()
        self._first_step = self._log.step
        self._losses.clear()
        self._gradients.clear()
        self._enter("compiling")
        self._view = self._given_view or choose_view(self.ask_to_stop)
        self._thread = _Drawing(self.draw)
        self._thread.start()

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._epoch = epoch + 1

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._note()
        now = time.monotonic()
        if now >= self._next_poll:
            self._next_poll = now + POLL_SECONDS
            comms.process_messages()
        if self._stop_asked.is_set():
            self._model.stop_training = True

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        self._enter("evaluating")

    def on_test_end(self, logs: dict[str, float] | None = None) -> None:
        self._enter("training")

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        self._note()
        if self._stop_asked.is_set():
            self._enter("saving")
            self._save_model()
        self._enter("stopped and saved" if self._stop_asked.is_set() else "done")
        self._stop_drawing()
        self.draw()

    def state(self) -> PanelState:
        """Returns what the panel shows now."""
        phase = status.current() or self._phase
        params = self.params or {}
        epochs, in_epoch = params.get("epochs") or 0, params.get("steps") or 0
        step, last_step = self._log.step - self._first_step, epochs * in_epoch
        step_seconds = self._log.meter.step_seconds
        left = (last_step - step) * step_seconds if last_step and step_seconds else None
        return PanelState(
            phase=phase.name,
            phase_seconds=time.monotonic() - phase.since,
            epoch=self._epoch,
            epochs=epochs,
            step=step,
            last_step=last_step,
            eta_seconds=left if phase.name in ("training", "evaluating", "saving") else None,
            losses=_thinned(tuple(self._losses)),
            numbers=dict(self._log.latest),
            checkpoint=_checkpoint_line(),
            warnings=self._warnings(),
        )

    def draw(self) -> None:
        """Shows the current state once."""
        if self._view is not None:
            self._view.show(self.state())

    def _note(self) -> None:
        """Takes up the newest numbers, once each; the first one ends compilation."""
        if self._log.read_steps == self._last_read:
            return
        self._last_read = self._log.read_steps
        numbers = self._log.latest
        if "loss" in numbers:
            self._losses.append(numbers["loss"])
        if math.isfinite(numbers.get("health/gradient_norm", math.inf)):
            self._gradients.append(numbers["health/gradient_norm"])
        if self._phase.name == "compiling" and self._log.read_steps:
            self._enter("training")

    def _warnings(self) -> tuple[str, ...]:
        numbers, found = self._log.latest, []
        if not math.isfinite(numbers.get("loss", 0.0)):
            found.append("The loss is not a number: lower the learning rate, or clip gradients.")
        usual = sorted(self._gradients)[len(self._gradients) // 2] if self._gradients else 0.0
        norm = numbers.get("health/gradient_norm", 0.0)
        if len(self._gradients) > 10 and norm > EXPLODING * usual > 0:
            found.append(
                f"The gradient is {norm / usual:.0f} times its usual size: clip it, "
                "for example global_clipnorm=1.0."
            )
        share = numbers.get("speed/data_wait_share", 0.0)
        if share > WAIT_SHARE:
            found.append(
                f"The device waits for data {share:.0%} of the time: prefetch, or prepare "
                "batches ahead."
            )
        if self._log.files.lost_events:
            found.append(f"{self._log.files.lost_events} log events could not be written.")
        return tuple(found)

    def _save_model(self) -> None:
        if self._save is not None:
            self._save(self.model)
            return
        path = self._log.folder / "stopped.keras"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.model.save(path)
            print(f"Stopped; the model is in {path}")
        except OSError as error:
            print(f"Stopped; the model could not be saved to {path}: {error}")

    def _enter(self, phase: str) -> None:
        self._phase = status.Phase(phase, time.monotonic())

    def _stop_drawing(self) -> None:
        if self._thread is not None:
            self._thread.stop()
            self._thread = None


class _Drawing(threading.Thread):
    """Draws until it is told to stop, or until the cell that started it has ended."""

    def __init__(self, draw: Callable[[], None]) -> None:
        super().__init__(name="colabtpu-panel", daemon=True)
        self._draw = draw
        self._over = threading.Event()
        # After an interrupted fit nobody calls `on_train_end`.
        self._shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if self._shell is not None:
            self._shell.events.register("post_run_cell", self._end_of_cell)

    def run(self) -> None:
        start = time.monotonic()
        while True:
            self._draw()
            minutes = (time.monotonic() - start) / 60
            if self._over.wait(DRAW_SECONDS[0 if minutes < 1 else 1 if minutes < 10 else 2]):
                return

    def stop(self) -> None:
        self._over.set()
        if self.is_alive():
            self.join(5)
        if self._shell is not None:
            self._shell.events.unregister("post_run_cell", self._end_of_cell)
            self._shell = None

    def _end_of_cell(self, *_: Any) -> None:
        self._over.set()


class WidgetView:
    """Shows the state in an HTML widget, with a stop button under it."""

    def __init__(self, on_stop: Callable[[], None]) -> None:
        import ipywidgets
        from IPython.display import display

        self._html = ipywidgets.HTML()
        self._button = ipywidgets.Button(description="Stop and save", icon="stop")
        self._button.on_click(lambda _: self._clicked(on_stop))
        display(ipywidgets.VBox([self._html, self._button]))

    def show(self, state: PanelState) -> None:
        if state.phase.startswith(("done", "stopped")):
            self._button.disabled = True
        self._html.value = as_html(state)

    def _clicked(self, on_stop: Callable[[], None]) -> None:
        self._button.disabled = True
        self._button.description = "Stopping..."
        on_stop()


class DisplayView:
    """Shows the state in one display of a notebook, replaced at each update."""

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self._handle = display(HTML(""), display_id=True)

    def show(self, state: PanelState) -> None:
        from IPython.display import HTML

        self._handle.update(HTML(as_html(state)))


class TextView:
    """Prints the state, each time after a pause twice as long, and when the phase changes."""

    def __init__(self, write: Callable[[str], None] = print) -> None:
        self._write = write
        self._phase = ""
        self._pause = 5.0
        self._next = -math.inf

    def show(self, state: PanelState) -> None:
        now = time.monotonic()
        if state.phase == self._phase and now < self._next:
            return
        if state.phase == self._phase:
            self._pause = min(2 * self._pause, 600.0)
        self._phase = state.phase
        self._next = now + self._pause
        self._write(as_text(state))


def choose_view(on_stop: Callable[[], None]) -> View:
    """Returns the best view that this process can have."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or not hasattr(shell, "kernel"):
        return TextView()
    try:
        return WidgetView(on_stop)
    except ImportError:
        return DisplayView()


def _checkpoint_line() -> str:
    last = status.last_checkpoint()
    return f"step {last.step:,}, {duration(time.time() - last.at)} ago" if last else ""


def _thinned(values: tuple[float, ...]) -> tuple[float, ...]:
    """At most CURVE_POINTS of the values, the last one among them."""
    stride = max(1, math.ceil(len(values) / CURVE_POINTS))
    return values[::-1][::stride][::-1]
