"""Reads the program that libtpu made: what is in memory at its fullest, and what crosses chips.

    peak(text)          # (bytes, [Buffer, ...]) of the scheduled program
    collectives(text)   # [Collective("all-reduce", bytes=…, count=…), ...]

The text is HLO after scheduling, as libtpu dumps it: one instruction a line, in the order they
run, shapes with their layout on the chip (`f32[8,128]{1,0:T(8,128)}`; `S(1)` is on-chip memory,
which costs no HBM). Only the standard library is used, so the compiler's process can import it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_BITS = {"pred": 8, "s4": 4, "u4": 4, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^{}]*)\})?")
_LINE = re.compile(r"^\s*(ROOT )?%?([\w.\-<>]+) = (.+?) ([a-z][a-z0-9\-]*)\((.*)$")
_COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
    "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip
# Operations whose result is their operand's memory under another name.
_ALIASES = {"bitcast", "get-tuple-element", "tuple", "optimization-barrier", "copy-done",
            "all-reduce-done", "all-gather-done", "collective-permute-done", "async-done",
            "async-update", "while", "add-dependency"}  # fmt: skip


@dataclass(frozen=True)
class Buffer:
    """A piece of HBM.

    Attributes:
        size_bytes: with the padding that the chip's tiles ask for.
        shape: such as `"bf16[8,1024,3072]"`.
        op: the operation's path, such as `"jit(train_step)/jvp(layer_0)/dot_general"`.
        kind: the operation that makes it, such as `"fusion"`.
    """

    size_bytes: int
    shape: str
    op: str
    kind: str


@dataclass(frozen=True)
class Collective:
    """Traffic between chips, by kind.

    Attributes:
        kind: such as `"all-reduce"`.
        count: how often it runs in a step.
        size_bytes: of the arrays, on one device, all of them together.
    """

    kind: str
    count: int
    size_bytes: int


@dataclass(frozen=True)
class Instruction:
    """One line of HLO."""

    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """Names of the instructions that it reads."""
        return re.findall(r"%([\w.\-<>]+)", self.rest.split("), ", 1)[0])

    @property
    def op_name(self) -> str:
        """The path that the framework gave it, or nothing."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    def called(self) -> list[str]:
        """Computations that it runs."""
        return re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-<>]+)", self.rest)


def padded_bytes(shape: str, hbm_only: bool = True) -> int:
    """Returns the bytes of a shape on the chip, tiles filled up; tuples are summed.

    Args:
        shape: such as `"f32[1000,100]{1,0:T(8,128)}"`: 1000 x 128 x 4 bytes.
        hbm_only: leave out what lies in on-chip memory, `S(1)` and above.
    """
    return sum(
        _array_bytes(m[1], m[2], m[3] or "")
        for m in _SHAPE.finditer(shape)
        if not (hbm_only and re.search(r"S\([1-9]", m[3] or ""))
    )


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Returns the instructions of each computation by its name, and the entry's name."""
    found: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line[:1] in ("%", "E") and line.rstrip().endswith("{"):
            name = line.removeprefix("ENTRY ").split(" ", 1)[0].lstrip("%")
            entry = name if line.startswith("ENTRY ") else entry
            current = found.setdefault(name, [])
        elif current is not None and (match := _LINE.match(line)):
            current.append(Instruction(match[2], match[3], match[4], match[5]))
    return found, entry


def argument_bytes(text: str) -> list[int]:
    """Returns the bytes of each argument on one device, padding included, in order."""
    found, entry = computations(text)
    sizes = {
        int(i.rest.split(")", 1)[0]): padded_bytes(i.shape, hbm_only=False)
        for i in found.get(entry, [])
        if i.opcode == "parameter"
    }
    return [sizes[index] for index in sorted(sizes)]


def collectives(text: str) -> list[Collective]:
    """Returns the traffic between devices in one run of the program, largest first."""
    found, entry = computations(text)
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for instruction, times in _runs(found, entry, 1):
        kind = instruction.opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            size = padded_bytes(_result(instruction), hbm_only=False)
            counts[kind] = counts.get(kind, 0) + times
            sizes[kind] = sizes.get(kind, 0) + size * times
    return sorted(
        (Collective(kind, counts[kind], sizes[kind]) for kind in counts),
        key=lambda c: -c.size_bytes,
    )


def peak(text: str, largest: int = 12) -> tuple[int, list[Buffer]]:
    """Returns the temporary memory at the program's fullest moment, and the largest parts of it.

    A buffer lives from the line that makes it to the last line that reads it, through whatever
    aliases it. Arguments are not counted, nor what is returned in an argument's place.
    Loops count for what enters them, plus the fullest moment of their body.

    Args:
        text: a scheduled HLO module.
        largest: how many buffers to return.
    """
    found, entry = computations(text)
    total, live = _peak_of(found, entry, {}, _returned_in_place(text))
    live.sort(key=lambda b: -b.size_bytes)
    return total, live[:largest]


def _array_bytes(dtype: str, dims: str, layout: str) -> int:
    sizes = [int(d) for d in dims.split(",") if d]
    order, _, tiling = layout.partition(":")
    minor_to_major = [int(i) for i in order.split(",") if i.strip().isdigit()]
    tile = re.match(r"T\(([\d,]+)\)", tiling)
    if tile and len(minor_to_major) == len(sizes):
        for side, dim in zip(reversed(tile[1].split(",")), minor_to_major, strict=False):
            sizes[dim] = -(-sizes[dim] // int(side)) * int(side)
    items = 1
    for size in sizes:
        items *= size
    return items * _bits(dtype) // 8


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 0


def _result(instruction: Instruction) -> str:
    """The shape that a collective yields; a `-start` carries its operand in the same tuple."""
    if not instruction.opcode.endswith("-start") or instruction.opcode == "all-reduce-start":
        return instruction.shape
    shapes = [m[0] for m in _SHAPE.finditer(instruction.shape)]
    return shapes[1] if len(shapes) > 1 else instruction.shape


def _runs(
    found: dict[str, list[Instruction]], name: str, times: int
) -> Iterator[tuple[Instruction, int]]:
    """Every instruction that runs below `name`, with how often."""
    for instruction in found.get(name, []):
        yield instruction, times
        if instruction.opcode in ("fusion", "reduce", "all-reduce", "scatter", "sort", "map"):
            continue
        inner = times * _trips(instruction)
        for called in instruction.called():
            yield from _runs(found, called, inner)


def _trips(instruction: Instruction) -> int:
    count = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.rest)
    return int(count[1]) if instruction.opcode == "while" and count else 1


def _returned_in_place(text: str) -> set[int]:
    """Outputs that take an argument's place: donated weights and optimizer state."""
    header = text.partition("\n")[0]
    return {int(i) for i in re.findall(r"\{(\d+)\}: \(\d+, \{", header)}


def _peak_of(
    found: dict[str, list[Instruction]],
    name: str,
    done: dict[str, tuple[int, list[Buffer]]],
    in_place: set[int] | None = None,
) -> tuple[int, list[Buffer]]:
    if name in done:
        return done[name]
    lines = found.get(name, [])
    owners, made = _owners(lines)
    _free_returned(lines, made, in_place or set())
    last = {owner: index for index, i in enumerate(lines) for owner in _read(i, owners)}
    if lines:
        for owner in owners[lines[-1].name]:
            last[owner] = len(lines)
    live: dict[str, int] = {}
    total, best, at_best, inside = 0, 0, {}, ("", 0)
    for index, line in enumerate(lines):
        if line.name in made:
            live[line.name] = made[line.name]
            total += made[line.name]
        body = max((_peak_of(found, c, done)[0] for c in _bodies(line)), default=0)
        if total + body > best:
            best, at_best = total + body, dict(live)
            inside = max(((c, _peak_of(found, c, done)[0]) for c in _bodies(line)),
                         key=lambda c: c[1], default=("", 0))  # fmt: skip
        for owner in [o for o in live if last.get(o, index) <= index]:
            total -= live.pop(owner)
    by_name = {line.name: line for line in lines}
    buffers = [_buffer(by_name[n], size, by_name) for n, size in at_best.items()]
    if inside[0]:
        buffers += _peak_of(found, inside[0], done)[1]
    done[name] = (best, buffers)
    return done[name]


def _bodies(line: Instruction) -> list[str]:
    return line.called() if line.opcode in ("while", "conditional", "call") else []


def _owners(lines: list[Instruction]) -> tuple[dict[str, set[str]], dict[str, int]]:
    """Which memory each name stands for, and the size of what each line allocates."""
    owners: dict[str, set[str]] = {}
    made: dict[str, int] = {}
    for line in lines:
        if line.opcode in ("parameter", "constant"):
            owners[line.name] = set()
        elif line.opcode in _ALIASES or _in_place(line):
            owners[line.name] = set().union(*(owners.get(o, set()) for o in line.operands))
        else:
            owners[line.name] = {line.name}
            made[line.name] = padded_bytes(line.shape)
            if line.opcode.endswith("-start"):
                owners[line.name] |= set().union(*(owners.get(o, set()) for o in line.operands))
                made[line.name] = padded_bytes(_started(line))
    return owners, made


def _free_returned(lines: list[Instruction], made: dict[str, int], in_place: set[int]) -> None:
    """What is written straight into an argument's place is no memory of its own."""
    if not lines or lines[-1].opcode != "tuple":
        return
    by_name = {line.name: line for line in lines}
    for index, operand in enumerate(lines[-1].operands):
        maker = by_name.get(operand)
        if index not in in_place or maker is None:
            continue
        size = padded_bytes(maker.shape)
        while maker is not None and maker.opcode in _ALIASES and maker.opcode != "while":
            maker = by_name.get(next(iter(maker.operands), ""))
        if maker is not None and maker.name in made:
            made[maker.name] = max(made[maker.name] - size, 0)


def _started(line: Instruction) -> str:
    """What a `-start` allocates: its first element is the operand for copies' destination."""
    shapes = [m[0] for m in _SHAPE.finditer(line.shape)]
    if line.opcode == "copy-start":
        return shapes[0]
    return shapes[1] if len(shapes) > 1 else line.shape


def _in_place(line: Instruction) -> bool:
    return line.opcode == "dynamic-update-slice" or "output_to_operand_aliasing" in line.rest


def _read(line: Instruction, owners: dict[str, set[str]]) -> set[str]:
    return owners.get(line.name, set()).union(*(owners.get(o, set()) for o in line.operands))


def _buffer(line: Instruction, size: int, by_name: dict[str, Instruction]) -> Buffer:
    shapes = [f"{m[1]}[{m[2]}]" for m in _SHAPE.finditer(line.shape)]
    alone = len(shapes) == 1 or line.opcode.endswith("-start")
    shown = shapes[0] if alone else f"({', '.join(shapes[:2])}, …)"
    return Buffer(size, shown if shapes else line.shape, _origin(line, by_name), line.opcode)


def _origin(line: Instruction, by_name: dict[str, Instruction], depth: int = 4) -> str:
    """The path of the operation, or of the one whose result it moves about."""
    source = by_name.get(next(iter(line.operands), ""))
    if line.op_name or source is None or depth == 0:
        return line.op_name
    return _origin(source, by_name, depth - 1)
