"""The migrated notebooks run: on the CPU, shortened, with stand-ins for what is not reachable.

run_migrated.py says what is stood in. 2023_hf_tf.py is not here: transformers has no TensorFlow
models any more, and migrate says so; 2025_plain_install.ipynb runs up to its pretrained weights.
"""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from colabtpu.migrate import migrate, write

HERE = Path(__file__).parent
CASES = HERE.parent / "data/old_notebooks"

slow = pytest.mark.slow


def run(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / name
    file.write_bytes((CASES / f"{name}.txt").read_bytes())
    write(migrate(file))
    return subprocess.run(
        [sys.executable, str(HERE / "run_migrated.py"), str(file)],
        capture_output=True,
        check=False,
        text=True,
        cwd=HERE.parents[1],
    )


@pytest.fixture(autouse=True)
def tensorflow_only(engine):
    if engine != "tensorflow":
        pytest.skip("the old notebooks are written for TensorFlow")


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("2018_contrib.py", None),
        pytest.param("2019_colab_addr.py", "out.weights.h5", marks=slow),
        pytest.param("2020_kaggle_detect.py", None, marks=slow),
        pytest.param("2021_experimental_strategy.py", "model.h5", marks=slow),
    ],
)
def test_a_migrated_notebook_trains_on_the_cpu(tmp_path, name, saved):
    done = run(name, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(x) for x in re.search(r"LOSSES \[(.*)\]", done.stdout)[1].split(",")]
    assert losses
    assert all(math.isfinite(loss) for loss in losses)
    assert "2 replicas" in done.stdout
    assert saved is None or saved in done.stdout


@slow
def test_the_notebook_of_2025_runs_up_to_its_pretrained_weights(tmp_path):
    done = run("2025_plain_install.ipynb", tmp_path)
    assert "replicas 2" in done.stdout
    assert done.returncode == 0 or "from_preset" in done.stderr
