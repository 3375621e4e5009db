"""A lowered step: the StableHLO module, and which of its arguments is what.

A `Program` is all that the compiler needs; it no longer knows Keras, and it can be compiled
in another process. `fingerprint` is the same for the same arithmetic.
"""

import hashlib
from dataclasses import dataclass, field

WEIGHTS, OPTIMIZER, STATE, BATCH = "weights", "optimizer", "state", "batch"


@dataclass(frozen=True)
class Argument:
    """One argument of the step.

    Attributes:
        path: the variable's or the array's name, such as `"dense/kernel"`.
        role: `"weights"`, `"optimizer"`, `"state"` (metrics, seeds) or `"batch"`.
        shape: the whole array, before it is split over devices.
        dtype: such as `"float32"`.
    """

    path: str
    role: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Program:
    """One step, lowered.

    Attributes:
        module: MLIR bytecode.
        engine: `"jax"` or `"tensorflow"`.
        step: `"train"`, `"evaluate"` or `"generate"`.
        arguments: in the module's order.
        batch: rows of the global batch.
        replicas: devices that share the batch.
        num_partitions: devices that the module itself spans: `replicas` on JAX, where the
            all-reduce is part of the program, and 1 on TensorFlow, where it is one replica's.
        seq_len: length of the sequences, where there are any.
        notes: what a reader of the report should know.
        identity: what the fingerprint is made of, besides nothing else: the module as text
            without source locations, so that moving a line does not compile anew.
    """

    module: bytes
    engine: str
    step: str
    arguments: tuple[Argument, ...]
    batch: int
    replicas: int
    num_partitions: int
    seq_len: int | None
    notes: tuple[str, ...] = ()
    identity: str = field(default="", repr=False)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the arithmetic, in hexadecimal."""
        return hashlib.sha256(self.identity.encode() or self.module).hexdigest()
