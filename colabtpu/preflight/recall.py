"""Finds an earlier verdict without lowering the step again.

`compiler.py` keeps results under the lowered program's fingerprint, which is always right but asks
for seconds of tracing. A model that is made of Keras', KerasHub's and our own layers only is fully
told by its configuration, so its verdict can be kept under that. A model with code of the user's
own has no such key (`None`), because its code may have changed, and is lowered every time.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colabtpu.chips import Target
from colabtpu.preflight import cache
from colabtpu.preflight.compiler import COMPILED, REFUSED, SCHEDULED, libtpu_version
from colabtpu.preflight.messages import OUT_OF_MEMORY
from colabtpu.preflight.report import Report, from_dict

PACKAGES = ("keras", "keras_hub", "colabtpu")
VERSIONS = ("keras", "keras-hub", "jax", "jaxlib", "tensorflow", "tensorflow-tpu")


def key(
    model: Any, structure: Any, target: Target, step: str, memory_only: bool, libtpu: str | None
) -> str | None:
    """Returns what a verdict on this model is kept under, or `None` if its configuration does not
    tell all of it."""
    import keras

    if not all(_known(thing) for thing in _things(model)):
        return None
    if keras.distribution.distribution() is not None:
        return None
    layers = [
        (layer.name, layer.dtype_policy.name, layer.trainable, str(layer._remat_mode))
        for layer in model._flatten_layers()
    ]
    weights = [(v.path, tuple(v.shape), str(v.dtype), v.trainable) for v in model.weights]
    optimizer = getattr(model, "optimizer", None)
    told = [
        keras.backend.backend(), keras.config.floatx(), model.name, type(model).__qualname__,
        model.get_config(), model.get_compile_config() if model.compiled else None,
        optimizer.get_config() if optimizer is not None else None,
        layers, weights, getattr(model, "run_eagerly", None), getattr(model, "jit_compile", None),
        str(structure), getattr(keras.config, "is_flash_attention_enabled", lambda: None)(),
    ]  # fmt: skip
    return _digest(told, target, step, memory_only, libtpu)


def named_key(
    name: str, engine: str, batch: int, seq_len: int, target: Target, step: str,
    memory_only: bool, libtpu: str | None,
) -> str:  # fmt: skip
    """Returns the key of a model that is known by name, before anything is imported or built."""
    return _digest(["name", name, engine, batch, seq_len], target, step, memory_only, libtpu)


def read(found: str | None) -> Report | None:
    """Returns the verdict kept under a key."""
    kept = cache.read(f"report-{found}") if found else None
    return from_dict({**kept, "cached": True}) if kept else None


def write(found: str | None, report: Report) -> None:
    """Keeps a verdict, if it is about the program and not about this machine."""
    if found and report.status in (COMPILED, SCHEDULED, OUT_OF_MEMORY, REFUSED):
        cache.write(f"report-{found}", report.to_dict())


def _things(model: Any) -> Iterator[Any]:
    import keras

    yield from model._flatten_layers()
    yield getattr(model, "optimizer", None)
    yield from keras.tree.flatten(getattr(model, "loss", None))
    container = getattr(model, "_compile_metrics", None)
    for kind in ("_user_metrics", "_user_weighted_metrics"):
        yield from keras.tree.flatten(getattr(container, kind, None))


def _known(thing: Any) -> bool:
    if thing is None or isinstance(thing, str):
        return True
    home = getattr(type(thing), "__module__", "")
    if home == "builtins":  # a function: which one is told by its own module
        home = getattr(thing, "__module__", "") or ""
    return home.partition(".")[0] in PACKAGES


def _digest(
    told: list[Any], target: Target, step: str, memory_only: bool, libtpu: str | None
) -> str:
    told = [*told, target.name, target.topology, step, memory_only, libtpu_version(libtpu),
            [_version(name) for name in VERSIONS], _own_code()]  # fmt: skip
    return hashlib.sha256(json.dumps(told, default=str, sort_keys=True).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _own_code() -> str:
    """A hash of our own sources that shape a step or its report."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*root.glob("*.py"), *(root.parent / "models").glob("*.py"),
                        root.parent / "chips.py"]):  # fmt: skip
        digest.update(path.read_bytes())
    return digest.hexdigest()
