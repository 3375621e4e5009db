"""What helps when a step does not fit, and the largest batch that does."""

import os

import keras
import pytest
from keras import ops

import colabtpu as ct
from colabtpu import chips
from colabtpu.preflight import compiler, lowering, search, variants
from colabtpu.preflight.spec import ArraySpec

pytestmark = [
    pytest.mark.tpu_compiler,
    pytest.mark.skipif(bool(compiler.unavailable()), reason="no TPU compiler here"),
]
LENGTH, WIDTH = 512, 256


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    before = os.environ.get("COLABTPU_CACHE")
    os.environ["COLABTPU_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("COLABTPU_CACHE")
    if before is not None:
        os.environ["COLABTPU_CACHE"] = before


class Block(keras.layers.Layer):
    """A feed-forward block whose inner width is what fills the memory."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up = keras.layers.Dense(8 * WIDTH)
        self.down = keras.layers.Dense(WIDTH)

    def build(self, shape):
        self.up.build(shape)
        self.down.build((*shape[:-1], 8 * WIDTH))

    def call(self, x):
        return x + self.down(ops.sin(ops.sin(self.up(x))))

    def compute_output_shape(self, shape):
        return shape


def model_of_blocks(count=3):
    x = inputs = keras.Input((LENGTH, WIDTH))
    for index in range(count):
        x = Block(name=f"block_{index}")(x)
    model = keras.Model(inputs, x, name="blocks")
    model.compile("adam", "mse")
    return model


def batch(rows):
    row = ArraySpec((rows, LENGTH, WIDTH), "float32")
    return (row, row)


def lowered(model, rows=8):
    return lowering.lower(model, batch(rows), chips.target("v5e-1"))


def test_variants_change_the_program_and_leave_the_model_as_it_was():
    model = model_of_blocks(2)
    plain = lowered(model)
    optimizer = model.optimizer
    with variants.accumulating(model, 4):
        changed = lowered(model)
        # One more copy of every weight: the gathered gradients.
        kept = [a for a in changed.arguments if a.role == "optimizer"]
        assert len(kept) >= len([a for a in plain.arguments if a.role == "optimizer"]) + 8
    assert model.optimizer is optimizer
    with variants.rematerialized(model) as names:
        assert names == ["block_0", "block_1"]
        assert lowered(model).fingerprint != plain.fingerprint
    with variants.in_bfloat16(model):
        assert "bf16" in lowered(model).identity
    assert "bf16" not in plain.identity
    assert lowered(model).fingerprint == plain.fingerprint


def test_the_search_takes_few_looks_and_finds_the_edge():
    # A made-up machine with 100 bytes, where a row takes 1.5 on top of 10.
    asked = []

    def ask(rows, memory_only):
        asked.append(rows)
        needed = int(10 + 1.5 * rows)
        return search.Trial(rows, needed, needed <= 100, not memory_only)

    assert search._search(ask, 100, 4096) == (56, 64)  # 60 rows: 56 is the multiple of 8 below
    assert len(set(asked)) <= 5
    # XLA recomputes when memory is tight, so more fits than the line says.
    asked.clear()

    def bent(rows, memory_only):
        asked.append(rows)
        needed = min(10 + 1.5 * rows, 50 + 0.6 * rows)
        return search.Trial(rows, int(needed), needed <= 100, not memory_only)

    assert search._search(bent, 100, 4096) == (80, 88)  # 50 + 0.6 x 83
    assert len(set(asked)) <= 7


def test_nothing_fits_and_everything_fits():
    def never(rows, memory_only):
        return search.Trial(rows, 10**6, False, True)

    assert search._search(never, 100, 4096) == (0, 1)

    def always(rows, memory_only):
        return search.Trial(rows, 1, True, True)

    assert search._search(always, 10**9, 256) == (256, None)


def test_candidates_are_multiples_of_8_then_of_128():
    assert search.candidates(300) == [1, 2, 4, *range(8, 129, 8), 256]


def test_the_largest_batch_of_a_real_model_within_a_limit():
    inputs = keras.Input((128,))
    model = keras.Model(inputs, keras.layers.Dense(128)(inputs))
    model.compile("adam", "mse")
    row = ArraySpec((1, 128), "float32")
    found = ct.preflight.largest_batch(model, (row, row), "v5e-1", limit=16, global_batch=64)
    assert (found.per_core_batch, found.next_up, found.accumulation_steps) == (16, None, 4)
    assert found.global_batch == 64
    assert found.report.status == "compiled"
    assert "gradient_accumulation_steps=4" in str(found)


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_one_up_does_not():
    found = ct.preflight.largest_batch(model_of_blocks(), batch(1), "v5e-1")
    tried = {t.per_core_batch: t for t in found.trials}
    assert tried[found.per_core_batch].fits
    assert tried[found.per_core_batch].compiled
    assert not tried[found.next_up].fits
    assert tried[found.next_up].compiled
    sizes = search.candidates(4096)
    assert sizes.index(found.next_up) == sizes.index(found.per_core_batch) + 1


@pytest.mark.slow
def test_advice_is_tried_and_its_figures_hold():
    rows = 4096
    report = ct.preflight(model_of_blocks(), batch(rows), target="v5e-1")
    assert report.fits is False
    first, second, third = report.advice[:3]
    assert "accumulated" in first.change
    assert first.fits
    assert all(item.verified for item in report.advice)
    assert "RematScope" in second.code
    assert "mixed_bfloat16" in third.code
    assert second.hbm_needed_bytes < report.hbm_needed_bytes
    # What the advice says of the smaller batch is what preflight says of it.
    share = int(first.change.split()[0])
    model = model_of_blocks()
    with variants.accumulating(model, rows // share):
        again = ct.preflight(model, batch(share), target="v5e-1", memory_only=True)
    assert again.hbm_needed_bytes == first.hbm_needed_bytes
