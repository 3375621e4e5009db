"""`connect()` where it must say no: every way into a TPU that is not there ends in one clear error.

No ML framework is imported here; what needs one runs in a process of its own.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from colabtpu import environment as surroundings
from colabtpu import failures, probe, tensorflow_engine
from colabtpu.chips import chip
from colabtpu.connection import Wish, connect, open_connection
from colabtpu.environment import Environment, Holder
from colabtpu.errors import InvalidArgumentError
from colabtpu.wish import legacy_address

REPOSITORY = Path(__file__).resolve().parent.parent

COLAB = {
    "COLAB_RELEASE_TAG": "release-colab-external",
    "COLAB_TPU_1VM": "1",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
    "TPU_HOST_BOUNDS": "1,1,1",
}
COLAB_V5E = {**COLAB, "TPU_ACCELERATOR_TYPE": "v5e-1"}
COLAB_V6E = {**COLAB, "TPU_ACCELERATOR_TYPE": "v6e-1", "PJRT_DEVICE": "TPU"}
KAGGLE = {
    "ISTPUVM": "1",
    "TPU_PROCESS_ADDRESSES": "local",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "KAGGLE_KERNEL_RUN_TYPE": "Interactive",
}
GKE = {
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
    "TPU_TOPOLOGY": "1x1",
    "TPU_SKIP_MDS_QUERY": "true",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
TPU7X = {"TPU_ACCELERATOR_TYPE": "tpu7x-8", "TPU_WORKER_HOSTNAMES": "localhost"}

IMAGE = {"keras": "3.13.2", "jax": "0.7.2", "jaxlib": "0.7.2", "libtpu": "0.0.21.1"}
TENSORFLOW_TPU = {**IMAGE, "tensorflow-tpu": "2.20.0"}


def _environment(
    tmp_path: Path, variables: dict[str, str], builds: dict[str, str], *imported: str
) -> Environment:
    modules = dict.fromkeys(imported)
    return surroundings.detect(
        variables, tmp_path, builds=builds, modules=modules, python="3.13.15"
    )


def _python(
    script: str, variables: dict[str, str] | None = None, python: str = sys.executable
) -> Any:
    """Runs `script` in a clean process and returns the JSON of its last line."""
    clean = {k: v for k, v in os.environ.items() if not surroundings._VARIABLES.fullmatch(k)}
    done = subprocess.run(
        [python, "-c", textwrap.dedent(script)],
        env={**clean, "PYTHONPATH": str(REPOSITORY), "TF_CPP_MIN_LOG_LEVEL": "3"}
        | (variables or {}),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("variables", "builds", "kind", "says"),
    [
        (COLAB_V5E, IMAGE, failures.MissingEngineError, "colabtpu install --engine tensorflow"),
        (COLAB_V6E, IMAGE, failures.MissingEngineError, "colabtpu install --engine tensorflow"),
        (KAGGLE, {**IMAGE, "tensorflow-cpu": "2.20.0"}, failures.WrongBuildError, "2.20.0"),
        (GKE, {**IMAGE, "tensorflow": "2.20.0"}, failures.WrongBuildError, "tensorflow 2.20.0"),
        (
            GKE,
            {**TENSORFLOW_TPU, "tensorflow": "2.20.0"},
            failures.WrongBuildError,
            "Two TensorFlows",
        ),
        (GKE, {**TENSORFLOW_TPU, "libtpu": "0.0.52"}, failures.WrongLibtpuError, "0.0.52"),
        (TPU7X, TENSORFLOW_TPU, failures.WrongBuildError, "TPU7x"),
    ],
)
def test_tensorflow_refuses_before_it_is_imported(
    tmp_path: Path,
    variables: dict[str, str],
    builds: dict[str, str],
    kind: type[Exception],
    says: str,
) -> None:
    with pytest.raises(kind, match=says):
        open_connection(Wish("tensorflow"), _environment(tmp_path, variables, builds))
    assert not {"tensorflow", "jax", "keras"} & set(sys.modules)


@pytest.mark.parametrize("engine", ["tensorflow", "auto"])
def test_tensorflow_imported_too_early_on_a_tpu(tmp_path: Path, engine: str) -> None:
    environment = dataclasses.replace(
        _environment(tmp_path, COLAB_V5E, TENSORFLOW_TPU),
        imported=frozenset({"tensorflow", "keras"}),  # the first imports the second
        keras_backend="tensorflow",
    )
    with pytest.raises(failures.TooLateError, match=r"[Rr]estart the kernel"):
        open_connection(Wish(engine), environment)


def test_keras_on_another_backend(tmp_path: Path) -> None:
    environment = _environment(tmp_path, {}, TENSORFLOW_TPU, "keras")
    environment = dataclasses.replace(environment, keras_backend="torch")
    with pytest.raises(failures.TooLateError, match="torch"):
        open_connection(Wish(), environment)


@pytest.mark.parametrize("engine", ["tensorflow", "jax", "auto"])
def test_a_busy_tpu_names_the_process_and_hides_behind_no_fallback(
    tmp_path: Path, engine: str
) -> None:
    environment = dataclasses.replace(
        _environment(tmp_path, COLAB_V5E, TENSORFLOW_TPU),
        tpu_holders=(Holder(4321, "python3", "/dev/vfio/0"),),
    )
    with pytest.raises(failures.TPUBusyError, match="4321"):
        open_connection(Wish(engine), environment)


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({"TPU_NAME": "grpc://10.0.0.2:8470"}, "grpc://10.0.0.2:8470"),
        ({"COLAB_TPU_ADDR": "10.0.0.2:8470"}, "grpc://10.0.0.2:8470"),
        ({"XRT_TPU_CONFIG": "tpu_worker;0;10.0.0.2:8470"}, "grpc://10.0.0.2:8470"),
        ({"TPU_NAME": "local"}, None),
        ({"TPU_NAME": ""}, None),
        ({"TPU_NAME": "my-tpu"}, None),
        ({"COLAB_TPU_ADDR": "10.0.0.2:port"}, None),
        ({"COLAB_TPU_1VM": ""}, None),
        ({}, None),
    ],
)
def test_legacy_variables(variables: dict[str, str], address: str | None) -> None:
    assert legacy_address(variables)[0] == address


@pytest.mark.parametrize("address", ["grpc://127.0.0.1:9", "127.0.0.1:9"])
def test_an_address_where_nothing_answers(address: str) -> None:
    with pytest.raises(failures.UnreachableError, match=r"grpc://127\.0\.0\.1:9"):
        connect(tpu=address)


def test_a_dead_legacy_address_stops_an_explicit_engine(tmp_path: Path) -> None:
    dead = {"XRT_TPU_CONFIG": "tpu_worker;0;127.0.0.1:9"}
    environment = _environment(tmp_path, dead, {**IMAGE, "tensorflow": "2.20.0"})
    with pytest.raises(failures.UnreachableError, match="XRT_TPU_CONFIG"):
        open_connection(Wish("tensorflow"), environment)


@pytest.mark.parametrize(
    "arguments",
    [
        {"engine": "torch"},
        {"engine": None},
        {"engine": ""},
        {"engine": ["jax"]},
        {"devices": 0},
        {"devices": -1},
        {"devices": 2.0},
        {"devices": True},
        {"devices": "8"},
        {"tpu": ""},
        {"tpu": "  "},
        {"tpu": 8470},
        {"tpu": "grpc://a:1,grpc://b:1"},
        {"tpu": "grpc://10.0.0.2:port"},
        {"tpu": "grpc://"},
        {"tpu": "grpc://:8470"},
        {"tpu": "grpc://10.0.0.2:99999"},
        {"tpu": "http://10.0.0.2"},
        {"engine": "jax", "tpu": "grpc://10.0.0.2:8470"},
    ],
)
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="Received: "):
        connect(**arguments)


def test_pjrt_variables_where_the_chip_needs_them() -> None:
    given = {
        "TF_XLA_FLAGS": "--tf_mlir_enable_mlir_bridge=false",
        "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": "/lib/libtpu.so",
    }
    for name in ("v2", "v3", "v4"):
        assert tensorflow_engine.pjrt_variables(chip(name), given) == {}
    for name in ("v5e", "v5p", "v6e"):
        assert tensorflow_engine.pjrt_variables(chip(name), given) == {
            "PJRT_DEVICE": "TPU",
            "NEXT_PLUGGABLE_DEVICE_USE_C_API": "true",
            "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": "/lib/libtpu.so",
            "TF_XLA_FLAGS": "--tf_mlir_enable_mlir_bridge=false "
            "--tf_mlir_enable_convert_control_to_data_outputs_pass=true "
            "--tf_mlir_enable_merge_control_flow_pass=true",
        }


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        ("import os; os.abort()", failures.WrongLibtpuError, "SIGABRT"),
        ("import ctypes; ctypes.string_at(0)", failures.WrongLibtpuError, "SIGSEGV"),
        ("import time; time.sleep(600)", failures.UnreachableError, "within 2 s"),
        (
            "raise RuntimeError('The TPU is already in use by process with pid 77.')",
            failures.TPUBusyError,
            "pid 77",
        ),
        ("raise ModuleNotFoundError(\"No module named 'jax'\")", failures.MissingEngineError, ""),
        ("raise SystemExit('what is this?')", failures.AcceleratorError, "what is this"),
    ],
)
def test_the_probe_survives_its_child(
    tmp_path: Path, body: str, kind: type[Exception], says: str
) -> None:
    (tmp_path / "jax.py").write_text(body)
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    outcome = probe.run("jax", "local", variables, seconds_allowed=2)
    assert outcome.answer is None
    assert outcome.stage == "import"
    error = failures.recognise(outcome, "jax", "local")
    assert type(error) is kind
    assert says in str(error)


def test_connecting_needs_no_framework_at_import() -> None:
    loaded = _python("""
        import json, sys
        import colabtpu, colabtpu.connection
        colabtpu.connect, colabtpu.Connection
        print(json.dumps(sorted({"tensorflow", "jax", "keras", "numpy"} & set(sys.modules))))
    """)
    assert loaded == []


def test_a_colab_tpu_that_is_not_there() -> None:
    """Real builds, Colab's variables, no chip: two clear errors, then a fallback that says why."""
    said = _python(
        """
        import json, os
        import colabtpu as ct
        said = {}
        for engine in ("tensorflow", "jax"):
            try:
                ct.connect(engine=engine)
            except ct.ColabTPUError as error:
                said[engine] = [type(error).__name__, str(error)]
        said["preset"] = os.environ.get("KERAS_BACKEND")
        tpu = ct.connect(devices=2)
        import keras
        said["auto"] = [tpu.engine, tpu.device, tpu.num_cores, keras.backend.backend()]
        said["card"] = tpu.describe()
        print(json.dumps(said))
        """,
        # libtpu's lock would make this test fail beside another that compiles with libtpu.
        {**COLAB_V5E, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
    )
    assert said["tensorflow"][0] == "WrongBuildError"
    assert said["jax"][0] == "NoTPUError"
    assert said["preset"] is None, "a failed connect() must leave the backend as it was"
    assert said["auto"] == ["jax", "cpu", 2, "jax"]
    assert "and not the TPU" in said["card"]
    assert "tensorflow 2.20.0 has no TPU kernels" in said["card"]
    assert "TPU_ACCELERATOR_TYPE=v5e-1" in said["card"]


WORKER = """
    import json, os, sys
    import subprocess
    worker = subprocess.Popen(
        [sys.executable, "-c",
         "import tensorflow as tf, time\\n"
         "server = tf.distribute.Server({'worker': ['127.0.0.1:0']}, protocol='grpc')\\n"
         "print(server.target, flush=True)\\n"
         "server.join()"],
        stdout=subprocess.PIPE, text=True)
    target = worker.stdout.readline().strip()
    import colabtpu as ct
    said = {}
"""


def test_a_real_worker_without_a_tpu() -> None:
    said = _python(
        WORKER
        + """
    try:
        ct.connect(tpu=target)
    except ct.ColabTPUError as error:
        said["error"] = [type(error).__name__, str(error)]
    said["imported"] = "tensorflow" in sys.modules
    worker.kill()
    print(json.dumps(said))
    """
    )
    assert said["error"][0] == "NoTPUError"
    assert "TPUs not found in the cluster" in said["error"][1]
    assert not said["imported"], "the probe must not bring TensorFlow into this process"


@pytest.mark.slow
def test_a_legacy_variable_that_leads_to_a_worker_without_a_tpu() -> None:
    said = _python(
        WORKER
        + """
    os.environ["COLAB_TPU_ADDR"] = target.removeprefix("grpc://")
    tpu = ct.connect()
    said["connection"] = [tpu.device, tpu.num_cores]
    said["card"] = tpu.describe()
    worker.kill()
    print(json.dumps(said))
    """
    )
    assert said["connection"] == ["cpu", 8]
    assert "COLAB_TPU_ADDR=" in said["card"]
    assert "TPUs not found in the cluster" in said["card"]


def _tensorflow_tpu(libtpu: str) -> str:
    """Returns the Python of a cached environment with a real tensorflow-tpu and this libtpu."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "colabtpu" / f"tensorflow-tpu-2.20.0-py{sys.version_info[1]}"
    python = folder / "bin" / "python"
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        make, pip = [sys.executable, "-m", "venv"], [str(python), "-m", "pip", "install", "-q"]
    else:
        make = [uv, "venv", "-q", "--python", sys.executable]
        pip = [uv, "pip", "install", "-q", "--python", str(python)]
    if not python.exists():
        subprocess.run([*make, str(folder)], check=True)
    builds = ["tensorflow-tpu==2.20.0", f"libtpu=={libtpu}", "keras>=3.15.1,<3.16", "rich"]
    subprocess.run([*pip, *builds, "setuptools<82"], check=True)
    return str(python)


TRY = """
    import json, os
    import colabtpu as ct
    from colabtpu import chips, failures, probe, tensorflow_engine
    said = {}
    try:
        ct.connect(engine="tensorflow")
    except ct.ColabTPUError as error:
        said["connect"] = [type(error).__name__, str(error)]
    for chip in ("v4", "v5e"):
        variables = tensorflow_engine.pjrt_variables(chips.chip(chip), os.environ)
        outcome = probe.run("tensorflow", "local", {**os.environ, **variables})
        error = failures.recognise(outcome, "tensorflow", "local")
        said[chip] = [type(error).__name__, outcome.stage, outcome.status]
    tpu = ct.connect()
    said["auto"] = [tpu.engine, tpu.device, tpu.num_cores, os.environ.get("TPU_LOAD_LIBRARY")]
    said["card"] = tpu.describe()
    print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("libtpu", "connects", "v4", "v5e"),
    [
        # Too new: `import tensorflow` aborts, with and without PJRT.
        ("0.0.52", "WrongLibtpuError", ["import", -6], ["import", -6]),
        # Colab's: imports, says that there is no chip, and through PJRT segfaults instead.
        ("0.0.21.1", "NoTPUError", ["initialise", 1], ["initialise", -11]),
    ],
)
def test_a_real_tensorflow_tpu_whose_libtpu_ends_the_process(
    libtpu: str, connects: str, v4: list[Any], v5e: list[Any]
) -> None:
    variables = {**COLAB_V5E, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    said = _python(TRY, variables, _tensorflow_tpu(libtpu))
    assert said["connect"][0] == connects
    assert said["v4"] == [connects, *v4]
    assert said["v5e"] == [connects, *v5e]
    assert said["auto"] == ["tensorflow", "cpu", 8, None]
    assert "and not the TPU" in said["card"]
