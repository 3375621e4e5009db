"""What monitoring costs: `fit` with each feature on against bare `fit`, in one process.

    python benchmarks/monitoring.py --engine jax          # about 5 minutes on two cores
    python benchmarks/monitoring.py --engine tensorflow --rounds 5

Two copies of one model train in turn, one bare and one watched, a block of steps each, after
both have compiled. A ratio is the time of a watched block over that of the bare blocks before
and after it, so that a machine that slows down slows both; the median over the rounds is
printed, with the spread of the middle half. CPU time is printed as well: on a busy machine it
is the steadier of the two. The aim is at most 2 % at default settings.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("tensorflow", "jax"), default="jax")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="steps in a block")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--only", help="one feature of the list")
    options = parser.parse_args()
    os.environ["KERAS_BACKEND"] = options.engine
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in FEATURES.items():
            if options.only in (None, name):
                ratios = measure(options, Path(folder) / name.replace(" ", "-"), arguments)
                print(report(name, ratios), flush=True)


# Feature -> arguments of `callbacks`, beside those that switch everything off.
FEATURES: dict[str, dict[str, Any]] = {
    "bare against bare": {},
    "scalars": {"histograms_every": 0},
    "scalars and panel": {"histograms_every": 0, "panel": True},
    "default settings": {"panel": None},
    "histograms each 100 steps": {"histograms_every": 100},
}


def measure(
    options: argparse.Namespace, folder: Path, arguments: dict[str, Any]
) -> list[tuple[float, float]]:
    """Returns (wall, CPU) ratios of watched blocks over bare blocks."""
    import keras

    from colabtpu import monitor

    bare, watched = build(options), build(options)
    callbacks: list[keras.callbacks.Callback] = []
    if folder.name != "bare-against-bare":
        callbacks = monitor.callbacks(folder, run="run", **{"panel": False} | arguments)
    run_bare = block(bare, options.steps, [])
    run_watched = block(watched, options.steps, callbacks)
    for run in (run_bare, run_watched):
        run()  # compiles
    ratios = []
    before = run_bare()
    for _ in range(options.rounds):
        seen, after = run_watched(), run_bare()
        ratios.append(tuple(2 * s / (b + a) for s, b, a in zip(seen, before, after, strict=True)))
        before = after
    return ratios  # type: ignore[return-value]


def build(options: argparse.Namespace) -> Any:
    """A small language model, compiled."""
    import keras

    import colabtpu as ct

    keras.utils.set_random_seed(0)
    model = ct.models.transformer_lm(
        vocab_size=2048, seq_len=128, layers=options.layers, dim=options.dim
    )
    model.compile(
        keras.optimizers.AdamW(1e-3),
        loss=ct.losses.next_token(model),
        metrics=ct.losses.metrics(model),
    )
    return model


def block(model: Any, steps: int, callbacks: list[Any]) -> Callable[[], tuple[float, float]]:
    """A function that trains `steps` steps and returns its wall and CPU seconds."""
    import numpy as np

    x = np.random.default_rng(0).integers(0, 2048, (16 * steps, 128), dtype="int32")
    y = np.roll(x, -1, axis=1)

    def run() -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        model.fit(x, y, batch_size=16, callbacks=callbacks, verbose=0, shuffle=False)
        return time.perf_counter() - wall, time.process_time() - cpu

    return run


def report(name: str, ratios: list[tuple[float, float]]) -> str:
    """One line: the median ratios as per cent slower, and the middle half of the wall times."""
    wall, cpu = ([100 * (pair[i] - 1) for pair in ratios] for i in (0, 1))
    low, _, high = statistics.quantiles(wall, n=4) if len(wall) > 1 else (wall[0],) * 3
    return (
        f"{name:28} wall {statistics.median(wall):+6.1f} % [{low:+.1f}, {high:+.1f}]   "
        f"CPU {statistics.median(cpu):+6.1f} %"
    )


if __name__ == "__main__":
    main()
