"""Everything a Keras training step depends on, out to arrays and back in.

    snapshot = Snapshot()
    arrays = snapshot.take(model)                 # copies, so that training can go on
    restore(model, arrays)

Holds every variable of the model (with seed generators), optimizer (with its step count, so a
schedule's position too) and metrics, and the states of Keras', NumPy's and Python's global
random numbers. Variables are named by role and place, not by their Keras names, which count
up when a cell is run twice.
"""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

RANDOM = "random/"
METRICS = "metrics/"


def variables(model: Any) -> dict[str, Any]:
    """Returns every variable of a compiled, built model, by role and place."""
    groups = {"model": model.variables, "optimizer": getattr(model.optimizer, "variables", [])}
    groups["metrics"] = model.metrics_variables
    seen: set[int] = set()
    named = {}
    for group, members in groups.items():
        for place, variable in enumerate(members):
            if id(variable) not in seen:
                seen.add(id(variable))
                named[f"{group}/{place:04}"] = variable
    return named


class Snapshot:
    """Copies of a model's state in host memory that is used again for the next copy.

    Fresh memory costs a page fault every 4 KiB, which at gigabytes is the larger half.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def take(self, model: Any) -> dict[str, np.ndarray]:
        """Returns the state as arrays. They are overwritten by the next `take`."""
        values = {name: _value(variable) for name, variable in variables(model).items()}
        for value in values.values():
            if hasattr(value, "copy_to_host_async"):  # all transfers under way before any wait
                value.copy_to_host_async()
        arrays = {name: self._copied(name, value) for name, value in values.items()}
        return arrays | _random_states()

    def _copied(self, name: str, value: Any) -> np.ndarray:
        array = _host_array(value)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != array.shape or buffer.dtype != array.dtype:
            buffer = self._buffers[name] = np.empty(array.shape, array.dtype)
        np.copyto(buffer, array)
        return buffer


def restore(model: Any, arrays: dict[str, np.ndarray], skip: tuple[str, ...] = ()) -> None:
    """Writes arrays that `Snapshot.take` made back into a model of the same shapes.

    Args:
        model: compiled and built.
        arrays: by the names of `variables`.
        skip: prefixes of names to leave as they are.
    """
    for name, variable in variables(model).items():
        if not name.startswith(skip) if skip else True:
            variable.assign(arrays[name])
    if RANDOM not in skip:
        _restore_random(arrays)


def metrics(model: Any) -> dict[str, np.ndarray]:
    """Returns copies of the metrics alone."""
    named = variables(model).items()
    return {n: np.array(_host_array(_value(v))) for n, v in named if n.startswith(METRICS)}


def restore_metrics(model: Any, arrays: dict[str, np.ndarray]) -> None:
    """Writes the metrics alone, which `fit` resets when an epoch begins."""
    for name, variable in variables(model).items():
        if name.startswith(METRICS):
            variable.assign(arrays[name])


def build(model: Any, batch: Any) -> None:
    """Creates the variables that Keras would create at the first step."""
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is None:
        model._symbolic_build(data_batch=batch)
        return
    with strategy.scope():
        model._symbolic_build(data_batch=batch)


def describe(model: Any) -> dict[str, Any]:
    """Returns what must be the same for a saved state to fit: shapes, layers, optimizer.

    Names that Keras numbers are left without their numbers.
    """
    shapes = {
        name: f"{list(variable.shape)} {keras.backend.standardize_dtype(variable.dtype)}"
        for name, variable in variables(model).items()
        if not name.startswith(METRICS)
    }
    return {
        "variables": shapes,
        "layers": _config(model),
        "optimizer": _config(model.optimizer),
    }


def differences(saved: Any, now: Any, where: str = "") -> Iterator[str]:
    """Yields what differs between two nested values, as "where: saved -> now"."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in sorted(saved.keys() | now.keys()):
            place = f"{where}.{key}" if where else key
            yield from differences(saved.get(key, "absent"), now.get(key, "absent"), place)
    elif isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        for place, pair in enumerate(zip(saved, now, strict=True)):
            yield from differences(*pair, f"{where}[{place}]")
    elif saved != now:
        yield f"{where}: {_short(saved)} -> {_short(now)}"


def _short(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) and len(value) > 8 else f"{value!r}"


def _config(part: Any) -> Any:
    try:
        text = json.dumps(part.get_config(), default=lambda o: type(o).__name__)
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return type(part).__name__  # a subclass that keeps no configuration
    return json.loads(re.sub(r'(?<=[a-z])_\d+(?=")', "", text))


def _value(variable: Any) -> Any:
    value = variable.value
    if hasattr(value, "is_fully_replicated"):  # a jax.Array, perhaps over several hosts
        if value.is_fully_addressable:
            return value
        if value.is_fully_replicated:
            return value.addressable_data(0)
        raise NotImplementedError(
            f"{variable.path} is sharded over hosts; gather it before saving."
        )
    return value


def _host_array(value: Any) -> np.ndarray:
    if hasattr(value, "numpy"):  # TensorFlow: mirrored variables give their first copy
        return np.asarray(value.numpy())
    return np.asarray(value)


def _random_states() -> dict[str, np.ndarray]:
    """Python's, NumPy's and Keras' global random numbers, as arrays."""
    version, words, _ = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    keys, position = numpy_state[1:3]
    states = {
        f"{RANDOM}python": np.array([version, *words], np.int64),
        f"{RANDOM}numpy": np.array([*keys, position], np.int64),
    }
    generator = _keras_generator()
    if generator is not None:
        states[f"{RANDOM}keras"] = np.array(_host_array(generator.state.value))
    return states


def _restore_random(arrays: dict[str, np.ndarray]) -> None:
    version, *words = arrays[f"{RANDOM}python"].tolist()
    random.setstate((version, tuple(words), None))
    *keys, position = arrays[f"{RANDOM}numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, 0, 0.0))
    if f"{RANDOM}keras" in arrays:
        from keras.src.random.seed_generator import global_seed_generator

        global_seed_generator().state.assign(arrays[f"{RANDOM}keras"])


def _keras_generator() -> Any:
    from keras.src.backend.common import global_state

    return global_state.get_global_attribute("global_seed_generator")
