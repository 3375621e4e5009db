"""The TPU generations and slices: peak arithmetic, memory and layout, each figure with its source.

    from colabtpu import chips
    chips.chip("v5e").peak_bf16_flops        # 1.97e14 FLOP/s
    chips.target("v5e-8").topology           # "v5e:2x4", the name libtpu and JAX take

Peaks and bandwidths are per *chip*, dense bfloat16; memory is per *device*, which is what
a program sees: v2, v3 and TPU7x show two devices a chip, the others one.
"""

import re
from dataclasses import dataclass
from math import prod

from colabtpu.errors import InvalidArgumentError

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One TPU generation.

    Attributes:
        name: the generation, such as `"v5e"`.
        peak_bf16_flops: dense bfloat16 FLOP/s of one chip.
        hbm_bytes: nominal memory of one *device*, in bytes.
        hbm_usable_bytes: what a program may use of it, in bytes.
        hbm_bytes_per_second: memory bandwidth of one chip.
        cores_per_chip: TensorCores on a chip.
        devices_per_chip: devices that TensorFlow and JAX list for a chip.
        compiler_devices_per_chip: devices that libtpu lists for a chip when it compiles
            without one. It differs on v4 alone: a real v4 joins its two cores into one
            device (megacore), the compile-only client shows both, each with half the memory.
        chips_per_host: chips on a full host.
        mxu: side of the matrix unit; widths should be multiples of it.
        dimensions: 2 where slices are flat (`2x4`), 3 where they are cubes (`2x2x1`).
        pci_ids: `(device id, subsystem id or None)` pairs under vendor 0x1ae0.
        source: where the figures come from.
    """

    name: str
    peak_bf16_flops: float
    hbm_bytes: int
    hbm_usable_bytes: int
    hbm_bytes_per_second: float
    cores_per_chip: int
    devices_per_chip: int
    compiler_devices_per_chip: int
    chips_per_host: int
    mxu: int
    dimensions: int
    pci_ids: tuple[tuple[str, str | None], ...]
    source: str

    @property
    def peak_bf16_flops_per_device(self) -> float:
        """FLOP/s of one device, the figure that MFU divides by."""
        return self.peak_bf16_flops / self.devices_per_chip

    @property
    def hbm_bytes_per_second_per_device(self) -> float:
        """Bandwidth of one device, the figure that a roofline divides by."""
        return self.hbm_bytes_per_second / self.devices_per_chip


@dataclass(frozen=True)
class Target:
    """One slice: so many chips of a generation, laid out in a certain shape.

    Attributes:
        name: what was asked for, such as `"v5e-8"`.
        chip: the generation.
        topology: the name that libtpu and JAX take, such as `"v5e:2x4"`.
        chips_per_host_bounds: how the chips of one host lie, such as `(2, 4, 1)`. Pass it to
            `jax.experimental.topologies.get_topology_desc`: left out, it is `(2, 2, 1)`, and
            older libtpu refuses `v5e:1x1` and counts two hosts on `v5e:2x4`.
        num_chips: chips in the slice.
        num_hosts: machines in the slice.
    """

    name: str
    chip: Chip
    topology: str
    chips_per_host_bounds: tuple[int, int, int]
    num_chips: int
    num_hosts: int

    @property
    def num_devices(self) -> int:
        """Devices that TensorFlow and JAX list on the real slice, all hosts together."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def num_compiler_devices(self) -> int:
        """Devices that libtpu lists for the slice when it compiles without one."""
        return self.num_chips * self.chip.compiler_devices_per_chip


def _gib(figure: float) -> int:
    return int(figure * GIB)


_CLOUD = "https://cloud.google.com/tpu/docs"
_COMPILER = "usable memory as libtpu 0.0.52 states it when a program does not fit"

# Usable memory of v2 to v6e is what libtpu 0.0.52's compiler printed for an oversized program
# ("exceeds available HBM (15.75G)"); v4 shows 15.25G for each half, users of the joined device
# report 30.75G (erfanzar/EasyDeL#166).
CHIPS: dict[str, Chip] = {
    c.name: c
    for c in (
        Chip("v2", 45e12, _gib(8), _gib(7.48), 700e9, 2, 2, 2, 4, 128, 2, (("0x0027", "0x004e"),),
             f"board of 4 chips quoted at 180 TFLOP/s; {_COMPILER} and sokrypton/ColabFold#62; "
             "bandwidth as often quoted, not on a Google page"),
        Chip("v3", 123e12, _gib(16), _gib(15.48), 900e9, 2, 2, 2, 4, 128, 2,
             (("0x0027", "0x004f"),), f"{_CLOUD}/v3; {_COMPILER} and LargeWorldModel/LWM#60"),
        Chip("v4", 275e12, _gib(32), _gib(30.75), 1200e9, 2, 1, 2, 4, 128, 3, (("0x005e", None),),
             f"{_CLOUD}/v4; usable memory from erfanzar/EasyDeL#166"),
        Chip("v5e", 197e12, _gib(16), _gib(15.75), 819e9, 1, 1, 1, 8, 128, 2, (("0x0063", None),),
             f"{_CLOUD}/v5e; {_COMPILER}"),
        Chip("v5p", 459e12, _gib(95), _gib(95), 2765e9, 2, 1, 1, 4, 128, 3, (("0x0062", None),),
             f"{_CLOUD}/v5p; libtpu 0.0.52 allows 95.73G, a little over the nominal figure"),
        Chip("v6e", 918e12, _gib(32), _gib(31.24), 1638e9, 1, 1, 1, 8, 256, 2, (("0x006f", None),),
             f"{_CLOUD}/v6e; {_COMPILER}"),
        Chip("tpu7x", 2307e12, _gib(96), _gib(94.74), 7380e9, 2, 2, 2, 4, 256, 3,
             (("0x0076", None),), f"{_CLOUD}/tpu7x; {_COMPILER}"),
    )
}  # fmt: skip

# Other names of a generation: accelerator types of Cloud TPU, and `device_kind` of JAX.
_ALIASES = {
    "v5litepod": "v5e", "v5lite": "v5e", "v5 lite": "v5e", "v5": "v5p",
    "v6 lite": "v6e", "v7x": "tpu7x", "7x": "tpu7x",
}  # fmt: skip

# The slices that Google offers, by number of chips: cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p}.
_FLAT = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16),
         256: (16, 16), 512: (16, 32), 1024: (32, 32)}  # fmt: skip
_CUBE = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4),
         128: (4, 4, 8), 256: (4, 8, 8), 512: (8, 8, 8), 1024: (8, 8, 16), 2048: (8, 16, 16),
         4096: (16, 16, 16)}  # fmt: skip
_LARGEST = {"v2": 256, "v3": 1024, "v4": 4096, "v5e": 256, "v5p": 4096, "v6e": 256, "tpu7x": 4096}
_NOT_OFFERED = {"v2": (1, 8, 32), "v3": (1, 8, 32), "v4": (1,)}


def chip(name: str) -> Chip:
    """Returns the generation called `name`.

    Args:
        name: `"v2"`, `"v3"`, `"v4"`, `"v5e"`, `"v5p"`, `"v6e"` or `"tpu7x"`; case does not matter.

    Returns:
        The `Chip`.

    Raises:
        InvalidArgumentError: no such generation.
    """
    found = CHIPS.get(name.lower())
    if found is None:
        raise InvalidArgumentError(
            f"`name` must be one of {', '.join(CHIPS)}. Received: name={name!r}",
            "Pass the generation alone: 'v5e', not 'v5litepod-8'.",
        )
    return found


def of_device_kind(kind: str) -> Chip | None:
    """Returns the generation that JAX calls `kind`, such as `"TPU v5 lite"`; `None` if unknown."""
    if not kind.upper().startswith("TPU"):
        return None
    return _generation(kind[3:].strip().lower())


def target(name: str) -> Target:
    """Returns the slice called `name`.

    Args:
        name: an accelerator type such as `"v5e-8"`, `"v5litepod-8"` or `"v3-8"` (v2, v3, v4, v5p
            and tpu7x count TensorCores, v5e and v6e count chips), or an explicit shape such as
            `"v5e:16x16"`.

    Returns:
        The `Target`.

    Raises:
        InvalidArgumentError: the name cannot be read, or no slice has that size.
    """
    written = re.fullmatch(r"(\w+)(?:-(\d+)|:(\d+(?:x\d+){1,2}))", name.strip().lower())
    found = _generation(written[1]) if written else None
    if written is None or found is None:
        raise InvalidArgumentError(
            "`target` must be a generation and a size, such as 'v5e-8', or a shape, such as "
            f"'v5e:2x4'. Received: target={name!r}",
            f"Generations: {', '.join(CHIPS)}.",
        )
    if written[2]:
        return _slice(name, found, _shape_of_size(name, found, int(written[2])))
    return _slice(name, found, tuple(int(side) for side in written[3].split("x")))


def _generation(name: str) -> Chip | None:
    return CHIPS.get(_ALIASES.get(name, name))


def _shape_of_size(name: str, chip: Chip, size: int) -> tuple[int, ...]:
    unit = 1 if chip.name in ("v5e", "v6e") else chip.cores_per_chip
    shapes = _FLAT if chip.dimensions == 2 else _CUBE
    known = {
        chips * unit: shape
        for chips, shape in shapes.items()
        if chips <= _LARGEST[chip.name] and chips not in _NOT_OFFERED.get(chip.name, ())
    }
    if size not in known:
        counted = "chips" if unit == 1 else f"TensorCores, {unit} a chip"
        raise InvalidArgumentError(
            f"{chip.name} has no slice of size {size} ({counted}). Received: target={name!r}",
            f"Sizes: {', '.join(f'{chip.name}-{s}' for s in known)}; or give a shape, such as "
            f"'{chip.name}:{'x'.join(map(str, known[max(known)]))}'.",
        )
    return known[size]


def _slice(name: str, chip: Chip, shape: tuple[int, ...]) -> Target:
    """Lays the chips out on hosts: one host where they fit on it, else hosts of 2x2."""
    x, y, z = shape + (1,) * (3 - len(shape))
    full = (x, y, z)
    if chip.dimensions == 2 and z != 1:
        raise InvalidArgumentError(
            f"{chip.name} slices are flat, such as '{chip.name}:2x4'. Received: target={name!r}",
            "Give two sides.",
        )
    num_chips = prod(shape)
    bounds = (2, 2, 1)
    if num_chips == 1 or (chip.chips_per_host == 8 and full in ((2, 2, 1), (2, 4, 1))):
        bounds = full
    if any(side == 0 or side % bound for side, bound in zip(full, bounds, strict=True)):
        raise InvalidArgumentError(
            f"A slice of {chip.name} is made of hosts of 2x2 chips. Received: target={name!r}",
            "Give even sides, such as '2x4', or one chip alone.",
        )
    topology = f"{chip.name}:{'x'.join(map(str, full[: chip.dimensions]))}"
    return Target(name, chip, topology, bounds, num_chips, num_chips // prod(bounds))
