"""Time to a verdict on GPT-2 small, 8 x 1,024, v5e-1: memory alone, in full, and once more.

    python benchmarks/preflight.py [--engine jax|tensorflow] [--model kerashub:gpt2-small] [--full]

The baseline is the full compilation as libtpu does it. Each run is a process of its own, as from
a shell, with a cache of its own; the seconds inside libtpu are given apart from those spent on
importing, building and lowering. `--full` is minutes of work: without it only the memory verdict
and the cached one are measured. Figures depend on the machine and its load: print both.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time


def verdict(engine: str, model: str, cache: str, *options: str) -> tuple[float, dict[str, object]]:
    """Returns the seconds that the command took, and its report."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "colabtpu", "preflight", "--model", model, "--engine", engine,
         "--batch", "8", "--seq-len", "1024", "--no-advice", "--json", *options],
        env={**os.environ, "COLABTPU_CACHE": cache},
        capture_output=True,
        text=True,
    )  # fmt: skip
    took = time.perf_counter() - start
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr or done.stdout)
    return took, json.loads(done.stdout)


def main() -> None:
    """Prints each verdict's time, and its ratio to the baseline where that was measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", default="jax", choices=("jax", "tensorflow"))
    parser.add_argument("--model", default="kerashub:gpt2-small")
    parser.add_argument("--full", action="store_true", help="the baseline too: minutes")
    args = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    baseline = None
    with tempfile.TemporaryDirectory() as cache:
        cases: list[tuple[str, tuple[str, ...]]] = [("full (baseline)", ())] if args.full else []
        cases += [("memory only", ("--memory-only",)), ("memory only, cached", ("--memory-only",))]
        cases += [("full, cached", ())] if args.full else []
        for name, options in cases:
            # The full verdict would answer the question about memory too.
            own = os.path.join(cache, "full" if name.startswith("full") else "memory")
            took, report = verdict(args.engine, args.model, own, *options)
            baseline = baseline or (took if args.full else None)
            ratio = f"{took / baseline:6.1%} of the baseline" if baseline else ""
            inside = report["compile_seconds"]
            print(f"{name:<20} {took:8.1f} s, {inside:8.1f} s of it in libtpu   {ratio}")
    print(f"load after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
