"""The training step of every notebook compiles for the TPU that Colab gives.

A notebook is run as far as its first `fit`, in a process of its own and at its smallest size; the
model and the data that `fit` got are then judged by the TPU compiler.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

from colabtpu.preflight import compiler

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.tpu_compiler,
    pytest.mark.skipif(bool(compiler.unavailable()), reason="no TPU compiler here"),
]

RUN = """
import json, os, re, sys
import colabtpu as ct
source, result = sys.argv[1:]
sys.argv[1:] = []

class Reached(BaseException):
    pass

def fit(self, x=None, y=None, *args, batch_size=None, **kwargs):
    import keras
    keras.Model.fit = original
    data = x if y is None else (x, y)
    report = ct.preflight(self, data, "v5e-1", batch=batch_size, memory_only=True, advise=False)
    with open(result, "w") as file:
        file.write(report.to_json())
    raise Reached

names = {"__name__": "__main__"}
for cell in json.load(open(source))["cells"]:
    if cell["cell_type"] != "code":
        continue
    lines = "".join(cell["source"]).splitlines()
    code = "\\n".join(re.sub(r"^(\\s*)[!%].*", r"\\1pass", line) for line in lines)
    try:
        exec(compile(code, source, "exec"), names)
    except Reached:
        break
    if "keras" in sys.modules and "original" not in globals():
        import keras
        original, keras.Model.fit = keras.Model.fit, fit
"""


def training_notebooks():
    found = sorted((ROOT / "notebooks").glob("*.ipynb"))
    return [path for path in found if ".fit(" in path.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("path", training_notebooks(), ids=lambda p: p.stem)
def test_its_training_step_compiles_for_v5e(path, tmp_path):
    env = {
        **os.environ,
        "CT_ENGINE": keras.backend.backend(),
        "CT_SIZE": "tiny",
        "CT_RUN_DIR": str(tmp_path / "run"),
        "COLABTPU_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    for name in ("XLA_FLAGS", "KERAS_BACKEND"):  # `connect()` sets them
        env.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path), str(tmp_path / "report.json")],
        env=env,
        cwd=path.parent,
        capture_output=True,
        text=True,
    )
    assert (tmp_path / "report.json").exists(), done.stdout[-2000:] + done.stderr[-4000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["compiles"], report["fits"]) == (True, True), report["message"]
    assert report["engine"] == keras.backend.backend()
