"""colabtpu: train Keras transformers on TPUs from a notebook.

    import colabtpu as ct
    tpu = ct.connect()                     # TPU, else GPU, else 8 CPU devices, and says why

Importing this package imports neither TensorFlow, JAX nor Keras: the environment
variables that choose a backend and open a TPU must be set before any of them loads,
and `connect()` is what sets them. Every name below is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that holds it. A name equal to its module's is the module itself.
_HOME = {
    "ColabTPUError": "errors",
    "Connection": "connection",
    "InvalidArgumentError": "errors",
    "batching": "batching",
    "checkpoint": "checkpoint",
    "chips": "chips",
    "connect": "connection",
    "data": "data",
    "doctor": "doctor",
    "environment": "environment",
    "losses": "models.losses",
    "models": "models",
    "monitor": "monitor",
    "notebook": "notebook",
    "preflight": "preflight",
    "speed": "speed",
}

if TYPE_CHECKING:
    from colabtpu import (
        batching,
        checkpoint,
        chips,
        data,
        doctor,
        environment,
        models,
        monitor,
        notebook,
        preflight,
        speed,
    )
    from colabtpu.connection import Connection, connect
    from colabtpu.errors import ColabTPUError, InvalidArgumentError
    from colabtpu.models import losses

__all__ = [
    "ColabTPUError",
    "Connection",
    "InvalidArgumentError",
    "batching",
    "checkpoint",
    "chips",
    "connect",
    "data",
    "doctor",
    "environment",
    "losses",
    "models",
    "monitor",
    "notebook",
    "preflight",
    "speed",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'colabtpu' has no attribute {name!r}")
    module = import_module(f"colabtpu.{_HOME[name]}")
    value = module if _HOME[name].rpartition(".")[2] == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
