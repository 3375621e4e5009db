"""Made-up runtimes for tests: variables, device trees and builds as the real ones have them.

Variables: users' dumps of Colab's v5e-1 and v6e-1, Google's GKE example, Kaggle's Dockerfile.
Builds: Colab's images of 2026-08-19 (googlecolab/backend-info), Kaggle's requirements of
August 2026.
"""

import os
from pathlib import Path

from colabtpu.environment import Environment, detect

COLAB_V5E = {
    "COLAB_RELEASE_TAG": "release-colab-external_20260819",
    "TPU_ACCELERATOR_TYPE": "v5e-1",
    "COLAB_TPU_1VM": "1",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
    "TPU_HOST_BOUNDS": "1,1,1",
    "COLAB_GPU": "",
}
COLAB_V6E = COLAB_V5E | {
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "PJRT_DEVICE": "TPU",
    "VBAR_CONTROL_SERVICE_URL": "172.28.0.1:8353",
}
# The trap: the TPU variable is set on a runtime without a TPU, to nothing.
COLAB_CPU = {
    "COLAB_RELEASE_TAG": "release-colab-external_20260819",
    "COLAB_TPU_1VM": "",
    "COLAB_GPU": "",
}
COLAB_GPU = COLAB_CPU | {"COLAB_GPU": "1"}
KAGGLE = {
    "KAGGLE_KERNEL_RUN_TYPE": "Interactive",
    "KAGGLE_USER_SECRETS_TOKEN": "eyJhbGciOi",
}
KAGGLE_TPU = KAGGLE | {"ISTPUVM": "1", "TPU_PROCESS_ADDRESSES": "local"}
GKE_V6E = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
    "TPU_TOPOLOGY": "1x1",
    "TPU_SKIP_MDS_QUERY": "true",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "VBAR_CONTROL_SERVICE_URL": "unix:///var/run/tpu-plugin/vbar.sock",
}

_COLAB = {
    "keras": "3.13.2",
    "jax": "0.7.2",
    "jaxlib": "0.7.2",
    "setuptools": "75.2.0",
    "numpy": "2.1.3",
    "ml-dtypes": "0.6.0",
    "tokenizers": "0.22.2",
    "sentencepiece": "0.2.2",
    "tensorflow-datasets": "4.9.10",
    "array-record": "0.8.3",
    "grain": "0.2.18",
    "ipywidgets": "7.7.1",
    "ipykernel": "6.17.1",
    "matplotlib": "3.10.0",
    "safetensors": "0.8.0",
    "regex": "2026.7.19",
    "kagglehub": "1.0.2",
    "google-colab": "1.0.0",
}
COLAB_TPU_BUILDS = _COLAB | {"libtpu": "0.0.21.1", "protobuf": "7.35.1", "rich": "15.0.0"}
COLAB_CPU_BUILDS = _COLAB | {
    "tensorflow": "2.20.0",
    "tensorflow-text": "2.20.1",
    "tensorboard": "2.20.0",
    "keras-hub": "0.26.0",
    "keras-nlp": "0.26.0",
    "tf-keras": "2.20.1",
    "protobuf": "5.29.6",
    "rich": "13.9.4",
}
COLAB_GPU_BUILDS = COLAB_CPU_BUILDS | {
    "jax-cuda12-plugin": "0.7.2",
    "nvidia-cudnn-cu12": "9.19.0.56",
    "torch": "2.11.0+cu128",
}
KAGGLE_TPU_BUILDS = {
    "tensorflow-cpu": "2.20.0",
    "tensorboard": "2.20.0",
    "jax": "0.7.2",
    "jaxlib": "0.7.2",
    "libtpu": "0.0.17",
    "keras": "3.13.2",
    "keras-nlp": "0.26.0",
    "tensorflow-datasets": "4.9.10",
    "setuptools": "75.2.0",
}


def add_pci(root: Path, device: str, subsystem: str = "0x0000", vendor: str = "0x1ae0") -> None:
    """Puts one more device on the made-up PCI bus."""
    bus = root / "sys/bus/pci/devices"
    bus.mkdir(parents=True, exist_ok=True)
    home = bus / f"0000:00:{len(list(bus.iterdir())):02x}.0"
    home.mkdir()
    for name, value in (
        ("vendor", vendor),
        ("device", device),
        ("subsystem_device", subsystem),
        ("class", "0x030200" if vendor == "0x10de" else "0x120000"),
    ):
        (home / name).write_text(f"{value}\n")


def add_node(root: Path, name: str) -> None:
    """Puts a device file under the made-up /dev."""
    file = root / "dev" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def add_process(root: Path, pid: int, name: str, opened: str) -> None:
    """Puts a process that has the file `opened` open under the made-up /proc."""
    (root / f"proc/{pid}/fd").mkdir(parents=True)
    os.symlink(opened, root / f"proc/{pid}/fd/7")
    (root / f"proc/{pid}/comm").write_text(f"{name}\n")


def colab_tpu(root: Path, **more: object) -> Environment:
    """Colab's v5e-1 as it starts: one chip, no TensorFlow."""
    return detect(COLAB_V5E, root, **{**_FRESH, "builds": COLAB_TPU_BUILDS, **more})


def colab_cpu(root: Path, **more: object) -> Environment:
    """Colab's CPU runtime as it starts."""
    return detect(COLAB_CPU, root, **{**_FRESH, "builds": COLAB_CPU_BUILDS, **more})


def colab_gpu(root: Path, **more: object) -> Environment:
    """Colab's GPU runtime as it starts."""
    add_node(root, "nvidia0")
    return detect(COLAB_GPU, root, **{**_FRESH, "builds": COLAB_GPU_BUILDS, **more})


def kaggle_tpu(root: Path, **more: object) -> Environment:
    """Kaggle's v5e-8 as its Dockerfile makes it."""
    for _ in range(8):
        add_pci(root, "0x0063")
    fresh = {**_FRESH, "builds": KAGGLE_TPU_BUILDS, "python": "3.12.11"}
    return detect(KAGGLE_TPU, root, **{**fresh, **more})


def machine(root: Path, **more: object) -> Environment:
    """A laptop."""
    return detect({"HOME": "/home/ada"}, root, **{**_FRESH, "builds": {}, **more})


_FRESH: dict[str, object] = {"modules": {}, "python": "3.13.15"}
