"""Where am I: every runtime of the facts as variables, every chip as a made-up device tree."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import runtimes

from colabtpu.environment import detect


def here(root, env, **more):
    return detect(env, root, **{"builds": {}, "modules": {}, **more})


@pytest.mark.parametrize(
    ("env", "platform", "chip", "num_chips", "num_devices"),
    [
        (runtimes.COLAB_V5E, "colab", "v5e", 1, 1),
        (runtimes.COLAB_V6E, "colab", "v6e", 1, 1),
        (runtimes.GKE_V6E, "cloud_tpu_vm", "v6e", 1, 1),
        ({"TPU_ACCELERATOR_TYPE": "v5litepod-8"}, "cloud_tpu_vm", "v5e", 8, 8),
        ({"TPU_ACCELERATOR_TYPE": "v3-8"}, "cloud_tpu_vm", "v3", 4, 8),
        ({"TPU_ACCELERATOR_TYPE": "v5p-16"}, "cloud_tpu_vm", "v5p", 4, 4),
    ],
)
def test_variables_alone_name_the_tpu(tmp_path, env, platform, chip, num_chips, num_devices):
    found = here(tmp_path, env)
    assert (found.platform, found.accelerator) == (platform, "tpu")
    assert found.chip.name == chip
    # Colab's TPU_CHIPS_PER_HOST_BOUNDS=2,2,1 must not be read as four chips.
    assert (found.num_chips, found.num_tpu_devices) == (num_chips, num_devices)
    assert f"TPU_ACCELERATOR_TYPE={env['TPU_ACCELERATOR_TYPE']}" in found.evidence


def test_a_colab_cpu_runtime_whose_tpu_variable_is_empty_has_no_tpu(tmp_path):
    found = here(tmp_path, runtimes.COLAB_CPU)
    assert (found.platform, found.accelerator, found.num_chips) == ("colab", "cpu", 0)


def test_a_colab_gpu_runtime(tmp_path):
    found = runtimes.colab_gpu(tmp_path)
    assert (found.platform, found.accelerator, found.device) == ("colab", "gpu", "1 x NVIDIA GPU")


def test_kaggle_with_eight_chips_on_the_bus(tmp_path):
    found = runtimes.kaggle_tpu(tmp_path)
    assert (found.platform, found.chip.name, found.num_chips) == ("kaggle", "v5e", 8)


def test_kaggle_without_an_accelerator_although_its_image_is_built_on_colabs(tmp_path):
    found = here(tmp_path, runtimes.KAGGLE | runtimes.COLAB_CPU)
    assert (found.platform, found.accelerator) == ("kaggle", "cpu")


@pytest.mark.parametrize("name", ["COLAB_TPU_1VM", "ISTPUVM"])
def test_a_tpu_without_its_type_is_known_to_be_there_and_not_guessed(tmp_path, name):
    found = here(tmp_path, {name: "1"})
    assert (found.accelerator, found.chip, found.num_chips) == ("tpu", None, 1)


def test_a_shell_without_colabs_variables_still_knows_colab_and_the_chip(tmp_path):
    runtimes.add_pci(tmp_path, "0x006f")
    found = here(tmp_path, {}, builds={"google-colab": "1.0.0"})
    assert (found.platform, found.chip.name, found.num_chips) == ("colab", "v6e", 1)


def test_a_plain_machine(tmp_path):
    found = here(tmp_path, {})
    assert (found.platform, found.accelerator, found.evidence) == ("machine", "cpu", ())


@pytest.mark.parametrize(
    ("device", "subsystem", "chip", "devices"),
    [
        # tpu-info's table of PCI ids: id, subsystem, generation, devices of one chip
        ("0x0027", "0x004e", "v2", 2),
        ("0x0027", "0x004f", "v3", 2),
        ("0x005e", "0x0000", "v4", 1),
        ("0x0062", "0x0000", "v5p", 1),
        ("0x0063", "0x0000", "v5e", 1),
        ("0x006f", "0x0000", "v6e", 1),
        ("0x0076", "0x0000", "tpu7x", 2),
    ],
)
def test_every_chip_is_read_from_the_pci_bus(tmp_path, device, subsystem, chip, devices):
    for _ in range(4):
        runtimes.add_pci(tmp_path, device, subsystem)
    runtimes.add_pci(tmp_path, "0x1d0f", vendor="0x8086")
    found = here(tmp_path, {})
    assert (found.platform, found.accelerator) == ("cloud_tpu_vm", "tpu")
    assert (found.chip.name, found.num_chips, found.num_tpu_devices) == (chip, 4, 4 * devices)
    assert found.evidence == (f"PCI bus: 4 x TPU {chip}",)


def test_another_device_of_google_is_no_tpu(tmp_path):
    runtimes.add_pci(tmp_path, "0x001f")  # gVNIC and the like
    assert here(tmp_path, {}).accelerator == "cpu"


def test_an_nvidia_gpu_is_found_by_its_driver_and_named(tmp_path):
    home = tmp_path / "proc/driver/nvidia/gpus/0000:00:04.0"
    home.mkdir(parents=True)
    (home / "information").write_text("Model: \t\t NVIDIA L4\nIRQ: 11\n")
    found = here(tmp_path, {})
    assert (found.accelerator, found.gpus) == ("gpu", ("NVIDIA L4",))


def test_a_gpu_that_a_variable_hides_is_not_used(tmp_path):
    runtimes.add_node(tmp_path, "nvidia0")
    found = here(tmp_path, {"CUDA_VISIBLE_DEVICES": "-1"})
    assert found.accelerator == "cpu"
    assert "CUDA_VISIBLE_DEVICES=-1 hides 1 NVIDIA GPU" in found.evidence


def test_a_gpu_without_a_driver_is_told_apart(tmp_path):
    runtimes.add_pci(tmp_path, "0x27b8", vendor="0x10de")
    found = here(tmp_path, {})
    assert (found.accelerator, found.gpu_without_driver) == ("cpu", True)


def test_secrets_are_not_kept(tmp_path):
    found = here(tmp_path, runtimes.KAGGLE | {"TPU_API_KEY": "abc", "KERAS_BACKEND": "jax"})
    assert "eyJhbGciOi" not in repr(found)
    assert found.variables["TPU_API_KEY"] == "***"
    assert found.variables["KERAS_BACKEND"] == "jax"


def test_another_process_that_has_the_chip_open_is_named(tmp_path):
    runtimes.add_process(tmp_path, 4242, "python3", "/dev/vfio/0")
    runtimes.add_process(tmp_path, 4243, "bash", "/dev/null")
    runtimes.add_process(tmp_path, os.getpid(), "pytest", "/dev/vfio/0")
    found = here(tmp_path, runtimes.COLAB_V5E)
    assert [(h.pid, h.name, h.path) for h in found.tpu_holders] == [
        (4242, "python3", "/dev/vfio/0")
    ]


def test_a_lock_on_libtpus_lock_file_names_its_owner(tmp_path):
    lock = tmp_path / "tmp/libtpu_lockfile"
    lock.parent.mkdir()
    lock.touch()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/locks").write_text(
        "1: POSIX  ADVISORY  READ 77 00:19:99999999999 0 EOF\n"
        f"2: FLOCK  ADVISORY  WRITE 4242 fe:01:{lock.stat().st_ino} 0 EOF\n"
    )
    found = here(tmp_path, runtimes.COLAB_V5E)
    assert [(h.pid, h.path) for h in found.tpu_holders] == [(4242, "/tmp/libtpu_lockfile")]


def test_a_free_tpu_has_no_holder_although_the_lock_file_lies_there(tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp/libtpu_lockfile").touch()
    assert here(tmp_path, runtimes.COLAB_V5E).tpu_holders == ()


def test_a_real_lock_of_another_process_is_seen_in_this_kernels_proc(tmp_path):
    """The format of /proc/locks as this kernel writes it, with a process that holds a lock."""
    lock = tmp_path / "tmp/libtpu_lockfile"
    lock.parent.mkdir()
    code = f"import fcntl, sys; f = open({str(lock)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
    code += "print('held', flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout.readline() == b"held\n"
        (tmp_path / "proc").symlink_to("/proc")
        if not (tmp_path / "proc/locks").read_text().strip():
            pytest.skip("this kernel does not show locks")
        pids = [h.pid for h in here(tmp_path, runtimes.COLAB_V5E).tpu_holders]
    finally:
        child.communicate()
    assert child.pid in pids


def test_what_is_imported_and_which_backend_keras_runs_on(tmp_path):
    keras = SimpleNamespace(backend=SimpleNamespace(backend=lambda: "jax"))
    found = here(tmp_path, {"KERAS_BACKEND": "tensorflow"}, modules={"keras": keras, "jax": 1})
    assert found.imported == {"keras", "jax"}
    # The variable came too late: what counts is what the imported Keras runs on.
    assert found.keras_backend == "jax"


def test_the_backend_that_keras_json_asks_for_is_seen_and_the_variable_beats_it(tmp_path):
    home = tmp_path / "home/ada/.keras"
    home.mkdir(parents=True)
    (home / "keras.json").write_text('{"floatx": "float32", "backend": "jax"}')
    assert here(tmp_path, {"HOME": "/home/ada"}).keras_backend == "jax"
    both = {"HOME": "/home/ada", "KERAS_BACKEND": "torch"}
    assert here(tmp_path, both).keras_backend == "torch"


def test_builds_agree_with_what_pip_lists_here():
    pip = [sys.executable, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
    listed = subprocess.run(pip, capture_output=True, check=False, text=True)
    if listed.returncode:
        pytest.skip("this environment has no pip")
    versions = {
        d["name"].lower().replace("_", "-"): d["version"] for d in json.loads(listed.stdout)
    }
    found = detect({}).builds
    assert found
    assert found == {name: versions[name] for name in found}
    assert not {"tensorflow", "jax", "keras", "libtpu"} & (set(versions) - set(found))
