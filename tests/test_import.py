"""Importing the package costs nothing: no ML framework comes with it."""

import json
import subprocess
import sys

import pytest

FRAMEWORKS = {"tensorflow", "jax", "jaxlib", "keras", "keras_hub", "torch", "libtpu", "tensorboard"}


@pytest.mark.parametrize(
    "module",
    [
        "colabtpu",
        "colabtpu.chips",
        "colabtpu.environment",
        "colabtpu.catalogue",
        "colabtpu.doctor",
        "colabtpu.install",
        "colabtpu.cli",
    ],
)
def test_importing_brings_no_ml_framework(module):
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert not FRAMEWORKS & set(json.loads(done.stdout))


def test_looking_around_and_planning_bring_no_ml_framework():
    code = (
        "import json, sys, colabtpu; from colabtpu import install; "
        "d = colabtpu.doctor.diagnose(); str(d), d.to_dict(), "
        "install.plan(d.environment, d.engine); print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert not FRAMEWORKS & set(json.loads(done.stdout))


def test_numpy_does_not_come_with_the_package_either():
    code = "import sys, colabtpu.doctor, colabtpu.install; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "False"
