"""`python -m colabtpu preflight`, and what it says where no compiler can run."""

import argparse
import json
import sys

import keras
import numpy as np
import pytest

import colabtpu as ct
from colabtpu.preflight import command, compiler

BUILD = """
import keras

def build(batch):
    model = keras.Sequential([keras.Input((128,)), keras.layers.Dense(128)], name="mine")
    model.compile("adam", "mse")
    return model
"""
# What the command promises to print, in this order.
PROMISED = [
    "compiles", "fits", "hbm_needed_bytes", "hbm_usable_bytes", "temp_bytes", "argument_bytes",
    "flops", "model_flops", "bytes_accessed", "step_seconds_bound", "tokens_per_second_bound",
    "compile_seconds", "libtpu_version", "target", "engine", "batch", "seq_len",
]  # fmt: skip
needs_libtpu = [
    pytest.mark.tpu_compiler,
    pytest.mark.skipif(bool(compiler.unavailable()), reason="no TPU compiler here"),
]


@pytest.fixture(autouse=True)
def _own_place(tmp_path, monkeypatch):
    monkeypatch.setenv("COLABTPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_module.py").write_text(BUILD)
    yield
    sys.modules.pop("my_module", None)


def asked(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["--engine", keras.backend.backend(), "--memory-only", *words])


class TestWithLibtpu:
    pytestmark = needs_libtpu

    def test_a_function_of_the_user_s_and_the_promised_keys(self, capsys):
        status = command.run(asked("--model", "my_module:build", "--batch", "16", "--json"))
        printed = json.loads(capsys.readouterr().out)
        assert status == 0
        assert list(printed)[: len(PROMISED)] == PROMISED
        assert (printed["compiles"], printed["fits"]) == (True, True)
        assert (printed["target"], printed["batch"]) == ("v5e-1", 16)
        assert printed["engine"] == keras.backend.backend()
        assert printed["argument_bytes"] >= 3 * 128 * 128 * 4

    def test_a_saved_model(self, tmp_path, capsys):
        import importlib

        sys.path.insert(0, str(tmp_path))
        importlib.import_module("my_module").build(8).save(tmp_path / "model.keras")
        sys.path.remove(str(tmp_path))
        assert command.run(asked("--model", "model.keras", "--batch", "8")) == 0
        assert "batch 8" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["no_module:build", "my_module:nothing", "nowhere.keras"])
def test_a_model_that_is_not_there(name):
    with pytest.raises(ct.InvalidArgumentError, match="names no"):
        command.run(asked("--model", name))


def test_without_a_compiler_there_is_an_estimate_marked_as_one(monkeypatch):
    monkeypatch.setattr(compiler, "unavailable", lambda libtpu=None: "libtpu runs on Linux only.")
    inputs = keras.Input((128,))
    model = keras.Model(inputs, keras.layers.Dense(256)(inputs), name="mine")
    model.compile("adam", "mse")
    batch = (np.zeros((16, 128), "float32"), np.zeros((16, 256), "float32"))
    report = ct.preflight(model, batch, target="v5e-1")
    weights = (128 * 256 + 256) * 4
    parts = dict(report.hbm_parts)
    assert (report.status, report.compiles) == ("estimated", None)
    assert parts["weights"] == weights
    assert 2 * weights <= parts["optimizer"] <= 2 * weights + 64
    assert parts["batch"] == 16 * (128 + 256) * 4
    assert parts["activations"] >= weights + 16 * 256 * 4
    assert "Estimated, not compiled" in str(report)
    assert "libtpu runs on Linux only." in str(report)
    assert "Estimated" in report._repr_html_()
    assert ct.preflight.estimate(model, batch).hbm_needed_bytes == report.hbm_needed_bytes


def test_the_callback_explains_an_out_of_memory_error_and_lets_it_go_on():
    text = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 9.08G of 7.48G hbm"
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(4)(inputs))
    model.compile("sgd", "mse", run_eagerly=True)
    data = (np.zeros((4, 4), "float32"), np.zeros((4, 4), "float32"))
    shown = []
    callback = ct.preflight.OutOfMemory(show=shown.append)
    model.fit(*data, verbose=0, callbacks=[callback])
    assert shown == []
    assert callback.explanation is None

    def failing(*args, **kwargs):
        raise RuntimeError(text)

    model.make_train_function()
    model.train_function = failing
    with pytest.raises(RuntimeError, match="Used 9") as caught:
        model.fit(*data, verbose=0, callbacks=[callback])
    assert "1.60 GiB too much" in shown[0].summary
    assert any("1.60 GiB too much" in note for note in caught.value.__notes__)
    assert model.train_function is failing
