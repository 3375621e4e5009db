"""Preflight: the real TPU compiler's verdict on a Keras step, with no TPU.

    import colabtpu as ct
    ct.preflight(model, data, target="v5e-1")              # compiles? fits? how fast at best?
    ct.preflight.largest_batch(model, data, "v5e-1")       # the largest per-core batch that fits
    ct.preflight.compare(model, data, ["v5e-1", "v6e-1"])  # one table over chips
    ct.preflight.check(model, data)                        # known traps in your own objects
    ct.preflight.explain(error)                            # a TPU error in plain words

The module itself is the function. `libtpu` runs in a process of its own, and nothing here opens a
TPU or needs a connection. From a shell: `python -m colabtpu preflight --help`.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

_HOME = {
    "Report": "report",
    "check": "check",
    "compare": "compare",
    "estimate": "estimate",
    "explain": "messages",
    "largest_batch": "search",
    "OutOfMemory": "callback",
    "preflight": "judge",
    "tokens": "spec",
}

if TYPE_CHECKING:
    from colabtpu.preflight.check import check
    from colabtpu.preflight.compare import compare
    from colabtpu.preflight.judge import preflight
    from colabtpu.preflight.messages import explain
    from colabtpu.preflight.report import Report
    from colabtpu.preflight.search import largest_batch
    from colabtpu.preflight.spec import tokens

__all__ = [
    "OutOfMemory",
    "Report",
    "check",
    "compare",
    "estimate",
    "explain",
    "largest_batch",
    "preflight",
    "tokens",
]


class _Preflight(ModuleType):
    """The module, made callable, so that `ct.preflight(…)` and `ct.preflight.check(…)` both work.

    Names are looked up in `_HOME` before the module's own attributes, because Python sets a
    submodule (`check`) as an attribute of its package as soon as it is imported.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.preflight(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        home = _HOME.get(name)
        if home is None:
            return super().__getattribute__(name)
        from importlib import import_module

        return getattr(import_module(f"colabtpu.preflight.{home}"), name)


sys.modules[__name__].__class__ = _Preflight
