"""The matrix product that notebook 1 measures."""

import colabtpu as ct
from colabtpu.chips import chip


def test_the_product_is_counted_on_every_device(engine: str) -> None:
    connection = ct.connect(engine=engine, devices=8)
    speed = ct.speed.matmul(connection, n=64, seconds=0.05)
    assert speed.cores == 8
    assert speed.dtype == "float32"
    assert speed.flops_per_second > 0
    assert speed.share_of_peak == 0, "a CPU has no published peak, so no share is guessed"
    assert "no published peak" in str(speed)


def test_the_share_of_peak_is_a_division() -> None:
    peak = chip("v5e").peak_bf16_flops_per_device
    speed = ct.speed.MatmulSpeed(8192, "bfloat16", 1, 98.5e12, peak)
    assert speed.share_of_peak == 0.5
    assert str(speed) == "8192 x 8192 bfloat16: 98.5 TFLOP/s, 50% of 1 device(s)' peak of 197"
