"""The checkpoint room: a run that is interrupted goes on at the same batch.

    model.fit(train, callbacks=[ct.checkpoint.resume("checkpoints", train)])

Checkpoints are plain folders: `state.safetensors` (every variable of model, optimizer and
metrics, and the random states) and `manifest.json` (position, identity, checksums), written
last. Not Keras' own `.weights.h5`, which leaves out metrics, seeds and position and is
written while training waits; and not Orbax, which serves JAX alone without a copy and would be
one more dependency on the other engine. Importing this package imports no ML framework.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Public name -> the module of this package that holds it.
_HOME = {
    "Checkpoint": "store",
    "Ledger": "ledger",
    "Resume": "resuming",
    "Store": "store",
    "release_runtime": "ledger",
    "resume": "resuming",
}

if TYPE_CHECKING:
    from colabtpu.checkpoint.ledger import Ledger, release_runtime
    from colabtpu.checkpoint.resuming import Resume, resume
    from colabtpu.checkpoint.store import Checkpoint, Store

__all__ = ["Checkpoint", "Ledger", "Resume", "Store", "release_runtime", "resume"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'colabtpu.checkpoint' has no attribute {name!r}")
    value = getattr(import_module(f"colabtpu.checkpoint.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOME)
