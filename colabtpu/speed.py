"""How fast is this device: one matrix product, against the chip's peak.

print(ct.speed.matmul(tpu))      # 172.3 TFLOP/s, 87 % of a v5e's 197
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colabtpu.connection import Connection


@dataclass(frozen=True)
class MatmulSpeed:
    """What square matrix products reached.

    Attributes:
        n: side of the matrices.
        dtype: their type, such as `"bfloat16"`.
        cores: devices that worked at once.
        flops_per_second: 2 n^3 a product, all devices together.
        peak_flops_per_second: the chip's figure for them, 0 where the chip is unknown.
    """

    n: int
    dtype: str
    cores: int
    flops_per_second: float
    peak_flops_per_second: float

    @property
    def share_of_peak(self) -> float:
        """Reached over peak, 0 where the peak is unknown: no figure beats a guessed one."""
        if not self.peak_flops_per_second:
            return 0.0
        return self.flops_per_second / self.peak_flops_per_second

    def __str__(self) -> str:
        reached = f"{self.n} x {self.n} {self.dtype}: {self.flops_per_second / 1e12:.3g} TFLOP/s"
        if not self.peak_flops_per_second:
            return f"{reached} on {self.cores} device(s); no published peak to compare with"
        peak = f"{self.peak_flops_per_second / 1e12:,.0f}"
        return f"{reached}, {self.share_of_peak:.0%} of {self.cores} device(s)' peak of {peak}"


def matmul(connection: "Connection", n: int = 4096, seconds: float = 1.0) -> MatmulSpeed:
    """Measures chained n x n products on every device of the connection at once.

    Args:
        connection: what `connect()` returned.
        n: side of the matrices; 4,096 and more fills a TPU's matrix unit.
        seconds: how long to measure, compilation and a warm-up not counted.

    Returns:
        A `MatmulSpeed`. TPUs and GPUs multiply bfloat16, CPUs float32.
    """
    dtype = "float32" if connection.device == "cpu" else "bfloat16"
    chain = 8
    step = _tensorflow_step if connection.engine == "tensorflow" else _jax_step
    run = step(connection, n, chain, dtype)
    run()
    calls, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds or not calls:
        run()
        calls += 1
    flops = 2 * n**3 * chain * calls * connection.num_cores / elapsed if elapsed else 0.0
    chip = connection.chip
    peak = chip.peak_bf16_flops_per_device * connection.num_cores if chip else 0.0
    return MatmulSpeed(n, dtype, connection.num_cores, flops, peak)


def _chained(x: Any, w: Any, chain: int) -> Any:
    """`x @ w @ w ...`: each product needs the one before, so none can be skipped."""
    import keras

    return keras.ops.fori_loop(0, chain, lambda _, y: keras.ops.matmul(y, w), x)


def _tensorflow_step(connection: "Connection", n: int, chain: int, dtype: str) -> Callable[[], Any]:
    import tensorflow as tf

    def on_replica() -> Any:
        # Drawn anew in each call, so that no compiler can fold the product away; the mean
        # of w is 1 / n, which keeps the chain from overflowing.
        w = tf.random.uniform((n, n), maxval=2 / n, dtype=dtype)
        return tf.reduce_sum(_chained(w, w, chain))

    @tf.function
    def step() -> Any:
        return connection.strategy.reduce("SUM", connection.strategy.run(on_replica), axis=None)

    return lambda: step().numpy()


def _jax_step(connection: "Connection", n: int, chain: int, dtype: str) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    w = jnp.ones((n, n), dtype) / n
    rows = jax.sharding.NamedSharding(connection.mesh, jax.sharding.PartitionSpec("batch"))
    x = jax.device_put(jnp.ones((connection.num_cores * n, n), dtype), rows)
    step = jax.jit(lambda x, w: _chained(x, w, chain))
    return lambda: step(x, w).block_until_ready()
