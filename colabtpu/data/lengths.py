"""How long are the examples, and which row length holds them?

print(train.lengths)        # a histogram, and the recommended length, a multiple of 128
"""

from dataclasses import dataclass

import numpy as np

LANE = 128  # a TPU's matrix unit pads the last axes to multiples of this
COVERED = 0.99
_BARS = 12


@dataclass(frozen=True)
class Lengths:
    """The lengths of examples, in tokens.

    Attributes:
        count: examples.
        mean: their mean length.
        quantiles: (share, length) for 50, 90, 99 and 100 % of the examples.
        bins: (longest length in the bin, examples in it).
        recommended: the smallest multiple of 128 that holds 99 % of the examples.
        seq_len: the row length in use.
        cut: examples longer than that, which lose their ends.
    """

    count: int
    mean: float
    quantiles: tuple[tuple[float, int], ...]
    bins: tuple[tuple[int, int], ...]
    recommended: int
    seq_len: int
    cut: int

    def __str__(self) -> str:
        most = max(number for _, number in self.bins)
        rows = [
            f"{'≤ ' + format(longest, ','):>9} {number:>9,} {'█' * round(40 * number / most)}"
            for longest, number in self.bins
        ]
        shares = ", ".join(f"{share:.0%} ≤ {length:,}" for share, length in self.quantiles)
        rows.append(f"{self.count:,} examples, mean {self.mean:,.0f} tokens; {shares}")
        rows.append(f"recommended length {self.recommended:,}; in use {self.seq_len:,}")
        if self.cut:
            rows[-1] += f", which cuts {self.cut:,} examples ({self.cut / self.count:.1%})"
        return "\n".join(rows)


def measure(lengths: np.ndarray, seq_len: int | None = None) -> Lengths:
    """Summarises lengths.

    Args:
        lengths: (examples,) whole numbers, at least one.
        seq_len: the row length in use; the recommended one if absent.

    Returns:
        The summary.
    """
    held = int(np.quantile(lengths, COVERED, method="higher"))
    recommended = max(LANE, -(-held // LANE) * LANE)
    seq_len = seq_len or recommended
    width = max(1, -(-int(lengths.max()) // _BARS))
    counts = np.bincount((lengths - 1).clip(0) // width)
    return Lengths(
        count=len(lengths),
        mean=float(lengths.mean()),
        quantiles=tuple(
            (share, int(np.quantile(lengths, share, method="higher")))
            for share in (0.5, 0.9, COVERED, 1.0)
        ),
        bins=tuple((width * (i + 1), int(number)) for i, number in enumerate(counts)),
        recommended=recommended,
        seq_len=seq_len,
        cut=int((lengths > seq_len).sum()),
    )
