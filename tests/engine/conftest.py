"""Tests of Keras code, run once for each engine: `ENGINE=jax pytest tests/engine`.

Both engines see 8 logical CPU devices, so that what holds on one device can be compared
with what holds on eight in the same process.
"""

import os

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
