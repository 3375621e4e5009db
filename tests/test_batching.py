"""The arithmetic of batches, against hand counts."""

import pytest

from colabtpu import batching
from colabtpu.errors import InvalidArgumentError


def test_default_is_128_per_core() -> None:
    batch = batching.global_batch(cores=8)
    assert batch.global_batch == 1024
    assert (
        batch.describe(tokens_per_row=512)
        == "128 per core x 8 cores = 1,024; 1,024 rows x 512 tokens = 524,288 tokens"
    )


def test_one_core_is_written_in_the_singular() -> None:
    assert str(batching.global_batch(128, 1)) == "128 per core x 1 core = 128"


@pytest.mark.parametrize(("asked", "per_core"), [(1, 8), (7, 8), (8, 8), (9, 16), (129, 136)])
def test_per_core_is_rounded_up_to_8_and_says_so(asked: int, per_core: int) -> None:
    batch = batching.global_batch(asked, 8)
    assert batch.per_core == per_core
    assert batch.global_batch == 8 * per_core
    assert ("rounded up from" in batch.describe()) == (asked != per_core)


def test_no_rounding_when_told_so() -> None:
    assert batching.global_batch(3, 8, multiple=1).global_batch == 24


@pytest.mark.parametrize("bad", [0, -8, 1.5, 8.0, True, "128", None, float("nan")])
def test_bad_sizes_are_refused_with_the_value(bad: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"Received: per_core="):
        batching.global_batch(bad, 8)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"Received: cores="):
        batching.global_batch(8, bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"Received: tokens_per_row="):
        batching.global_batch(8, 8).describe(bad or 0)  # type: ignore[arg-type]


def test_numpy_integers_are_whole_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert batching.global_batch(numpy.int64(16), numpy.int32(8)).global_batch == 128


def test_steps_drop_the_partial_batch() -> None:
    assert batching.steps_per_epoch(10_000, batching.global_batch(128, 8)) == 9  # 9 x 1,024 = 9,216
    assert batching.steps_per_epoch(1024, 1024) == 1


def test_fewer_examples_than_a_batch_are_an_error() -> None:
    with pytest.raises(InvalidArgumentError, match="1,000 examples do not fill one batch of 1,024"):
        batching.steps_per_epoch(1000, 1024)


def test_learning_rate_of_goyal_et_al() -> None:
    # Their ImageNet run: 0.1 at 256 becomes 3.2 at 8,192.
    assert batching.scale_learning_rate(0.1, 8192, 256) == pytest.approx(3.2)


def test_square_root_rule_and_back() -> None:
    up = batching.scale_learning_rate(1e-3, batching.global_batch(128, 8), 64, rule="sqrt")
    assert up == pytest.approx(4e-3)
    assert batching.scale_learning_rate(up, 64, 1024, rule="sqrt") == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("base", "batch", "base_batch", "rule"),
    [
        (0, 8, 8, "linear"),
        (-0.1, 8, 8, "linear"),
        (float("inf"), 8, 8, "linear"),
        (True, 8, 8, "linear"),
        (0.1, 0, 8, "linear"),
        (0.1, 8, 8.5, "linear"),
        (0.1, 8, 8, "cubic"),
    ],
)
def test_bad_scaling_is_refused(base: float, batch: int, base_batch: int, rule: str) -> None:
    with pytest.raises(InvalidArgumentError, match="Received: "):
        batching.scale_learning_rate(base, batch, base_batch, rule)


@pytest.mark.parametrize(
    ("rows", "room", "cores", "steps", "per_core"),
    [
        (1024, 128, 8, 1, 128),  # it fits
        (1024, 32, 8, 4, 32),
        (1024, 100, 8, 2, 64),  # 100 does not divide 128
        (96, 5, 4, 6, 4),  # 24 a core: 4 is the largest divisor within 5
        (14, 3, 2, 7, 1),  # 7 a core is prime
    ],
)
def test_accumulation_is_exact(rows: int, room: int, cores: int, steps: int, per_core: int) -> None:
    split = batching.accumulation(rows, room, cores)
    assert (split.steps, split.per_core) == (steps, per_core)
    assert split.micro_batch == per_core * cores
    assert split.global_batch == rows


def test_a_batch_the_cores_cannot_share_names_the_next_ones() -> None:
    with pytest.raises(InvalidArgumentError, match="Use 104 or 96") as error:
        batching.accumulation(100, 8, 8)
    assert "global_batch=100" in str(error.value)
    with pytest.raises(InvalidArgumentError, match=r"Use 8\."):
        batching.accumulation(3, 8, 8)
