"""What the user wishes for: which engine, how many devices, which TPU, and if it is not too late.

    wish = Wish.checked(engine="auto", devices=None, tpu=None)
    candidates(wish, environment)            # ("tensorflow", "jax")

Imports no ML framework; it only looks at what is installed, loaded and set.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from colabtpu import batching, doctor
from colabtpu.environment import Environment
from colabtpu.errors import InvalidArgumentError
from colabtpu.failures import INSTALL, RESTART, MissingEngineError, TooLateError

ENGINES = ("tensorflow", "jax")
LABELS = {"tensorflow": "TensorFlow", "jax": "JAX"}

GRPC_PORT = 8470  # what TPUClusterResolver takes for a missing port
_WORKER = re.compile(
    r"grpc://(?P<host>[\w.-]*[A-Za-z][\w.-]*|\d+(\.\d+){3}|\[[\da-f:]+\])(:(?P<port>\d+))?"
)
_NAME = re.compile(r"[\w./-]+")


@dataclass(frozen=True)
class Wish:
    """What the user asked `connect()` for, checked."""

    engine: str = "auto"
    devices: int | None = None
    tpu: str | None = None

    @classmethod
    def checked(cls, engine: Any, devices: Any, tpu: Any) -> "Wish":
        """Returns the wish, or raises `InvalidArgumentError` for what can never be."""
        if engine not in ("auto", *ENGINES):
            raise InvalidArgumentError(
                f"`engine` must be 'auto', 'tensorflow' or 'jax'. Received: engine={engine!r}",
                "Leave it out to take the one that works here.",
            )
        if devices is not None:
            devices = batching.positive(devices, "devices", "Leave it out to use all there are.")
        address = None if tpu is None else _checked_address(tpu)
        if engine == "jax" and address not in (None, "local"):
            raise InvalidArgumentError(
                f"JAX opens this machine's TPU only. Received: engine='jax', tpu={tpu!r}",
                "Use engine='tensorflow' for a remote worker.",
            )
        return cls(engine, devices, address)


def legacy_address(variables: Mapping[str, str]) -> tuple[str | None, str]:
    """Finds the address of a TPU worker in the variables that TPU Nodes used to set.

    Args:
        variables: the environment variables.

    Returns:
        The `grpc://` address or `None`, and the line for the card that says why.
    """
    # XRT_TPU_CONFIG reads tpu_worker;0;10.0.0.2:8470; COLAB_TPU_ADDR has no scheme.
    held = {name: variables.get(name, "").strip() for name in ("TPU_NAME", "COLAB_TPU_ADDR")}
    held["XRT_TPU_CONFIG"] = variables.get("XRT_TPU_CONFIG", "").strip()
    for name, value in held.items():
        bare = value.rpartition(";")[2]
        if bare.startswith("grpc://") or (bare and name != "TPU_NAME" and ":" in bare):
            try:
                return _checked_address(bare), f"{name}={value} holds the address of a worker"
            except InvalidArgumentError:
                return None, f"none on this machine; {name}={value} is no address, and ignored"
    name = held["TPU_NAME"]
    if name and name != "local":
        return None, f"none on this machine; TPU_NAME={name} is used by connect(tpu={name!r}) only"
    ignored = "; TPU_NAME=local alone is no TPU" if name else ""
    return None, f"none: no TPU variable, no Google device on the PCI bus{ignored}"


def candidates(wish: Wish, environment: Environment, notes: list[str]) -> tuple[str, ...]:
    """Returns the engines to try, the preferred one first; says why it is preferred."""
    if wish.engine != "auto":
        return (wish.engine,)
    if wish.tpu not in (None, "local"):
        return ("tensorflow",)
    first, reason = doctor.choose_engine(environment)
    notes.append(f"Engine: {LABELS[first]} first, {reason}")
    if "keras" in environment.imported:
        return (first,)
    order = (first, *(engine for engine in ENGINES if engine != first))
    installed = tuple(engine for engine in order if find_spec(engine) is not None)
    if not installed:
        raise MissingEngineError(
            "Neither TensorFlow nor JAX is installed.", f"{INSTALL}, then restart the kernel."
        )
    return installed


def require_backend(engine: str, environment: Environment, notes: list[str]) -> None:
    """Raises if Keras can no longer run on `engine`, and says if a preset will be overruled."""
    backend = environment.keras_backend
    if "keras" in sys.modules or "keras" in environment.imported:
        loaded = sys.modules["keras"].config.backend() if "keras" in sys.modules else backend
        if loaded != engine:
            raise TooLateError(
                f"Keras already runs on {loaded} in this process (importing TensorFlow imports "
                f"Keras too), and {engine} is needed.",
                f"{RESTART}, before `import keras`"
                + (f"; or connect(engine={loaded!r})." if loaded in ENGINES else "."),
            )
        return
    preset = environment.variables.get("KERAS_BACKEND", engine)
    if preset != engine:
        notes.append(f"KERAS_BACKEND: was {preset!r}, now {engine!r}")


def require_no_bystander(engines: tuple[str, ...], address: str, notes: list[str]) -> None:
    """An engine that was not tried only because Keras is loaded would be hidden by a fallback."""
    if address != "local" or len(engines) > 1 or "keras" not in sys.modules:
        return
    (other,) = (e for e in ENGINES if e not in engines)
    if find_spec(other) is not None:
        raise TooLateError(
            f"{notes[-1]} {LABELS[other]} was not tried: Keras already runs on {engines[0]}.",
            f"{RESTART}, before `import tensorflow` or `import keras`.",
        )


def _checked_address(tpu: Any) -> str:
    address = tpu.strip() if isinstance(tpu, str) else ""
    if ":" in address and "://" not in address:
        address = f"grpc://{address}"
    worker = _WORKER.fullmatch(address)
    if worker and 0 < int(worker["port"] or GRPC_PORT) < 65536:
        return f"grpc://{worker['host']}:{worker['port'] or GRPC_PORT}"
    if _NAME.fullmatch(address):
        return address
    raise InvalidArgumentError(
        f"`tpu` must be 'local', one grpc://HOST:PORT address or a name. Received: tpu={tpu!r}",
        f"Leave it out on Colab and Kaggle; a TPU worker listens on grpc://HOST:{GRPC_PORT}.",
    )
