"""How long `import colabtpu` takes, against a Python that imports nothing.

python benchmarks/import_time.py
"""

import subprocess
import sys
import time

CASES = {
    "pass (baseline)": "pass",
    "import colabtpu": "import colabtpu",
    "the doctor, run": "import colabtpu; colabtpu.doctor.diagnose()",
}
ROUNDS = 15


def seconds(code: str) -> float:
    """Returns the shortest of several runs of a fresh interpreter, in seconds."""
    runs = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        runs.append(time.perf_counter() - start)
    return min(runs)


def main() -> None:
    """Prints each case's time and what it adds to the baseline."""
    baseline = None
    for name, code in CASES.items():
        took = seconds(code)
        baseline = took if baseline is None else baseline
        print(
            f"{name:<18} {took * 1e3:7.1f} ms   {took / baseline:4.2f} x baseline, "
            f"{(took - baseline) * 1e3:+.1f} ms"
        )


if __name__ == "__main__":
    main()
