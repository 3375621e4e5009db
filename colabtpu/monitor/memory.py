"""How much memory is in use: of the devices, where the runtime can tell, and of this process.

    device_memory("jax")       # DeviceMemory(used_bytes=..., limit_bytes=...), or None
    host_bytes()

Neither touches a device: they ask the runtime's own accounts.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of the fullest device.

    Attributes:
        used_bytes: in use now.
        peak_bytes: the most that was in use.
        limit_bytes: what the program may use, 0 where the runtime does not say.
    """

    used_bytes: int
    peak_bytes: int
    limit_bytes: int


def device_memory(engine: str) -> DeviceMemory | None:
    """Returns the memory of the fullest device of `engine`, `None` where it cannot be told."""
    readings = _jax_memory() if engine == "jax" else _tensorflow_memory()
    return max(readings, key=lambda m: m.used_bytes, default=None)


def host_bytes() -> int | None:
    """Returns the resident memory of this process, `None` where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _jax_memory() -> list[DeviceMemory]:
    import jax

    # A CPU device has no such account and answers None.
    stats = [s for s in (device.memory_stats() for device in jax.local_devices()) if s]
    return [
        DeviceMemory(s["bytes_in_use"], s.get("peak_bytes_in_use", 0), int(s.get("bytes_limit", 0)))
        for s in stats
        if "bytes_in_use" in s
    ]


def _tensorflow_memory() -> list[DeviceMemory]:
    import tensorflow as tf

    readings = []
    devices = [d for kind in ("GPU", "TPU") for d in tf.config.list_logical_devices(kind)]
    for device in devices:
        name = device.name.removeprefix("/device:")
        try:
            info: dict[str, Any] = tf.config.experimental.get_memory_info(name)
        except (ValueError, tf.errors.OpError):
            continue  # Some TPU runtimes keep no account; libtpu is asked instead.
        readings.append(DeviceMemory(int(info["current"]), int(info["peak"]), 0))
    return readings or (_libtpu_memory() if devices else [])


def _libtpu_memory() -> list[DeviceMemory]:
    """libtpu's own metrics. To be asked where a TPU is open: elsewhere libtpu looks for one."""
    try:
        from libtpu.sdk import tpumonitoring

        used = tpumonitoring.get_metric("hbm_capacity_usage").data()
        limit = tpumonitoring.get_metric("hbm_capacity_total").data()
    except (ImportError, AttributeError, RuntimeError):
        return []
    return [DeviceMemory(int(float(u)), 0, int(float(t))) for u, t in zip(used, limit, strict=True)]
