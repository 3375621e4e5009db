"""Tests of Keras code, run once for each engine: `ENGINE=jax pytest tests/engine`.

Both engines see 8 logical CPU devices, so that what holds on one device can be compared
with what holds on eight in the same process.
"""

import os
from typing import Any

import pytest

ENGINE = os.environ.get("ENGINE", "tensorflow")
os.environ["KERAS_BACKEND"] = ENGINE
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

if ENGINE == "tensorflow":
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 8
    )


@pytest.fixture(scope="session")
def engine() -> str:
    """The engine of this run, "tensorflow" or "jax"."""
    return ENGINE


@pytest.fixture(scope="session")
def eight_devices(engine: str) -> Any:
    """All 8 CPU devices as one strategy or distribution; build models under its `.scope()`.

    Do not make a `MirroredStrategy` in a test: two in one process break each other.
    """
    if engine == "jax":
        import keras

        return keras.distribution.DataParallel(devices=keras.distribution.list_devices("cpu"))
    from colabtpu import tensorflow_engine

    names = tuple(device.name for device in tf.config.list_logical_devices("CPU"))
    return tensorflow_engine._strategy(names)
