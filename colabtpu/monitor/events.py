"""TensorBoard event files without TensorFlow, written by a thread that never stops training.

    writer = EventWriter("logs/train")
    writer.scalars(step, {"loss": 2.3})
    writer.close()

Records go through the tensorboard package's own `RecordWriter` and protocol buffers. Its
`EventFileWriter` is not used, because it opens its file through `tensorboard.compat.tf`,
which imports TensorFlow wherever that is installed, and because one failed write stops it
for good. Here a full disk or a folder that vanishes costs events, is said once, and writing
goes on in a new file when it can.
"""

import itertools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from colabtpu.errors import ColabTPUError, InvalidArgumentError

FLUSH_SECONDS = 5.0
# Events that may wait for a slow disk before new ones are dropped: a bound on memory.
QUEUE_EVENTS = 5_000

_file_numbers = itertools.count()
_STOP = object()


class EventWriter:
    """Appends events to one folder, from a thread of its own.

    Args:
        folder: the run folder, made when missing; TensorBoard shows it as one run.
        start_step: the last step that was done before this run; TensorBoard then drops the
            later steps of an earlier, interrupted run in the same folder.
        say: called with one line when events are lost, and when writing works again.

    Raises:
        InvalidArgumentError: `folder` is a URL, not a local folder.
        ColabTPUError: the tensorboard package is not installed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        start_step: int | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        if "://" in os.fspath(folder):
            raise InvalidArgumentError(
                f"The log folder must be on this machine. Received: {os.fspath(folder)!r}",
                "Log to a local folder and copy it, for example `gsutil rsync -r logs gs://...`.",
            )
        self.folder = Path(folder)
        self.lost_events = 0
        self._proto = _protocol_buffers()
        self._say = say
        self._queue: queue.Queue[Any] = queue.Queue(QUEUE_EVENTS)
        self._file = _EventFile(self.folder, start_step, self._proto)
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="colabtpu-events", daemon=True)
        self._thread.start()

    def scalars(
        self, step: int, values: Mapping[str, float], wall_time: float | None = None
    ) -> None:
        """Writes `values`, tag -> number, at `step` as one event."""
        summary = self._proto.Summary()
        for tag, value in values.items():
            summary.value.add(tag=tag, simple_value=value)
        self.add(step, summary, wall_time)

    def add(self, step: int, summary: Any, wall_time: float | None = None) -> None:
        """Queues a `Summary` protocol buffer at `step`; returns at once."""
        event = self._proto.Event(
            step=step, wall_time=time.time() if wall_time is None else wall_time, summary=summary
        )
        try:
            self._queue.put_nowait(event.SerializeToString())
        except queue.Full:
            self._lose("the disk is slower than the training")

    def flush(self, timeout_seconds: float = 10.0) -> bool:
        """Waits until all events so far are on disk; returns False when they are not in time."""
        done = threading.Event()
        try:
            self._queue.put(done, timeout=timeout_seconds)
        except queue.Full:
            return False
        return done.wait(timeout_seconds) and not self._broken

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Writes what is queued and ends the thread; safe to call twice."""
        if not self._thread.is_alive():
            return
        try:
            self._queue.put(_STOP, timeout=timeout_seconds)
        except queue.Full:
            self._lose("the disk did not answer")
            return
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        flush_at = time.monotonic()
        while True:
            try:
                item = self._queue.get(timeout=max(0.0, flush_at - time.monotonic()))
            except queue.Empty:
                item = None
            if isinstance(item, bytes):
                self._attempt(self._write, item)
            if not isinstance(item, bytes) or time.monotonic() >= flush_at:
                self._attempt(self._file.flush)
                flush_at = time.monotonic() + FLUSH_SECONDS
            if isinstance(item, threading.Event):
                item.set()
            if item is _STOP:
                self._attempt(self._file.close)
                return

    def _write(self, record: bytes) -> None:
        self._file.write(record)
        if self._broken:
            self._broken = False
            self._say(
                f"Event files: writing to {self.folder} works again; "
                f"{self.lost_events} events were lost."
            )

    def _attempt(self, action: Callable[..., None], *args: Any) -> None:
        # A reader stops at a torn record, so what follows a failure needs a file of its own.
        try:
            action(*args)
        except OSError as error:
            self._file.abandon()
            self._lose(str(error))

    def _lose(self, reason: str) -> None:
        self.lost_events += 1
        if not self._broken:
            self._broken = True
            self._say(
                f"Event files: cannot write to {self.folder} ({reason}). Training goes on; "
                "curves have a gap until this works again."
            )


class _EventFile:
    """One events file, opened on the first write and again after `abandon`."""

    def __init__(self, folder: Path, start_step: int | None, proto: Any) -> None:
        self._folder = folder
        self._start_step = start_step
        self._proto = proto
        self._records: Any = None
        self._path = folder

    def write(self, record: bytes) -> None:
        if self._records is None:
            self._open()
        self._records.write(record)

    def flush(self) -> None:
        if self._records is None:
            return
        self._records.flush()
        # A file that was deleted under us takes writes without complaint, and keeps nothing.
        if not self._path.exists():
            raise FileNotFoundError(f"{self._path.name} was deleted")

    def close(self) -> None:
        if self._records is not None:
            self._records.close()
            self._records = None

    def abandon(self) -> None:
        try:
            self.close()
        except OSError:
            self._records = None

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = self._folder / (
            f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}"
            f".{os.getpid()}.{next(_file_numbers)}"
        )
        # RecordWriter writes header, data and checksum in one call; a large buffer makes
        # that one system call for many records, which matters on a mounted drive.
        self._records = self._proto.RecordWriter(self._path.open("wb", buffering=1 << 18))
        first = self._proto.Event(wall_time=time.time(), file_version="brain.Event:2")
        self._records.write(first.SerializeToString())
        if self._start_step is not None:
            start = self._proto.Event(wall_time=time.time(), step=self._start_step + 1)
            start.session_log.status = self._proto.SessionLog.START
            self._records.write(start.SerializeToString())
            self._start_step = None


class _protocol_buffers:
    """The parts of the tensorboard package that the writer uses; none imports TensorFlow."""

    def __init__(self) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise ColabTPUError(
                f"Event files need the tensorboard package ({error}).",
                "Run `pip install tensorboard` (it does not bring TensorFlow).",
            ) from error
        self.Event, self.SessionLog = Event, SessionLog
        self.Summary, self.RecordWriter = Summary, RecordWriter
