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
    "AttentionMaps": "pictures",
    "Confusion": "pictures",
    "EventWriter": "events",
    "Meter": "meter",
    "NextTokens": "pictures",
    "Samples": "pictures",
    "analyse": "xplane",
    "callbacks": "assemble",
    "curves": "reading",
    "note_checkpoint": "status",
    "phase": "status",
    "profile": "profiling",
    "tensorboard": "server",
    "weights_and_biases": "weights_and_biases",
}

if TYPE_CHECKING:
    from colabtpu.monitor.assemble import callbacks
    from colabtpu.monitor.events import EventWriter
    from colabtpu.monitor.meter import Meter
    from colabtpu.monitor.pictures import AttentionMaps, Confusion, NextTokens, Samples
    from colabtpu.monitor.profiling import profile
    from colabtpu.monitor.reading import curves
    from colabtpu.monitor.server import tensorboard
    from colabtpu.monitor.status import note_checkpoint, phase
    from colabtpu.monitor.weights_and_biases import weights_and_biases
    from colabtpu.monitor.xplane import analyse

__all__ = [
    "AttentionMaps",
    "Confusion",
    "EventWriter",
    "Meter",
    "NextTokens",
    "Samples",
    "analyse",
    "callbacks",
    "curves",
    "note_checkpoint",
    "phase",
    "profile",
    "tensorboard",
    "weights_and_biases",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'colabtpu.monitor' has no attribute {name!r}")
    return getattr(import_module(f"colabtpu.monitor.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
