"""The doctor: each finding in the runtime where people meet it, and the verdict that follows."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import runtimes

from colabtpu import doctor
from colabtpu.catalogue import ENTRIES
from colabtpu.doctor import diagnose
from colabtpu.environment import Holder
from colabtpu.errors import InvalidArgumentError

TF_TPU = {"tensorflow-tpu": "2.20.0", "tensorboard": "2.20.0"}


def codes(diagnosis, severity=None):
    return {f.code for f in diagnosis.findings if severity in (None, f.severity)}


def changed(environment, *, drop=(), variables=None, **more):
    """The same environment with some builds added or dropped and some variables set."""
    builds = {n: v for n, v in environment.builds.items() if n not in drop}
    builds |= {name.replace("_", "-"): v for name, v in more.pop("builds", {}).items()}
    variables = {**environment.variables, **(variables or {})}
    return dataclasses.replace(environment, builds=builds, variables=variables, **more)


@pytest.fixture
def colab(tmp_path):
    return runtimes.colab_tpu(tmp_path)


# Verdicts, runtime by runtime


def test_colabs_tpu_as_it_starts_can_train_on_jax_and_says_why_not_tensorflow(colab):
    found = diagnose(colab)
    assert found.ready
    assert (found.engine, found.device) == ("jax", "TPU v5e, 1 chip")
    assert "TensorFlow is not installed" in found.reason
    assert codes(found, "note") == {"tensorflow-missing-on-tpu"}
    assert codes(found, "warning") == {"tensorboard-missing"}


def test_colabs_tpu_with_the_right_tensorflow_takes_tensorflow(colab):
    found = diagnose(changed(colab, builds=TF_TPU))
    assert (found.ready, found.engine) == (True, "tensorflow")
    assert codes(found) == set()


def test_asking_for_tensorflow_on_colabs_tpu_as_it_starts_is_an_error(colab):
    found = diagnose(colab, "tensorflow")
    assert not found.ready
    assert codes(found, "error") == {"tensorflow-missing-on-tpu"}
    assert "install --engine tensorflow" in found.findings[0].fix


def test_kaggles_tpu_as_it_starts_takes_jax_and_names_tensorflow_cpu(tmp_path):
    found = diagnose(runtimes.kaggle_tpu(tmp_path))
    assert (found.ready, found.engine, found.device) == (True, "jax", "TPU v5e, 8 chips")
    assert codes(found) == {"kaggle-tensorflow-cpu"}


def test_colabs_cpu_runtime_trains_on_tensorflow_on_the_cpu(tmp_path):
    found = diagnose(runtimes.colab_cpu(tmp_path))
    assert (found.ready, found.engine) == (True, "tensorflow")
    assert found.device == "CPU, as 8 logical devices"
    assert codes(found) == {"no-accelerator"}


def test_colabs_gpu_runtime_trains_on_tensorflow_on_the_gpu(tmp_path):
    found = diagnose(runtimes.colab_gpu(tmp_path))
    assert (found.ready, found.engine, codes(found)) == (True, "tensorflow", set())


def test_an_empty_machine_cannot_train_and_is_told_to_install(tmp_path):
    found = diagnose(runtimes.machine(tmp_path))
    assert not found.ready
    assert codes(found, "error") == {"keras-missing", "tensorflow-missing"}


def test_a_machine_with_jax_alone_takes_jax(tmp_path):
    builds = {"jax": "0.7.2", "jaxlib": "0.7.2", "keras": "3.15.1"}
    found = diagnose(runtimes.machine(tmp_path, builds=builds))
    assert (found.ready, found.engine) == (True, "jax")


# The choice of engine


def test_a_keras_that_is_imported_has_settled_the_engine(tmp_path):
    keras = SimpleNamespace(backend=SimpleNamespace(backend=lambda: "jax"))
    environment = runtimes.colab_cpu(tmp_path, modules={"keras": keras})
    assert doctor.choose_engine(environment)[0] == "jax"
    refused = diagnose(environment, "tensorflow")
    assert codes(refused, "error") == {"keras-imported-on-another-backend"}


def test_keras_backend_is_obeyed_where_that_engine_can_run(tmp_path, colab):
    asks_jax = changed(runtimes.colab_cpu(tmp_path), variables={"KERAS_BACKEND": "jax"})
    assert doctor.choose_engine(asks_jax) == ("jax", "KERAS_BACKEND=jax")
    asks_tensorflow = changed(colab, variables={"KERAS_BACKEND": "tensorflow"})
    assert doctor.choose_engine(asks_tensorflow)[0] == "jax"
    assert "keras-backend-conflicts" in codes(diagnose(asks_tensorflow), "warning")


def test_a_wrong_engine_is_refused(colab):
    with pytest.raises(InvalidArgumentError, match="'torch'"):
        diagnose(colab, "torch")


# Findings one by one. Each case: what is changed on Colab's v5e-1 that had the right
# tensorflow-tpu, the engine, the finding that must come, and the words it must hold.

ON_A_TPU = [
    ({"drop": ["tensorflow-tpu"], "builds": {"tensorflow": "2.20.0"}}, "tensorflow",
     "stock-tensorflow-on-tpu", "tensorflow 2.20.0"),
    ({"builds": {"tensorflow": "2.21.0"}}, "tensorflow",
     "two-tensorflows", "tensorflow-tpu 2.20.0 and tensorflow 2.21.0"),
    ({"builds": {"tensorflow": "2.21.0", "keras-hub": "0.26.0"}}, "tensorflow",
     "keras-hub-pulled-tensorflow", "keras-hub"),
    ({"builds": {"libtpu": "0.0.52"}}, "tensorflow",
     "libtpu-outside-range", "libtpu 0.0.52"),
    ({"builds": {"libtpu": "0.0.10"}}, "tensorflow",
     "libtpu-outside-range", "abort"),
    ({"drop": ["libtpu"]}, "tensorflow", "tensorflow-without-libtpu", "without libtpu"),
    ({"drop": ["libtpu"]}, "jax", "jax-without-libtpu", "jax 0.7.2"),
    ({"drop": ["jaxlib"]}, "jax", "jax-missing", "jaxlib"),
    ({"drop": ["keras"]}, "jax", "keras-missing", "no keras"),
    ({"builds": {"keras": "2.15.0"}}, "jax", "keras-2", "2.15.0"),
    ({"variables": {"TPU_LOAD_LIBRARY": "0"}}, "tensorflow", "tpu-library-off", "=0"),
    ({"variables": {"TF_USE_LEGACY_KERAS": "1"}}, "tensorflow", "legacy-keras", "Keras 2"),
    ({"variables": {"JAX_PLATFORMS": "cpu"}}, "jax", "jax-held-to-another-platform", "=cpu"),
    ({"imported": frozenset({"tensorflow"})}, "tensorflow",
     "tensorflow-imported-too-early", "TF_PLUGGABLE_DEVICE_LIBRARY_PATH"),
    ({"python": "3.10.12"}, "jax", "python-unsupported", "3.10.12"),
    ({"python": "3.14.0"}, "jax", "python-unsupported", "3.14.0"),
    ({"tpu_holders": (Holder(77, "python3", "/dev/vfio/0"),)}, "jax",
     "tpu-held-by-another-process", "pid 77 (python3) holds /dev/vfio/0"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "engine", "code", "said"), ON_A_TPU)
def test_an_error_on_a_tpu_is_found_and_stops_the_run(colab, change, engine, code, said):
    good = changed(colab, builds=TF_TPU)
    assert code not in codes(diagnose(good, engine))
    found = diagnose(changed(good, **change), engine)
    finding = next(f for f in found.findings if f.code == code)
    assert said in f"{finding.what} {finding.why}"
    if code != "keras-hub-pulled-tensorflow":
        assert not found.ready
    assert found.findings[0].severity == "error", "errors come first"


WARNINGS = [
    ({"variables": {"COLAB_TPU_ADDR": "10.0.0.2:8470"}}, "legacy-tpu-address", "10.0.0.2:8470"),
    ({"variables": {"TPU_NAME": "grpc://10.0.0.2:8470"}}, "legacy-tpu-address", "grpc://"),
    ({"variables": {"XRT_TPU_CONFIG": "tpu_worker;0;x"}}, "legacy-tpu-address", "tpu_worker"),
    ({"variables": {"TPU_NAME": "local"}}, "tpu-name-local", "TPU_NAME='local'"),
    ({"variables": {"TPU_NAME": ""}}, "tpu-name-empty", "TPU_NAME=''"),
    ({"variables": {"KERAS_BACKEND": "torch"}}, "keras-backend-conflicts", "torch"),
    ({"imported": frozenset({"jax", "tensorflow"}),
      "variables": {"PJRT_DEVICE": "TPU", "NEXT_PLUGGABLE_DEVICE_USE_C_API": "true",
                    "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": "/lib/libtpu.so"}},
     "jax-beside-tensorflow", "jax and tensorflow"),
    ({"builds": {"setuptools": "82.0.0"}}, "tensorboard-without-pkg-resources", "82.0.0"),
    ({"drop": ["setuptools"]}, "tensorboard-without-pkg-resources", "no setuptools"),
    ({"drop": ["tensorboard"]}, "tensorboard-missing", "no tensorboard"),
    ({"builds": {"keras": "3.9.2"}}, "keras-untried", "3.9.2"),
    ({"builds": {"keras-hub": "0.32.0"}}, "keras-hub-newer-than-keras", "keras 3.13.2"),
    ({"builds": {"tensorflow-text": "2.21.1"}}, "tensorflow-text-of-another-release", "2.21.1"),
    ({"chip": None}, "unknown-tpu", "TPU_ACCELERATOR_TYPE"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "code", "said"), WARNINGS)
def test_a_warning_is_given_and_does_not_stop_the_run(colab, change, code, said):
    good = changed(colab, builds=TF_TPU)
    assert code not in codes(diagnose(good))
    found = diagnose(changed(good, **change), "tensorflow")
    finding = next(f for f in found.findings if f.code == code)
    assert finding.severity == "warning"
    assert said in f"{finding.what} {finding.why}"
    assert found.ready


def test_libtpu_that_no_engine_on_a_cpu_machine_could_load_is_an_error_there_too(tmp_path):
    builds = {"tensorflow-tpu": "2.20.0", "libtpu": "0.0.52", "keras": "3.15.1"}
    found = diagnose(runtimes.machine(tmp_path, builds=builds))
    assert "libtpu-outside-range" in codes(found, "error")


@pytest.mark.parametrize(
    ("libtpu", "fits"),
    # Each was imported with tensorflow-tpu 2.20.0 on a host without a chip.
    [
        ("0.0.10", False),
        ("0.0.14", True),
        ("0.0.17", True),
        ("0.0.21.1", True),
        ("0.0.30", True),
        ("0.0.36", False),
        ("0.0.42.1", False),
        ("0.0.52", False),
    ],
)
def test_the_libtpus_that_were_tried(colab, libtpu, fits):
    found = diagnose(changed(colab, builds=TF_TPU | {"libtpu": libtpu}), "tensorflow")
    assert ("libtpu-outside-range" not in codes(found)) == fits


def test_a_keras_hub_that_imports_tensorflow_is_a_warning_on_jax_alone(colab):
    old = changed(colab, builds={"keras-hub": "0.29.1"})
    assert "keras-hub-without-tensorflow" in codes(diagnose(old, "jax"), "warning")
    new = changed(colab, builds={"keras-hub": "0.32.0", "keras": "3.15.1"})
    assert "keras-hub-without-tensorflow" not in codes(diagnose(new, "jax"))


def test_tpu7x_takes_jax_even_where_tensorflow_tpu_is_installed(tmp_path):
    builds = runtimes.COLAB_TPU_BUILDS | TF_TPU
    runtimes.add_pci(tmp_path, "0x0076")
    found = diagnose(runtimes.machine(tmp_path, builds=builds))
    assert (found.ready, found.engine) == (True, "jax")
    assert "tpu7x" in found.reason


def test_a_gpu_with_builds_for_the_cpu_alone(tmp_path):
    runtimes.add_node(tmp_path, "nvidia0")
    builds = {"tensorflow-cpu": "2.20.0", "jax": "0.7.2", "jaxlib": "0.7.2", "keras": "3.15.1"}
    environment = runtimes.machine(tmp_path, builds=builds)
    assert "gpu-with-cpu-only-tensorflow" in codes(diagnose(environment, "tensorflow"), "error")
    assert "gpu-with-cpu-only-jax" in codes(diagnose(environment, "jax"), "error")
    assert not diagnose(environment).ready


def test_a_gpu_without_its_driver_is_mentioned_and_the_cpu_is_used(tmp_path):
    runtimes.add_pci(tmp_path, "0x27b8", vendor="0x10de")
    environment = runtimes.machine(tmp_path, builds=runtimes.COLAB_CPU_BUILDS)
    found = diagnose(environment)
    assert found.ready
    assert "gpu-without-driver" in codes(found, "warning")


def test_a_shell_on_colabs_v6e_without_the_kernels_variables_is_warned(tmp_path):
    kernel = runtimes.detect(runtimes.COLAB_V6E, tmp_path, modules={})
    assert "control-service-unknown" not in codes(diagnose(kernel))
    runtimes.add_pci(tmp_path, "0x006f")
    shell = runtimes.detect({}, tmp_path, builds=runtimes.COLAB_TPU_BUILDS, modules={})
    assert "control-service-unknown" in codes(diagnose(shell), "warning")


def test_metadata_queries_are_noted_off_google_cloud_only(tmp_path, colab):
    bare = dataclasses.replace(colab, variables={})
    assert "metadata-server-is-asked" in codes(diagnose(bare), "note")
    on_gce = dataclasses.replace(bare, platform="cloud_tpu_vm", on_gce=True)
    assert "metadata-server-is-asked" not in codes(diagnose(on_gce))
    kaggle = runtimes.kaggle_tpu(tmp_path)
    assert "metadata-server-is-asked" not in codes(diagnose(kaggle)), "addresses are local there"


def test_a_variable_that_names_a_tpu_which_is_not_there(tmp_path):
    environment = runtimes.detect(runtimes.GKE_V6E, tmp_path, builds={}, modules={})
    assert "tpu-variable-without-a-chip" in codes(diagnose(environment), "warning")
    runtimes.add_node(tmp_path, "vfio/0")
    environment = runtimes.detect(runtimes.GKE_V6E, tmp_path, builds={}, modules={})
    assert "tpu-variable-without-a-chip" not in codes(diagnose(environment))


# What it prints


def test_text_card_and_json_show_the_same_findings_and_figures(colab):
    found = diagnose(changed(colab, variables={"TPU_NAME": "<b>"}), "tensorflow")
    text, card = str(found), found._repr_html_()
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["environment"]["chip"] == "v5e"
    assert plain["device"] in text
    assert plain["device"] in card
    for finding in plain["findings"]:
        for part in (finding["what"], finding["fix"]):
            assert part in text
        assert finding["code"] in card
    assert "<b>'" not in card, "values are escaped"


def test_command_prints_and_its_status_says_whether_a_run_can_start(capsys, monkeypatch, tmp_path):
    from colabtpu import cli

    good, bad = runtimes.colab_tpu(tmp_path), runtimes.machine(tmp_path)
    monkeypatch.setattr(doctor.surroundings, "detect", lambda: good)
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engine"] == "jax"
    monkeypatch.setattr(doctor.surroundings, "detect", lambda: bad)
    assert cli.main(["doctor"]) == 1
    assert "cannot start" in capsys.readouterr().out


def test_every_entry_says_what_why_and_the_next_step():
    assert len({entry.code for entry in ENTRIES}) == len(ENTRIES)
    for entry in ENTRIES:
        assert entry.severity in ("error", "warning", "note"), entry.code
        assert entry.what, entry.code
        assert len(entry.why) > 20, entry.code
        assert len(entry.fix) > 5, entry.code
