"""The model room: the transformer, its attention, its losses and its generation.

    import colabtpu as ct
    model = ct.models.transformer_lm(vocab_size=8192, seq_len=512, layers=6, dim=512)
    model.compile("adamw", loss=ct.losses.next_token(model), metrics=ct.losses.metrics(model))

Importing this package imports no framework; each name loads its module when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "LanguageModel": "transformer",
    "SlimAdamW": "optimizers",
    "Spec": "spec",
    "flops_per_token": "spec",
    "generate": "generation",
    "named": "transformer",
    "named_spec": "spec",
    "transformer_lm": "transformer",
}
_MODULES = ("attention", "generation", "losses", "spec", "transformer")

if TYPE_CHECKING:
    from colabtpu.models import attention, generation, losses, spec, transformer
    from colabtpu.models.generation import generate
    from colabtpu.models.optimizers import SlimAdamW
    from colabtpu.models.spec import Spec, flops_per_token, named_spec
    from colabtpu.models.transformer import LanguageModel, named, transformer_lm

__all__ = [
    "LanguageModel",
    "SlimAdamW",
    "Spec",
    "attention",
    "flops_per_token",
    "generate",
    "generation",
    "losses",
    "named",
    "named_spec",
    "spec",
    "transformer",
    "transformer_lm",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"colabtpu.models.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'colabtpu.models' has no attribute {name!r}")
    value = getattr(import_module(f"colabtpu.models.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
