"""`python -m colabtpu preflight`: the verdict from a shell.

    python -m colabtpu preflight --model gpt2-small --target v5e-1 --batch 8 --seq-len 1024
    python -m colabtpu preflight --model my_module:build --target v6e-1 --json

The exit status is 0 when the step fits, 1 when it does not or does not compile, 2 when an
argument is wrong, and 3 when there is no verdict.
"""

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from colabtpu import chips
from colabtpu.preflight import recall

if TYPE_CHECKING:
    from colabtpu.preflight.report import Report

KNOWN = ("kerashub:gpt2-small",)

# The keys of `--json`, in its order; after them come those that only people asked for.
KEYS = (
    "compiles", "fits", "hbm_needed_bytes", "hbm_usable_bytes", "temp_bytes", "argument_bytes",
    "flops", "model_flops", "bytes_accessed", "step_seconds_bound", "tokens_per_second_bound",
    "compile_seconds", "libtpu_version", "target", "engine", "batch", "seq_len",
)  # fmt: skip
MORE = ("model", "step", "status", "summary", "fix", "message", "hbm_parts", "jax_version",
        "as_shipped", "bound_by", "model_flops_formula", "replicas", "collectives", "buffers",
        "advice", "notes", "cached")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options."""
    add = parser.add_argument
    add("--model", required=True,
        help="gpt2-small, kerashub:gpt2-small, a .keras file, or module:function")  # fmt: skip
    add("--target", default="v5e-1", help="the slice: v5e-1, v5e-8, v6e-1, v5e:4x4 … (v5e-1)")
    add("--batch", type=int, default=8, help="the global batch, in rows (8)")
    add("--seq-len", type=int, default=1024, help="length of the sequences (1024)")
    add("--engine", choices=("jax", "tensorflow"), help="Keras' backend ($KERAS_BACKEND, or jax)")
    add("--step", choices=("train", "evaluate", "generate"), default="train")
    add("--memory-only", action="store_true",
        help="stop when the memory is known: seconds instead of minutes")  # fmt: skip
    add("--no-advice", action="store_true", help="do not compile what would help")
    add("--libtpu", help="another libtpu.so, or the folder that holds it")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Judges the model and prints the report."""
    os.environ["KERAS_BACKEND"] = args.engine or os.environ.get("KERAS_BACKEND") or "jax"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    report = _report(args)
    if args.json:
        print(json.dumps(_ordered(report.to_dict()), indent=2))
    else:
        print(report)
    if report.compiles is None and report.status != "estimated":
        return 3
    return 0 if report.fits else 1


def _report(args: argparse.Namespace) -> "Report":
    """The verdict; that on a model known by name is found again before anything is built."""
    key = None
    if not args.model.endswith(".keras") and (":" not in args.model or args.model in KNOWN):
        key = recall.named_key(
            args.model, os.environ["KERAS_BACKEND"], args.batch, args.seq_len,
            chips.target(args.target), args.step, args.memory_only, args.libtpu,
        )  # fmt: skip
    report = recall.read(key)
    if report is None or (report.fits is False and not report.advice and not args.no_advice):
        from colabtpu.preflight.judge import preflight
        from colabtpu.preflight.named import named

        found = named(args.model, args.batch, args.seq_len)
        report = preflight(
            found.model,
            found.data,
            args.target,
            step=args.step,
            advise=not args.no_advice,
            memory_only=args.memory_only,
            libtpu=args.libtpu,
        )
        recall.write(key, report)
    return report


def _ordered(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: fields[key] for key in KEYS + MORE}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m colabtpu.preflight.command")
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
