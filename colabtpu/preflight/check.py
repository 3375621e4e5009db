"""The known traps of Keras on TPUs, looked for in your own objects; nothing is compiled.

    ct.preflight.check(model, dataset, tpu)      # prints as a list, shows as a table

Each finding says where, why it matters and what to do. What is known to be wrong, and how we
know: under several TensorFlow replicas Keras clips before the all-reduce, and
`steps_per_execution`, gradient accumulation and EMA overwriting fail (measured with
MirroredStrategy on 8 CPU devices, keras-team/keras#19246); losses in bfloat16 round token ids;
a mean over all positions depends on the padding.
"""

from dataclasses import dataclass
from html import escape
from typing import Any

from colabtpu import chips
from colabtpu.chips import Chip

WRONG, SLOW, RISK = "wrong", "slow", "risk"


@dataclass(frozen=True)
class Trap:
    """One finding.

    Attributes:
        code: a short name, such as `"clip-before-all-reduce"`.
        severity: `"wrong"`: results or a crash; `"slow"`: time or memory; `"risk"`: may bite.
        where: the object at fault.
        why: what happens.
        fix: the next step.
    """

    code: str
    severity: str
    where: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"[{self.severity}] {self.code}: {self.where}. {self.why}\n  Next step: {self.fix}"


class Traps(tuple[Trap, ...]):
    """The findings, worst first; an empty one means that none of the known traps was found."""

    __slots__ = ()

    @property
    def codes(self) -> tuple[str, ...]:
        """The findings' short names."""
        return tuple(trap.code for trap in self)

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "None of the known traps was found."

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if not self:
            return "<div>None of the known traps was found.</div>"
        rows = "".join(
            f"<tr><td><b>{escape(t.severity)}</b></td><td>{escape(t.where)}</td>"
            f"<td>{escape(t.why)}</td><td>{escape(t.fix)}</td></tr>"
            for t in self
        )
        return f"<table><tr><th></th><th>where</th><th>why</th><th>fix</th></tr>{rows}</table>"


@dataclass(frozen=True)
class Setting:
    """What the traps look at.

    Attributes:
        model: the compiled Keras model.
        data: the data set or batch, or `None`.
        engine: Keras' backend.
        replicas: devices that share the batch.
        strategy: the TensorFlow strategy or Keras distribution in force, or `None`.
        chip: the TPU generation that widths are measured against.
    """

    model: Any
    data: Any
    engine: str
    replicas: int
    strategy: Any
    chip: Chip


def check(model: Any, data: Any = None, connection: Any = None, target: str = "v5e-1") -> Traps:
    """Looks for the known traps in a model, its data and the connection.

    Args:
        model: a compiled Keras model.
        data: what will be given to `fit`: a data set, or a batch. Data sets are not iterated.
        connection: what `ct.connect()` returned, a `tf.distribute` strategy, or `None` to take
            what the model was built under.
        target: the slice to measure widths against, where the connection has no TPU.

    Returns:
        The `Traps`, worst first.
    """
    from colabtpu.preflight import traps_data, traps_model
    from colabtpu.preflight.lowering import engine

    found: list[Trap] = []
    setting = _setting(model, data, connection, target, engine())
    for trap in (*traps_model.TRAPS, *traps_data.TRAPS):
        found += trap(setting)
    order = (WRONG, SLOW, RISK)
    return Traps(sorted(found, key=lambda t: order.index(t.severity)))


def _setting(model: Any, data: Any, connection: Any, target: str, engine: str) -> Setting:
    import keras

    chip = getattr(connection, "chip", None) or chips.target(target).chip
    strategy = getattr(connection, "handle", connection)
    if strategy is None and engine == "tensorflow":
        strategy = getattr(model, "_distribute_strategy", None)
    if strategy is None and engine == "jax":
        strategy = keras.distribution.distribution()
    return Setting(model, data, engine, _replicas(strategy), strategy, chip)


def _replicas(strategy: Any) -> int:
    if hasattr(strategy, "num_replicas_in_sync"):
        return strategy.num_replicas_in_sync
    mesh = getattr(strategy, "device_mesh", None)
    return mesh.devices.size if mesh is not None else 1
