"""Preflight on real Keras steps, compiled by the real TPU compiler."""

import dataclasses
import json
import os

import keras
import numpy as np
import pytest

import colabtpu as ct
from colabtpu import chips
from colabtpu.preflight import compiler, lowering
from colabtpu.preflight import spec as specs

pytestmark = [
    pytest.mark.tpu_compiler,
    pytest.mark.skipif(bool(compiler.unavailable()), reason="no TPU compiler here"),
]
WIDTH = 256


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    before = os.environ.get("COLABTPU_CACHE")
    os.environ["COLABTPU_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("COLABTPU_CACHE")
    if before is not None:
        os.environ["COLABTPU_CACHE"] = before


def two_layers(width=WIDTH, name="two_layers"):
    model = keras.Sequential(
        [
            keras.Input((width,)),
            keras.layers.Dense(width, use_bias=False, activation="relu", name="first"),
            keras.layers.Dense(width, use_bias=False, name="second"),
        ],
        name=name,
    )
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def report():
    model = two_layers()
    batch = (np.zeros((64, WIDTH), "float32"), np.zeros((64, WIDTH), "float32"))
    return ct.preflight(model, batch, target="v5e-1")


def test_a_small_step_compiles_and_fits(report, engine):
    assert (report.status, report.compiles, report.fits) == ("compiled", True, True)
    assert (report.engine, report.target, report.batch) == (engine, "v5e-1", 64)
    assert report.hbm_usable_bytes == int(15.75 * 2**30)
    assert "fits" in report.summary


def test_memory_is_split_as_counted_by_hand(report):
    parts = dict(report.hbm_parts)
    kernel = WIDTH * WIDTH * 4
    assert parts["weights"] == 2 * kernel
    # Adam keeps two moments a weight; its step count and learning rate are a few bytes.
    assert 4 * kernel <= parts["optimizer"] <= 4 * kernel + 4096
    assert parts["batch"] == 2 * 64 * WIDTH * 4
    assert report.hbm_needed_bytes == sum(parts.values())
    assert parts["program"] > 0


def test_flops_are_near_the_hand_count(report):
    # Two products forward, two for the weights' gradients, one for the hidden layer's.
    products = 5 * 2 * 64 * WIDTH * WIDTH
    assert report.model_flops == products
    assert products <= report.flops <= 1.2 * products
    assert report.step_seconds_bound >= report.model_flops / 197e12


def test_text_card_and_json_show_the_same_figures(report):
    from colabtpu.preflight.messages import size

    kept = json.loads(report.to_json())
    assert kept["hbm_needed_bytes"] == report.hbm_needed_bytes
    shown = size(report.hbm_needed_bytes)
    assert shown in str(report)
    assert shown in report._repr_html_()
    for name, words in report.rows():
        assert f"{name}: {words}" in str(report)
    assert str(report.fits).lower() in report.to_json()


def test_the_same_step_is_not_compiled_twice(report, engine):
    batch = (np.zeros((64, WIDTH), "float32"), np.zeros((64, WIDTH), "float32"))
    again = ct.preflight(two_layers(), batch, target="v5e-1")
    assert again.cached
    assert dataclasses.replace(again, cached=False) == report


def test_the_all_reduce_of_a_data_parallel_step_is_seen(engine):
    batch = (np.zeros((64, WIDTH), "float32"), np.zeros((64, WIDTH), "float32"))
    found = ct.preflight(two_layers(), batch, target="v5e-8", memory_only=True)
    assert (found.replicas, found.per_replica_batch) == (8, 8)
    # 8 of 64 rows on each device, padded to nothing more.
    assert dict(found.hbm_parts)["batch"] == 2 * 8 * WIDTH * 4
    if engine == "jax":
        moved = sum(c.size_bytes for c in found.collectives)
        gradients = 2 * WIDTH * WIDTH * 4
        assert gradients <= moved <= gradients * 1.1
    else:
        assert any("without its all-reduce" in note for note in found.notes)


def test_a_step_that_is_too_big_is_refused_with_libtpu_s_figures():
    model = keras.Sequential([keras.Input((1024,)), keras.layers.Dense(60_000, name="wide")])
    model.compile("sgd", "mse")
    spec = (
        specs.ArraySpec((131_072, 1024), "float32"),
        specs.ArraySpec((131_072, 60_000), "float32"),
    )
    found = ct.preflight(model, spec, target="v5e-1", advise=False)
    assert (found.compiles, found.fits, found.status) == (False, False, "out of memory")
    # Labels alone are 131,072 x 60,032 x 4 bytes = 29.3 GiB.
    assert found.hbm_needed_bytes > 29 * 2**30
    assert "of HBM and the TPU has 15.75 GiB" in found.summary
    if found.libtpu_version == "0.0.21.1":  # others give the sum
        assert "29.30 GiB of HBM for one array" in found.summary
    assert "RESOURCE_EXHAUSTED" in found.message


def test_other_steps_are_judged_too(report):
    batch = (np.zeros((64, WIDTH), "float32"), np.zeros((64, WIDTH), "float32"))
    program = lowering.lower(
        two_layers(), specs.batch_spec(batch), chips.target("v5e-1"), "evaluate"
    )
    assert not any(a.role == "optimizer" for a in program.arguments)
    found = ct.preflight(two_layers(), batch, target="v5e-1", step="generate", memory_only=True)
    assert found.compiles
    assert dict(found.hbm_parts)["optimizer"] == 0


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="the kernel is JAX's")
def test_a_kernel_is_split_over_a_slice_larger_than_this_host():
    """Splash attention cannot be split by the compiler, and there are no 16 devices here."""
    from colabtpu import models
    from colabtpu.models import losses

    model = models.transformer_lm(512, 128, layers=1, dim=128, dtype="mixed_bfloat16")
    model.compile("adam", losses.next_token(model))
    program = lowering.lower(model, specs.tokens(32, 128), chips.target("v5e:4x4"))
    assert "tpu_custom_call" in program.identity
    assert keras.distribution.distribution() is None
    found = compiler.compile_program(program, chips.target("v5e:4x4"), memory_only=True)
    assert found.status in ("scheduled", "compiled"), found.message
    assert "all-reduce" in {c.kind for c in found.collectives}
