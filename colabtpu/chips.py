"""The TPU generations: peak arithmetic, memory and layout, each figure with its source.

    from colabtpu import chips
    chips.chip("v5e").peak_bf16_flops        # 1.97e14 FLOP/s

Peaks and bandwidths are per *chip*, dense bfloat16; memory is per *device*, which is what
a program sees: v2, v3 and TPU7x show two devices a chip, the others one.
"""

from dataclasses import dataclass

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
        chips_per_host: chips on a full host.
        mxu: side of the matrix unit; widths should be multiples of it.
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
    chips_per_host: int
    mxu: int
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


def _gib(figure: float) -> int:
    return int(figure * GIB)


_CLOUD = "https://cloud.google.com/tpu/docs"

CHIPS: dict[str, Chip] = {
    c.name: c
    for c in (
        Chip("v2", 45e12, _gib(8), _gib(7.48), 700e9, 2, 2, 4, 128, (("0x0027", "0x004e"),),
             "board of 4 chips quoted at 180 TFLOP/s; usable memory from ColabFold#62; "
             "bandwidth as often quoted, not on a Google page"),
        Chip("v3", 123e12, _gib(16), _gib(14.71), 900e9, 2, 2, 4, 128, (("0x0027", "0x004f"),),
             f"{_CLOUD}/v3"),
        Chip("v4", 275e12, _gib(32), _gib(31.25), 1200e9, 2, 1, 4, 128, (("0x005e", None),),
             f"{_CLOUD}/v4"),
        Chip("v5e", 197e12, _gib(16), _gib(15.75), 819e9, 1, 1, 8, 128, (("0x0063", None),),
             f"{_CLOUD}/v5e; usable memory from libtpu's own out-of-memory message"),
        Chip("v5p", 459e12, _gib(95), _gib(95), 2765e9, 2, 1, 4, 128, (("0x0062", None),),
             f"{_CLOUD}/v5p"),
        Chip("v6e", 918e12, _gib(32), _gib(31.25), 1638e9, 1, 1, 8, 256, (("0x006f", None),),
             f"{_CLOUD}/v6e; usable memory from tpu-info"),
        Chip("tpu7x", 2307e12, _gib(96), _gib(96), 7370e9, 2, 2, 4, 256, (("0x0076", None),),
             f"{_CLOUD}/tpu7x"),
    )
}  # fmt: skip


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
