"""The monitoring room: event files, training callbacks, inline TensorBoard.

    from colabtpu import monitor
    monitor.tensorboard("logs")                                  # inline, in any notebook
    model.fit(train, callbacks=monitor.callbacks("logs", tpu))   # both engines

Names load on first use: `tensorboard` needs no Keras, `callbacks` does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Public name -> the module that holds it.
_HOME = {
    "EventWriter": "events",
    "Meter": "meter",
    "callbacks": "assemble",
    "tensorboard": "server",
}

if TYPE_CHECKING:
    from colabtpu.monitor.events import EventWriter
    from colabtpu.monitor.meter import Meter
    from colabtpu.monitor.server import tensorboard
    from colabtpu.monitor.assemble import callbacks

__all__ = ["EventWriter", "Meter", "callbacks", "tensorboard"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'colabtpu.monitor' has no attribute {name!r}")
    return getattr(import_module(f"colabtpu.monitor.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
