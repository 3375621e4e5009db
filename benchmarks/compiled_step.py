"""What the TPU compiler makes of one training step: ours, plain Keras, and a hand-written one.

    python benchmarks/compiled_step.py v5e-1                       # GPT-2 small at 1,024
    python benchmarks/compiled_step.py v6e-1 --model 160m --seq-len 2048 --batch 4
    python benchmarks/compiled_step.py v5e-1 --programs raw-jax ours-jax --largest

No TPU is needed. Every program is lowered by a process of its own, with its engine, and compiled
by the one libtpu that preflight finds (`COLABTPU_LIBTPU` names another). Columns: temporaries and
bytes moved a token, FLOPs a token as XLA counts them (custom kernels left out), compile seconds,
and the tokens a second that memory bandwidth and arithmetic allow at most. Ratios are to the
hand-written step of the same row. A compilation takes minutes.
"""

import argparse
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from colabtpu import chips
from colabtpu.models.spec import Spec, flops_per_token, named_spec
from colabtpu.preflight.compiler import Compiled, compile_program
from colabtpu.preflight.program import Program

# name -> engine, kind, options
PROGRAMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "raw-jax": ("jax", "raw", {}),
    "raw-jax-remat": ("jax", "raw", {"remat": True}),
    "plain-jax": ("jax", "plain", {}),
    "plain-tensorflow": ("tensorflow", "plain", {}),
    "ours-jax": ("jax", "ours", {}),
    "ours-jax-remat": ("jax", "ours", {"remat": "full"}),
    "ours-jax-scan": ("jax", "ours", {"remat": "full", "scan": True}),
    "ours-tensorflow": ("tensorflow", "ours", {}),
    "ours-tensorflow-remat": ("tensorflow", "ours", {"remat": "full"}),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One program's figures."""

    program: str
    model: str
    seq_len: int
    batch: int
    target: str
    status: str
    temp_bytes_per_token: float
    bytes_per_token: float
    flops_per_token: float
    compile_seconds: float
    largest_batch: int | None
    libtpu: str


def main() -> None:
    """Prints one line for each program, and JSON with `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", default="v5e-1")
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--seq-len", type=int, default=0)
    parser.add_argument("--layers", type=int, default=0, help="fewer, for a quick look")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--largest", action="store_true", help="search the largest batch, too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lower", nargs=2, metavar=("PROGRAM", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    spec = _spec(options)
    if options.lower:
        name, file = options.lower
        Path(file).write_bytes(pickle.dumps(_lower(name, spec, options.batch, options.target)))
        return
    print(f"{spec.parameters / 1e6:.1f} M weights, {spec.seq_len} tokens, batch {options.batch}")
    rows: list[Row] = []
    for name in options.programs:
        rows.append(_row(name, spec, options))
        print(_line(rows[-1], rows, chips.target(options.target).chip, spec), flush=True)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))


def _spec(options: Any) -> Spec:
    changes = {"seq_len": options.seq_len, "layers": options.layers}
    return named_spec(options.model, **{name: value for name, value in changes.items() if value})


def _row(name: str, spec: Spec, options: Any) -> Row:
    compiled = _compiled(name, spec, options, options.batch)
    tokens = options.batch * spec.seq_len
    return Row(
        name, options.model, spec.seq_len, options.batch, options.target, compiled.status,
        (compiled.temp_bytes or 0) / tokens, (compiled.bytes_accessed or 0) / tokens,
        (compiled.flops or 0) / tokens, compiled.compile_seconds or 0.0,
        _largest(name, spec, options) if options.largest else None, compiled.libtpu_version,
    )  # fmt: skip


def _line(row: Row, rows: list[Row], chip: chips.Chip, spec: Spec) -> str:
    if row.status != "compiled":
        return f"{row.program:22} {row.status}"
    bound = min(
        chip.hbm_bytes_per_second_per_device / row.bytes_per_token,
        chip.peak_bf16_flops_per_device / flops_per_token(spec),
    )
    text = (
        f"{row.program:22} temp {row.temp_bytes_per_token / 1e3:7.1f} KB  "
        f"moved {row.bytes_per_token / 1e6:6.2f} MB  {row.flops_per_token / 1e9:5.2f} GFLOP  "
        f"compile {row.compile_seconds:6.1f} s  bound {bound:9,.0f} tokens/s"
    )
    if row.largest_batch is not None:
        text += f"  largest batch {row.largest_batch}"
    kind = "raw-jax-remat" if row.program.endswith(("remat", "scan")) else "raw-jax"
    raw = next((r for r in rows if r.program == kind and r.status == "compiled"), None)
    if raw is None or raw is row:
        return text
    return text + (
        f"  ({row.temp_bytes_per_token / raw.temp_bytes_per_token:.2f} x the temporaries, "
        f"{row.bytes_per_token / raw.bytes_per_token:.2f} x the traffic of {kind})"
    )


def _largest(name: str, spec: Spec, options: Any) -> int:
    """The largest of 1, 2, 4, ... rows whose memory libtpu can lay out."""
    fits = 0
    for batch in (2**power for power in range(11)):
        compiled = _compiled(name, spec, options, batch, memory_only=True)
        if not _fits(compiled, chips.target(options.target).chip):
            return fits
        fits = batch
    return fits


def _fits(compiled: Compiled, chip: chips.Chip) -> bool:
    if compiled.temp_bytes is None:
        return False
    needed = compiled.temp_bytes + (compiled.argument_bytes or 0)
    return needed + (compiled.program_bytes or 0) <= chip.hbm_usable_bytes


def _compiled(
    name: str, spec: Spec, options: Any, batch: int, memory_only: bool = False
) -> Compiled:
    engine = PROGRAMS[name][0]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program"
        command = [sys.executable, __file__, options.target, "--model", options.model,
                   "--seq-len", str(spec.seq_len), "--layers", str(spec.layers),
                   "--batch", str(batch), "--lower", name, str(file)]  # fmt: skip
        environment = {
            **os.environ, "KERAS_BACKEND": engine, "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "3", "TPU_SKIP_MDS_QUERY": "1",
        }  # fmt: skip
        subprocess.run(command, env=environment, check=True)
        program = pickle.loads(file.read_bytes())
    return compile_program(program, chips.target(options.target), memory_only=memory_only)


def _lower(name: str, spec: Spec, batch: int, target: str) -> Program:
    """Lowers one program, in a process that has its engine."""
    _, kind, options = PROGRAMS[name]
    if kind == "raw":
        return _lower_raw(spec, batch, options)
    from colabtpu.models import attention
    from colabtpu.preflight.lowering import lower
    from colabtpu.preflight.spec import tokens

    with attention.target_device("tpu"):
        model = _ours(spec, options) if kind == "ours" else _plain(spec)
    return lower(model, tokens(batch, spec.seq_len), chips.target(target))


def _ours(spec: Spec, options: dict[str, Any]) -> Any:
    import keras

    from colabtpu.models import losses
    from colabtpu.models.transformer import LanguageModel

    model = LanguageModel(dataclasses.replace(spec, **options))
    optimizer = keras.optimizers.AdamW(3e-4)
    model.compile(optimizer, loss=losses.next_token(model), metrics=losses.metrics(model))
    return model


def _plain(spec: Spec) -> Any:
    """KerasHub's GPT-2 of the same size, with Keras' own loss."""
    import keras
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=spec.padded_vocab_size, num_layers=spec.layers, num_heads=spec.heads,
        hidden_dim=spec.dim, intermediate_dim=spec.mlp_dim, max_sequence_length=spec.seq_len,
        dropout=0.0, dtype="mixed_bfloat16",
    )  # fmt: skip
    ids = keras.Input((spec.seq_len,), dtype="int32")
    hidden = backbone({"token_ids": ids, "padding_mask": keras.ops.ones_like(ids)})
    model = keras.Model(ids, backbone.token_embedding(hidden, reverse=True))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(3e-4), loss=loss)
    return model


def _lower_raw(spec: Spec, batch: int, options: dict[str, Any]) -> Program:
    import jax
    import raw_jax_gpt
    from jax._src.interpreters import mlir

    # As many tokens in a chunk of the loss as ours.
    chunks = max(8, batch * spec.seq_len // 1024)
    step = raw_jax_gpt.train_step(spec, chunks=min(chunks, spec.seq_len), **options)
    row = jax.ShapeDtypeStruct((batch, spec.seq_len), "int32")
    traced = jax.jit(step, donate_argnums=0).trace(raw_jax_gpt.shapes(spec), row, row)
    module = traced.lower(lowering_platforms=("tpu",)).compiler_ir("stablehlo")
    return Program(
        module=mlir.module_to_bytecode(module), engine="jax", step="train", arguments=(),
        batch=batch, replicas=1, num_partitions=1, seq_len=spec.seq_len,
        identity=module.operation.get_asm(enable_debug_info=False),
    )  # fmt: skip


if __name__ == "__main__":
    main()
