"""Puts libtpu's and the runtime's words into plain ones.

    print(explain("RESOURCE_EXHAUSTED: … Used 21.36G of 15.75G hbm …"))
    try: model.fit(…)
    except Exception as error: print(ct.preflight.explain(error))

The formats are those that libtpu 0.0.21.1 and 0.0.52 print when a program does not fit, and
those that users report from running TPUs (tensorflow/tpu#385, sokrypton/ColabFold#62).
"""

import re
from dataclasses import dataclass

from colabtpu.preflight.hlo import Buffer

OUT_OF_MEMORY, UNSUPPORTED, BUSY, UNKNOWN = "out of memory", "unsupported op", "busy", "unknown"
_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)\s*([KMGT]?)(?:i?B)?"


@dataclass(frozen=True)
class Explanation:
    """What an error means.

    Attributes:
        kind: `"out of memory"`, `"unsupported op"`, `"busy"` or `"unknown"`.
        summary: one sentence.
        fix: the next step.
        needed_bytes: HBM that the program asked for, if the message says so.
        available_bytes: HBM that there is, if the message says so.
        buffers: the largest pieces that the message lists, largest first.
        op: the operation that is not supported.
    """

    kind: str
    summary: str
    fix: str
    needed_bytes: int | None = None
    available_bytes: int | None = None
    buffers: tuple[Buffer, ...] = ()
    op: str | None = None

    def __str__(self) -> str:
        lines = [self.summary]
        lines += [f"  {size(b.size_bytes):>9}  {b.shape}  {layer_of(b.op)}" for b in self.buffers]
        return "\n".join([*lines, f"  Next step: {self.fix}"])


def explain(error: BaseException | str) -> Explanation:
    """Says what a TPU error means, in plain words.

    Args:
        error: the exception, or its text.

    Returns:
        The `Explanation`; its `kind` is `"unknown"` when the text is none that we know.
    """
    text = str(error)
    for reader in (_out_of_memory, _unsupported, _busy):
        found = reader(text)
        if found is not None:
            return found
    return Explanation(
        UNKNOWN,
        f"This error is not one that preflight knows: {text.strip()[:300] or type(error).__name__}",
        "Run `python -m colabtpu doctor`; if it finds nothing, report the whole text.",
    )


def size(count: float) -> str:
    """Returns bytes for people: `16911433728` -> `"15.75 GiB"`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count:.0f} B"


def layer_of(op_name: str) -> str:
    """Returns the layer's path in an operation's: the user's names, without JAX's wrappers.

    `"jit(train_step)/transpose(jvp(gpt2/layer_0))/dot_general"` -> `"gpt2/layer_0 (backward)"`.
    """
    if not op_name:
        return ""
    parts = [part for part in op_name.split("/") if part]
    backward = "transpose(" in op_name or "gradient_tape" in op_name
    scopes = [_scope(part) for part in parts[:-1] if not _WRAPPER.match(part)]
    named = "/".join([s for s in scopes if s][-4:]) or parts[-1]
    return f"{named} (backward)" if backward else named


_WRAPPER = re.compile(r"(p?jit|shard_map|closed_call|rem?at\w*|checkpoint|while|body|cond|"
                      r"gradient_tape|StatefulPartitionedCall)\b")  # fmt: skip


def _scope(part: str) -> str:
    """`transpose(jvp(layer_0))` -> `layer_0`."""
    return part.rpartition("(")[2].rstrip(")")


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])


def _out_of_memory(text: str) -> Explanation | None:
    compact = re.search(rf"Used {_SIZE} of {_SIZE} hbm", text)
    total = re.search(rf"required for [\w ]+ \({_SIZE}\) exceeds available HBM \({_SIZE}\)", text)
    run_time = re.search(rf"[Aa]ttempting to (?:allocate|reserve) {_SIZE}.*?"
                         rf"(?:only|There are) {_SIZE}", text, re.S)  # fmt: skip
    single = re.search(r"Allocation \(size=(\d+)\)() would exceed memory \(size=(\d+)\)()", text)
    figure = compact or total or single or run_time
    if figure is None:
        short = f"The TPU ran out of memory: {text.strip()[:300]}"
        known = "RESOURCE_EXHAUSTED" in text or "Out of memory" in text
        return Explanation(OUT_OF_MEMORY, short, _FIX) if known else None
    figures = figure.groups()
    needed, available = _bytes(*figures[:2]), _bytes(*figures[2:4])
    verb = "asks for another" if figure is run_time else "needs"
    at_once = " for one array" if figure is single else ""
    return Explanation(
        OUT_OF_MEMORY,
        f"The program {verb} {size(needed)} of HBM{at_once} and the TPU has {size(available)}: "
        f"{size(needed - available)} too much. (HBM is the chip's own memory; the host's RAM "
        "does not count.)",
        _FIX,
        needed,
        available,
        tuple(_listed(text)),
    )


_FIX = (
    "Halve the per-core batch and accumulate gradients; `ct.preflight(model, data, target)` "
    "compiles the alternatives and says what each saves."
)


def _listed(text: str) -> list[Buffer]:
    """The allocations that libtpu prints, from `1. Size: 6.10G` on."""
    found = []
    for block in re.split(r"\n\s*\d+\. Size: ", text)[1:]:
        amount = re.match(_SIZE, block)
        op = re.search(r'op_name="([^"]*)"', block)
        shape = re.search(r"Shape: (\w+\[[\d,]*\])", block)
        label = re.search(r"XLA label: \S+ = ([\w\-]+)", block)
        if amount and (total := _bytes(amount[1], amount[2])) >= 2**20:
            found.append(Buffer(total, shape[1] if shape else "(tuple)",
                                op[1] if op else "", label[1] if label else ""))  # fmt: skip
    return found[:12]


def _unsupported(text: str) -> Explanation | None:
    patterns = (
        r"MLIR translation rule for primitive '([\w\-]+)' not found for platform tpu",
        r"No registered '(\w+)' OpKernel for XLA",
        r"No OpKernel was registered to support Op '(\w+)'",
        r"[Uu]nsupported (?:op|operation|custom call)[^'\"\w]*['\"]?([\w.\-]+)",
        r"Custom ?call target '?([\w.\-]+)'? (?:is )?not (?:found|implemented|supported)",
    )
    for pattern in patterns:
        found = re.search(pattern, text)
        if found:
            return Explanation(
                UNSUPPORTED,
                f"The TPU has no `{found[1]}`.",
                f"Compute `{found[1]}` in the input pipeline (on the host), or write it with "
                "operations that XLA has: matrix products, element-wise functions, sorting.",
                op=found[1],
            )
    return None


def _busy(text: str) -> Explanation | None:
    if "libtpu multi-process lockfile" in text or "already in use by process" in text:
        return Explanation(
            BUSY,
            "Another process on this machine holds the TPU.",
            "Shut down the other notebook (Runtime > Manage sessions), or restart the runtime.",
        )
    return None
