"""Reads a profiler's trace without the Profile tab: where the device's time went.

    found = analyse(Path("logs/run"))         # the newest trace under it
    found.matrix_share, found.collective_share, found.idle_share

A trace is an `XSpace` protocol buffer (openxla/xla, xla/tsl/profiler/protobuf/xplane.proto).
The few fields needed are read from the wire format directly, so that it takes neither
TensorFlow nor the xprof package.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colabtpu.errors import ColabTPUError

# By the name of an HLO instruction, its category, or the name of a TensorFlow op.
_MATRIX = re.compile(r"dot|conv(?!ert)|matmul|gemm|einsum|cublas", re.IGNORECASE)
_COLLECTIVE = re.compile(
    r"all-?reduce|all-?gather|reduce-?scatter|all-?to-?all|collective|ncclallreduce", re.IGNORECASE
)
# What the host's threads record beside operations.
_HOST_NOISE = re.compile(
    r"^(ThreadpoolListener|ThunkExecutor|ExecutorState|PjRt|PythonRef|Eager|TFE_|Task|Wait|end: )"
    r"|^\$|::|[()]|^\S+\s"
)


@dataclass(frozen=True)
class TraceShares:
    """Shares of a traced stretch of time, 0 to 1.

    Attributes:
        device: which plane was read, such as `"/device:TPU:0"`.
        seconds: how long the stretch was.
        matrix_share: of the busy time, in matrix products and convolutions.
        collective_share: of the busy time, in communication between devices.
        idle_share: of the stretch, with no operation running.
        top: the longest operations, `(name, share of the busy time)`.
    """

    device: str
    seconds: float
    matrix_share: float
    collective_share: float
    idle_share: float
    top: tuple[tuple[str, float], ...]


def newest_trace(folder: Path) -> Path:
    """Returns the newest trace under `folder`.

    Raises:
        ColabTPUError: there is none.
    """
    traces = sorted(
        folder.glob("**/plugins/profile/*/*.xplane.pb"), key=lambda p: p.stat().st_mtime
    )
    if not traces:
        raise ColabTPUError(
            f"No trace under {folder}.", "Make one: callbacks(..., profile_steps=3)."
        )
    return max(traces, key=lambda path: path.stat().st_mtime)


def analyse(path: Path) -> TraceShares:
    """Returns where the time went in a trace.

    Args:
        path: an `.xplane.pb` file, or a folder with traces, of which the newest is taken.

    Returns:
        The shares on the first accelerator, or on the host's worker threads without one.

    Raises:
        ColabTPUError: no trace, or none with operations in it.
    """
    path = newest_trace(path) if path.is_dir() else path
    planes = [_plane(body) for number, body in _fields(path.read_bytes()) if number == 1]
    for plane in sorted(planes, key=lambda p: (not p.is_device, p.name)):
        operations = plane.operations()
        if operations:
            return _shares(plane.name, operations)
    raise ColabTPUError(
        f"The trace {path.name} holds no operations.", "Trace more steps, after the first ones."
    )


@dataclass(frozen=True)
class _Operation:
    name: str
    category: str
    start: int  # picoseconds
    end: int


@dataclass(frozen=True)
class _Line:
    name: str
    operations: list[_Operation]


@dataclass(frozen=True)
class _Plane:
    name: str
    lines: list[_Line]

    @property
    def is_device(self) -> bool:
        return bool(re.match(r"/device:(TPU|GPU):\d+", self.name))

    def operations(self) -> list[_Operation]:
        if self.is_device:
            ops = [line for line in self.lines if line.name == "XLA Ops"] or [
                line for line in self.lines if line.name.startswith("Stream")
            ]
            return [op for line in ops for op in line.operations]
        if not self.name.startswith("/host:CPU"):
            return []
        return [
            op
            for line in self.lines
            if line.name.startswith("tf_")
            for op in line.operations
            if not _HOST_NOISE.search(op.name) and op.end > op.start
        ]


def _shares(device: str, operations: list[_Operation]) -> TraceShares:
    start, end = min(op.start for op in operations), max(op.end for op in operations)
    busy = sum(op.end - op.start for op in operations) or 1
    by_name: dict[str, int] = {}
    matrix = collective = 0
    for op in operations:
        length = op.end - op.start
        label = f"{op.name} {op.category}"
        if _COLLECTIVE.search(label):
            collective += length
        elif _MATRIX.search(label):
            matrix += length
        name = re.sub(r"[.:]?\d+$", "", op.name)
        by_name[name] = by_name.get(name, 0) + length
    top = sorted(by_name.items(), key=lambda item: -item[1])[:5]
    return TraceShares(
        device=device,
        seconds=(end - start) / 1e12,
        matrix_share=matrix / busy,
        collective_share=collective / busy,
        idle_share=1 - _covered(operations) / max(end - start, 1),
        top=tuple((name, length / busy) for name, length in top),
    )


def _covered(operations: list[_Operation]) -> int:
    """Picoseconds in which at least one operation ran."""
    covered, reached = 0, -1
    for op in sorted(operations, key=lambda o: o.start):
        covered += max(0, op.end - max(op.start, reached))
        reached = max(reached, op.end)
    return covered


def _plane(body: bytes) -> _Plane:
    name, lines = "", []
    metadata: dict[int, bytes] = {}
    stat_names: dict[int, bytes] = {}
    for number, value in _fields(body):
        if number == 2:
            name = _text(value)
        elif number == 3:
            lines.append(value)
        elif number in (4, 5):
            entry = dict(_fields(value))
            (metadata if number == 4 else stat_names)[entry.get(1, 0)] = entry.get(2, b"")
    stats = {key: _text(dict(_fields(value)).get(2, b"")) for key, value in stat_names.items()}
    kinds = {key: _metadata(value, stats) for key, value in metadata.items()}
    return _Plane(name, [_line(line, kinds) for line in lines])


def _metadata(body: bytes, stats: dict[int, str]) -> tuple[str, str]:
    """An event's name, and its HLO category where the trace has one."""
    name, category = "", ""
    for number, value in _fields(body):
        if number == 2:
            name = _text(value)
        elif number == 5:
            stat = dict(_fields(value))
            if stats.get(stat.get(1, 0)) == "hlo_category":
                category = _text(stat[5]) if 5 in stat else stats.get(stat.get(7, 0), "")
    return name, category


def _line(body: bytes, kinds: dict[int, tuple[str, str]]) -> _Line:
    name, start, events = "", 0, []
    for number, value in _fields(body):
        if number == 2:
            name = _text(value)
        elif number == 3:
            start = value * 1000  # nanoseconds
        elif number == 4:
            events.append(dict(_fields(value)))
    operations = []
    for event in events:
        at, kind = start + event.get(2, 0), kinds.get(event.get(1, 0), ("", ""))
        operations.append(_Operation(*kind, at, at + event.get(3, 0)))
    return _Line(name, operations)


def _fields(body: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer message: its number, and an int or its bytes."""
    at = 0
    value: Any
    while at < len(body):
        key, at = _varint(body, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(body, at)
        elif kind == 2:
            size, at = _varint(body, at)
            value, at = body[at : at + size], at + size
        else:
            size = 8 if kind == 1 else 4
            value, at = body[at : at + size], at + size
        yield key >> 3, value


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = body[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
