"""The arithmetic of batches: per core, global, in tokens, in steps, and what follows for the rate.

    from colabtpu import batching
    batch = batching.global_batch(128, cores=8)
    print(batch.describe(tokens_per_row=512))
    # 128 per core x 8 cores = 1,024; 1,024 rows x 512 tokens = 524,288 tokens

`model.fit` wants the global batch: Keras divides it among the replicas.
"""

import math
import operator
from dataclasses import dataclass
from typing import Any

from colabtpu.errors import InvalidArgumentError

# A TPU pads the rows of a batch to 8, so fewer cost as much (cloud.google.com/tpu/docs/
# performance-guide: "evenly divisible by 8 or 128").
MULTIPLE = 8


@dataclass(frozen=True)
class Batch:
    """A batch in rows.

    Attributes:
        per_core: rows for each replica.
        cores: replicas.
        asked: the per-core rows asked for, before rounding.
    """

    per_core: int
    cores: int
    asked: int

    @property
    def global_batch(self) -> int:
        """Rows over all replicas, what `model.fit` and `Dataset.batch` want."""
        return self.per_core * self.cores

    def describe(self, tokens_per_row: int | None = None) -> str:
        """The arithmetic in one line.

        Args:
            tokens_per_row: the sequence length, to have the tokens counted too.

        Returns:
            Such as `"128 per core x 8 cores = 1,024; 1,024 rows x 512 tokens = 524,288 tokens"`.
        """
        plural = "" if self.cores == 1 else "s"
        line = f"{self.per_core:,} per core x {self.cores:,} core{plural} = {self.global_batch:,}"
        if tokens_per_row is not None:
            length = positive(tokens_per_row, "tokens_per_row", "Pass the sequence length.")
            tokens = self.global_batch * length
            line += f"; {self.global_batch:,} rows x {length:,} tokens = {tokens:,} tokens"
        if self.asked != self.per_core:
            line += f" (per core rounded up from {self.asked:,})"
        return line

    def __str__(self) -> str:
        return self.describe()


@dataclass(frozen=True)
class Accumulation:
    """A global batch in several passes whose gradients are added up.

    Attributes:
        steps: passes for one update; `gradient_accumulation_steps` of a Keras optimizer.
        per_core: rows for each replica in one pass.
        cores: replicas.
    """

    steps: int
    per_core: int
    cores: int

    @property
    def micro_batch(self) -> int:
        """Rows over all replicas in one pass, what `model.fit` wants."""
        return self.per_core * self.cores

    @property
    def global_batch(self) -> int:
        """Rows over all replicas that one update learns from."""
        return self.micro_batch * self.steps

    def __str__(self) -> str:
        return (
            f"{self.per_core:,} per core x {self.cores:,} cores x {self.steps:,} passes "
            f"= {self.global_batch:,}"
        )


def global_batch(per_core: int = 128, cores: int = 1, *, multiple: int = MULTIPLE) -> Batch:
    """Returns the batch of `per_core` rows on each of `cores` replicas.

    Args:
        per_core: rows for each replica, rounded up to a multiple of `multiple`; `describe()`
            says so.
        cores: replicas, `Connection.num_cores`.
        multiple: 8, to which a TPU pads anyway; 1 keeps `per_core` as it is.

    Returns:
        The `Batch`.

    Raises:
        InvalidArgumentError: a number that is not a positive whole one.
    """
    asked = positive(per_core, "per_core", "Pass 8 or more; 128 is the default.")
    cores = positive(cores, "cores", "Pass Connection.num_cores.")
    multiple = positive(multiple, "multiple", "Pass 8, or 1 for no rounding.")
    return Batch(-(-asked // multiple) * multiple, cores, asked)


def steps_per_epoch(examples: int, batch: "Batch | int") -> int:
    """Returns the whole batches in an epoch; rows that do not fill one are dropped.

    A partial batch would have another shape, for which a TPU compiles the step again.

    Args:
        examples: rows in the data set.
        batch: a `Batch`, or the global batch in rows.

    Returns:
        Steps, at least 1.

    Raises:
        InvalidArgumentError: a bad number, or fewer examples than one batch holds.
    """
    examples = positive(examples, "examples", "Pass the number of rows in the data set.")
    rows = _rows(batch, "batch")
    if examples < rows:
        raise InvalidArgumentError(
            f"{examples:,} examples do not fill one batch of {rows:,}.",
            f"Use a global batch of {examples:,} or less, or repeat the data set.",
        )
    return examples // rows


def scale_learning_rate(
    base: float, batch: "Batch | int", base_batch: int, rule: str = "linear"
) -> float:
    """Returns the learning rate for `batch`, from one that works for `base_batch`.

    "linear" is for SGD, with a warm-up (Goyal et al. 2017, arXiv:1706.02677); "sqrt" keeps the
    variance of the updates (Krizhevsky 2014, arXiv:1404.5997; Hoffer et al. 2017,
    arXiv:1705.08741) and is the usual choice for Adam.

    Args:
        base: the learning rate that works for `base_batch`.
        batch: a `Batch`, or the global batch in rows.
        base_batch: the global batch in rows that `base` belongs to.
        rule: `"linear"` or `"sqrt"`.

    Returns:
        The learning rate.

    Raises:
        InvalidArgumentError: a bad number or rule.
    """
    if isinstance(base, bool) or not isinstance(base, int | float) or not 0 < base < math.inf:
        raise InvalidArgumentError(
            f"`base` must be a positive learning rate. Received: base={base!r}",
            "Pass the rate that works for `base_batch`, such as 0.1 for SGD.",
        )
    ratio = _rows(batch, "batch") / _rows(base_batch, "base_batch")
    if rule not in ("linear", "sqrt"):
        raise InvalidArgumentError(
            f"`rule` must be 'linear' or 'sqrt'. Received: rule={rule!r}",
            "'linear' for SGD, 'sqrt' for Adam.",
        )
    return base * (ratio if rule == "linear" else math.sqrt(ratio))


def accumulation(global_batch: "Batch | int", per_core_that_fits: int, cores: int) -> Accumulation:
    """Splits a global batch that does not fit into the fewest equal passes that do.

    Set `gradient_accumulation_steps` of the Keras optimizer to `steps` and give `fit` the
    `micro_batch`. A learning-rate schedule then counts passes, not updates. It works on JAX and
    on one device; Keras refuses it under TensorFlow's MirroredStrategy.

    Args:
        global_batch: a `Batch` or the rows that one update shall learn from.
        per_core_that_fits: the most rows that a replica has room for.
        cores: replicas.

    Returns:
        The `Accumulation`, whose `global_batch` is exactly the one asked for.

    Raises:
        InvalidArgumentError: a bad number, or a global batch that the replicas cannot share.
    """
    rows = _rows(global_batch, "global_batch")
    room = positive(per_core_that_fits, "per_core_that_fits", "Pass the rows that fit a core.")
    cores = positive(cores, "cores", "Pass Connection.num_cores.")
    if rows % cores:
        below, above = rows // cores * cores, -(-rows // cores) * cores
        raise InvalidArgumentError(
            f"`global_batch` must be a multiple of the {cores} cores. Received: "
            f"global_batch={rows}",
            f"Use {above}{f' or {below}' if below else ''}.",
        )
    share = rows // cores
    micro = next(m for m in range(min(room, share), 0, -1) if share % m == 0)
    return Accumulation(share // micro, micro, cores)


def positive(value: Any, name: str, advice: str) -> int:
    """Returns `value` as an `int`, or raises `InvalidArgumentError`: whole, and 1 or more."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise InvalidArgumentError(
            f"`{name}` must be a positive whole number. Received: {name}={value!r}", advice
        )
    return number


def _rows(batch: "Batch | int", name: str) -> int:
    if isinstance(batch, Batch):
        return batch.global_batch
    return positive(batch, name, "Pass a Batch, or the global batch in rows.")
