"""`connect()` on the devices that are here: 8 logical CPU devices, on either engine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colabtpu as ct
from colabtpu import connection as rooms
from colabtpu import environment as surroundings
from colabtpu.connection import Wish, open_connection
from colabtpu.failures import AcceleratorError, AlreadyConnectedError, TooLateError

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _as_it_was(engine: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    import keras

    before = keras.distribution.distribution()
    monkeypatch.setattr(rooms, "_current", None)
    yield
    keras.distribution.set_distribution(before)


def test_a_second_call_returns_the_same_connection(
    engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tpu = ct.connect(engine)
    assert ct.connect() is tpu
    assert ct.connect(engine, devices=8) is tpu
    assert capsys.readouterr().out.count("Connected: CPU, 8 replicas") == 3


def test_other_arguments_need_a_restart(engine: str) -> None:
    ct.connect(engine)
    other = {"tensorflow": "jax", "jax": "tensorflow"}[engine]
    for arguments in ({"engine": other}, {"devices": 3}, {"tpu": "local"}):
        with pytest.raises(AlreadyConnectedError, match="Restart the kernel"):
            ct.connect(**arguments)


def test_auto_takes_the_backend_that_keras_runs_on(engine: str) -> None:
    assert ct.connect().engine == engine


def test_the_card_says_what_was_looked_for(engine: str) -> None:
    tpu = ct.connect(engine)
    card = tpu.describe()
    for line in ("TPU: none", "GPU: none", "CPU: 8 logical devices", "128 per core x 8 cores"):
        assert line in card
        assert line in tpu._repr_html_()
    assert (tpu.device, tpu.chip, tpu.num_cores, len(tpu.devices)) == ("cpu", None, 8, 8)


def test_the_card_cannot_be_broken_by_what_it_shows(engine: str) -> None:
    card = rooms.Connection(engine, "cpu", None, ("<b>",), ("TPU_NAME=<script>",))._repr_html_()
    assert "<script>" not in card
    assert "&lt;script&gt;" in card


def test_batch_size_is_global_and_prints_its_arithmetic(
    engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tpu = ct.connect(engine)
    capsys.readouterr()
    assert tpu.batch_size() == 1024
    assert tpu.batch_size(per_core=5, tokens_per_row=100) == 64
    assert capsys.readouterr().out.splitlines() == [
        "128 per core x 8 cores = 1,024",
        "8 per core x 8 cores = 64; 64 rows x 100 tokens = 6,400 tokens "
        "(per core rounded up from 5)",
    ]


def test_each_engine_has_its_own_handle(engine: str) -> None:
    tpu = ct.connect(engine)
    if engine == "tensorflow":
        assert tpu.strategy.num_replicas_in_sync == 8
        with pytest.raises(AcceleratorError, match="JAX only"):
            _ = tpu.distribution
    else:
        assert tpu.distribution.num_model_replicas == 8
        with pytest.raises(AcceleratorError, match="TensorFlow only"):
            _ = tpu.strategy


def test_one_device_of_those_that_there_are(engine: str) -> None:
    import keras

    tpu = open_connection(Wish(engine, 1), surroundings.detect())
    assert tpu.num_cores == 1
    with tpu.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    history = model.fit(np.ones((4, 4)), np.ones(4), batch_size=1, verbose=0)
    assert np.isfinite(history.history["loss"][0])


def test_more_devices_than_were_started(engine: str) -> None:
    # The tests' conftest started 8; both engines have used them by now.
    ct.connect(engine)
    with pytest.raises(TooLateError, match=r"connect\(devices=8\)"):
        open_connection(Wish(engine, 9), surroundings.detect())


def test_the_other_engine_is_too_late(engine: str) -> None:
    other = {"tensorflow": "jax", "jax": "tensorflow"}[engine]
    with pytest.raises(TooLateError, match=f"Keras already runs on {engine}"):
        ct.connect(other)


def test_an_imported_framework_can_still_be_given_its_devices(engine: str) -> None:
    """The framework first, `connect()` second, a backend preset that is neither: 3 devices.

    In a process of its own: TensorFlow's collectives keep the size of their group for good, so
    3 devices here would break every later test that trains on 8.
    """
    script = f"""
import json, os
os.environ["KERAS_BACKEND"] = "{engine if engine == "tensorflow" else "torch"}"
import {engine}
import colabtpu as ct
tpu = ct.connect("{engine}", devices=3)
import keras, numpy
with tpu.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
history = model.fit(numpy.ones((12, 4)), numpy.ones(12), batch_size=3, verbose=0)
assert numpy.isfinite(history.history["loss"][0])
print(json.dumps([tpu.num_cores, keras.backend.backend(), os.environ.get("XLA_FLAGS", "")]))
"""
    hidden = ("JAX_PLATFORMS", "XLA_FLAGS", "KERAS_BACKEND")
    clean = {k: v for k, v in os.environ.items() if k not in hidden}
    clean |= {"PYTHONPATH": str(REPOSITORY), "XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=clean,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cores, backend, flags = json.loads(done.stdout.strip().splitlines()[-1])
    assert (cores, backend) == (3, engine)
    assert flags.startswith("--xla_cpu_enable_fast_math=false"), "the user's flags must stay"
