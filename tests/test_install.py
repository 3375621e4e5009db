"""The installer's plan: what it runs where, in which order, and that a second run is empty."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import runtimes

from colabtpu import doctor, install
from colabtpu.doctor import diagnose
from colabtpu.environment import Environment
from colabtpu.errors import ColabTPUError
from colabtpu.install import Command, plan, restart_reason

REQUIREMENTS = Path(__file__).parents[1] / "requirements"


def pip(environment: Environment, commands: tuple[Command, ...]) -> Environment:
    """Does to the list of builds what pip would do to the machine, dependencies included.

    Stock TensorFlow comes along where pip is let look at the dependencies of keras-hub and
    tensorflow-text: that is the accident the plan must avoid.
    """
    builds = dict(environment.builds)
    for command in commands:
        verb, *words = command.words
        packages = [w for w in words if not w.startswith("-")]
        if verb == "uninstall":
            for name in packages:
                del builds[name]
            continue
        for package in packages:
            name, version = read(package)
            builds[name] = version.strip(".")
            if "--no-deps" in words:
                continue
            if name in ("keras-hub", "tensorflow-text"):
                builds["tensorflow"] = "2.21.0"
            if name == "tensorflow-tpu" and "libtpu" not in " ".join(packages[1:]):
                builds["libtpu"] = "0.0.52"
            if name in ("tensorflow-tpu", "tensorflow"):
                builds = {"tensorboard": "2.20.0", "keras": "3.16.0", "numpy": "2.3.0"} | builds
            if name == "tensorflow" and "[and-cuda]" in package:
                builds["nvidia-cudnn-cu12"] = "9.3.0"
            if name == "jax":
                builds["jaxlib"] = builds["jax"]
                builds |= {"libtpu": "0.0.21.1"} if "[tpu]" in package else {}
                builds |= {"jax-cuda12-plugin": version} if "[cuda12]" in package else {}
    return dataclasses.replace(
        environment,
        builds=builds,
        cuda_libraries=environment.cuda_libraries or "nvidia-cudnn-cu12" in builds,
    )


def read(package: str) -> tuple[str, str]:
    """Name and version of a requirement; for libtpu what Colab has, else its lower bound."""
    pattern = r"([\w-]+)(?:\[[\w-]+\])?(?:[=><]+([\d.]+)[^ ]*)?"
    name, version = re.fullmatch(pattern, package).groups()
    name = name.replace("_", "-")
    return name, "0.0.21.1" if name == "libtpu" else version or "9999.0"


def lines(commands: tuple[Command, ...]) -> list[str]:
    return [str(c) for c in commands]


def at(commands: tuple[Command, ...], part: str) -> int:
    return next(i for i, line in enumerate(lines(commands)) if part in line)


RUNTIMES = {
    "colab tpu": runtimes.colab_tpu,
    "colab gpu": runtimes.colab_gpu,
    "colab cpu": runtimes.colab_cpu,
    "kaggle tpu": runtimes.kaggle_tpu,
    "machine": runtimes.machine,
}


@pytest.mark.parametrize("engine", ["auto", "tensorflow", "jax"])
@pytest.mark.parametrize("name", RUNTIMES)
def test_after_the_plan_a_run_can_start_and_a_second_plan_is_empty(tmp_path, name, engine):
    environment = RUNTIMES[name](tmp_path)
    after = pip(environment, plan(environment, engine))
    found = diagnose(after, engine)
    assert found.ready, str(found)
    assert not [f for f in found.findings if f.severity == "warning"], str(found)
    assert plan(after, engine) == ()


def test_tensorflow_on_colabs_tpu_keeps_what_is_there_and_pulls_no_stock_build(tmp_path):
    environment = runtimes.colab_tpu(tmp_path)
    commands = plan(environment, "tensorflow")
    assert lines(commands)[0] == "pip install tensorflow-tpu==2.20.0 'libtpu>=0.0.14,<=0.0.30'"
    assert "--no-deps" in lines(commands)[at(commands, "keras-hub==")]
    assert "--no-deps" in lines(commands)[at(commands, "tensorflow-text==2.20.1")]
    after = pip(environment, commands)
    assert "tensorflow" not in after.builds
    for kept in ("jax", "jaxlib", "libtpu", "protobuf", "numpy", "tensorflow-datasets"):
        assert after.builds[kept] == environment.builds[kept]


def test_jax_on_colabs_tpu_installs_no_tensorflow_and_touches_no_jax(tmp_path):
    text = " ".join(lines(plan(runtimes.colab_tpu(tmp_path), "jax")))
    assert not re.search(r"tensorflow(?!-datasets)|\bjax|libtpu|numpy|protobuf", text)
    assert "tensorboard==2.20.0" in text


def test_colabs_cpu_and_gpu_runtimes_keep_their_keras_and_tensorflow(tmp_path):
    for runtime in (runtimes.colab_cpu, runtimes.colab_gpu):
        for engine in ("tensorflow", "jax"):
            text = " ".join(lines(plan(runtime(tmp_path), engine)))
            assert "keras" not in text
            assert not re.search(r"tensorflow|jax", text)


def test_stock_tensorflow_goes_before_tensorflow_tpu_comes(tmp_path):
    commands = plan(runtimes.kaggle_tpu(tmp_path), "tensorflow")
    assert lines(commands)[0] == "pip uninstall -y tensorflow-cpu"
    assert at(commands, "uninstall") < at(commands, "tensorflow-tpu==2.20.0")


def test_a_tensorflow_tpu_that_was_overwritten_is_put_back_whole(tmp_path):
    builds = runtimes.COLAB_TPU_BUILDS | {"tensorflow-tpu": "2.20.0", "tensorflow": "2.21.0"}
    commands = plan(runtimes.colab_tpu(tmp_path, builds=builds), "tensorflow")
    assert lines(commands)[:2] == [
        "pip uninstall -y tensorflow",
        "pip install --force-reinstall --no-deps tensorflow-tpu==2.20.0",
    ]


def test_a_libtpu_that_is_too_new_is_replaced(tmp_path):
    builds = runtimes.COLAB_TPU_BUILDS | {"tensorflow-tpu": "2.20.0", "libtpu": "0.0.52"}
    commands = plan(runtimes.colab_tpu(tmp_path, builds=builds), "tensorflow")
    assert lines(commands)[0] == "pip install 'libtpu>=0.0.14,<=0.0.30'"


def test_a_setuptools_that_breaks_tensorboard_is_replaced(tmp_path):
    builds = runtimes.COLAB_CPU_BUILDS | {"setuptools": "82.0.1"}
    commands = plan(runtimes.colab_cpu(tmp_path, builds=builds))
    assert "'setuptools>=70,<82'" in " ".join(lines(commands))


def test_a_keras_hub_that_needs_tensorflow_is_replaced_for_jax(tmp_path):
    builds = runtimes.COLAB_TPU_BUILDS | {"keras-hub": "0.29.1"}
    environment = runtimes.colab_tpu(tmp_path, builds=builds)
    commands = plan(environment, "jax")
    assert "pip install --no-deps keras-hub==0.32.0" in lines(commands)
    assert plan(pip(environment, commands), "jax") == ()


def test_tensorflow_text_follows_the_tensorflow_that_is_there(tmp_path):
    builds = runtimes.COLAB_CPU_BUILDS | {"tensorflow": "2.21.0"}
    del builds["tensorflow-text"]
    commands = plan(runtimes.colab_cpu(tmp_path, builds=builds), "tensorflow")
    assert "tensorflow-text==2.21.*" in " ".join(lines(commands))


def test_a_gpu_with_the_cpu_build_gets_the_cuda_one(tmp_path):
    runtimes.add_node(tmp_path, "nvidia0")
    environment = runtimes.machine(tmp_path, builds={"tensorflow-cpu": "2.20.0", "keras": "3.15.1"})
    commands = plan(environment, "tensorflow")
    assert lines(commands)[0] == "pip uninstall -y tensorflow-cpu"
    assert "tensorflow[and-cuda]" in lines(commands)[1]
    assert "jax[cuda12]" in lines(plan(environment, "jax"))[0]


def test_tensorflow_on_tpu7x_is_refused(tmp_path):
    runtimes.add_pci(tmp_path, "0x0076")
    with pytest.raises(ColabTPUError, match="--engine jax"):
        plan(runtimes.machine(tmp_path, builds=runtimes.COLAB_TPU_BUILDS), "tensorflow")


def test_an_unknown_pair_of_old_wheels_is_not_guessed_at(tmp_path):
    builds = runtimes.COLAB_TPU_BUILDS | {"tensorflow-tpu": "2.18.0"}
    with pytest.raises(ColabTPUError, match="uninstall"):
        plan(runtimes.colab_tpu(tmp_path, builds=builds), "tensorflow")


def test_a_restart_is_asked_for_only_when_a_loaded_build_changes(tmp_path):
    fresh = runtimes.colab_tpu(tmp_path)
    assert restart_reason(fresh, plan(fresh, "tensorflow")) is None
    loaded = dataclasses.replace(fresh, imported=frozenset({"keras", "torch"}))
    assert "keras was imported" in restart_reason(loaded, plan(loaded, "tensorflow"))
    ready = pip(fresh, plan(fresh, "jax"))
    ready = dataclasses.replace(ready, imported=frozenset({"keras", "jax"}))
    assert restart_reason(ready, plan(ready, "jax")) is None


def test_dry_run_prints_the_commands_and_changes_nothing(tmp_path, monkeypatch, capsys):
    from colabtpu import cli

    monkeypatch.setattr(install.surroundings, "detect", lambda: runtimes.colab_tpu(tmp_path))
    monkeypatch.setattr(install, "_call", lambda command: pytest.fail(f"ran {command}"))
    assert cli.main(["install", "--engine", "tensorflow", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "1. pip install tensorflow-tpu==2.20.0" in said
    assert "nothing was changed" in said
    assert cli.main(["install", "--engine", "tensorflow", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed[0]["command"] == "pip install tensorflow-tpu==2.20.0 'libtpu>=0.0.14,<=0.0.30'"
    assert listed[0]["why"]


def test_a_command_that_fails_stops_the_install_with_the_next_step(tmp_path, monkeypatch, capsys):
    from colabtpu import cli

    monkeypatch.setattr(install.surroundings, "detect", lambda: runtimes.colab_tpu(tmp_path))
    monkeypatch.setattr(install, "_words", lambda command: ["false"])
    assert cli.main(["install"]) == 2
    assert "ended with status 1" in capsys.readouterr().err


def test_a_runtime_that_has_everything_is_left_alone(tmp_path, monkeypatch, capsys):
    environment = runtimes.colab_cpu(tmp_path)
    environment = pip(environment, plan(environment))
    monkeypatch.setattr(install.surroundings, "detect", lambda: environment)
    monkeypatch.setattr(doctor.surroundings, "detect", lambda: environment)
    assert install.install() == ()
    assert "Nothing to install" in capsys.readouterr().out


@pytest.mark.parametrize("engine", ["tensorflow", "jax"])
def test_the_requirements_file_of_a_tpu_asks_for_what_the_plan_installs(tmp_path, engine):
    runtimes.add_pci(tmp_path, "0x0063")
    commands = plan(runtimes.machine(tmp_path), engine)
    planned = {w for c in commands for w in c.words[1:] if not w.startswith("-")}
    text = (REQUIREMENTS / f"tpu-{engine}.txt").read_text()
    asked = {line.partition("#")[0].strip() for line in text.splitlines()} - {""}
    by_hand = {w for line in text.splitlines() if "--no-deps" in line for w in line.split()[4:]}
    assert asked | by_hand == planned
