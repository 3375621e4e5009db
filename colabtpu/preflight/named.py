"""Models that preflight knows by name, or finds by a path.

    named("gpt2-small", batch=8, seq_len=1024)            # ours
    named("kerashub:gpt2-small", batch=8, seq_len=1024)   # KerasHub's backbone, no weights needed
    named("model.keras", …)                               # a saved model
    named("my_module:build", …)                           # a function that returns a model

A function may return the model alone, or `(model, data)`.
"""

import importlib
import inspect
import os
import sys
from dataclasses import dataclass
from typing import Any

from colabtpu.errors import InvalidArgumentError
from colabtpu.preflight import spec as specs

GPT2_VOCABULARY = 50304  # 50,257, padded to a multiple of 128


@dataclass(frozen=True)
class Named:
    """A compiled model and the spec of its batch."""

    model: Any
    data: Any


def named(name: str, batch: int, seq_len: int) -> Named:
    """Returns the model called `name`, compiled, with the spec of its batch.

    Args:
        name: a known name, the path of a `.keras` file, or `module:function`.
        batch: rows of the global batch.
        seq_len: length of the sequences.

    Raises:
        InvalidArgumentError: no such model.
    """
    if name == "kerashub:gpt2-small":
        return _kerashub_gpt2(batch, seq_len)
    if name.endswith(".keras"):
        return _saved(name, batch, seq_len)
    if ":" in name:
        return _built(name, batch, seq_len)
    return _ours(name, batch, seq_len)


def _kerashub_gpt2(batch: int, seq_len: int) -> Named:
    """GPT-2 small on KerasHub's own layers, tied logits, AdamW, mixed_bfloat16."""
    import keras
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=GPT2_VOCABULARY,
        num_layers=12,
        num_heads=12,
        hidden_dim=768,
        intermediate_dim=3072,
        max_sequence_length=seq_len,
        dtype="mixed_bfloat16",
    )
    logits = backbone.token_embedding(backbone.output, reverse=True)
    model = keras.Model(backbone.input, logits, name="kerashub_gpt2_small")
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-4),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    row = specs.ArraySpec((batch, seq_len), "int32")
    return Named(model, ({"token_ids": row, "padding_mask": row}, row))


def _ours(name: str, batch: int, seq_len: int) -> Named:
    """Built as on a TPU: in mixed_bfloat16, with the loss that goes with it."""
    from colabtpu import models
    from colabtpu.models import losses
    from colabtpu.preflight.lowering import aimed_at_tpu

    with aimed_at_tpu():
        model = models.named(name, seq_len=seq_len)
    model.compile("adamw", loss=losses.next_token(model), metrics=losses.metrics(model))
    return Named(model, specs.tokens(batch, seq_len))


def _saved(path: str, batch: int, seq_len: int) -> Named:
    if not os.path.exists(path):
        raise InvalidArgumentError(f"`model` names no file. Received: {path!r}", "Check the path.")
    import keras

    model = keras.saving.load_model(path)
    return _completed(model, batch, seq_len)


def _built(name: str, batch: int, seq_len: int) -> Named:
    home, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(home), function)
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError(
            f"`model` names no function. Received: {name!r} ({error})",
            "Pass 'module:function', where the function returns a compiled model.",
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    wanted = {"batch": batch, "seq_len": seq_len}
    taken = inspect.signature(build).parameters
    made = build(**{k: v for k, v in wanted.items() if k in taken})
    if isinstance(made, tuple):
        return Named(made[0], made[1])
    return _completed(made, batch, seq_len)


def _completed(model: Any, batch: int, seq_len: int) -> Named:
    """A model with a batch as its inputs ask for: ids in, labels of the same shape."""
    import keras

    if not model.compiled:
        model.compile(
            optimizer="adamw", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    inputs = specs.map_structure(
        lambda t: specs.ArraySpec(tuple(t.shape), keras.backend.standardize_dtype(t.dtype)),
        getattr(model, "_inputs_struct", None) or model.inputs,
    )
    x = specs.map_structure(lambda s: specs.filled(s, batch, seq_len), inputs)
    x = x[0] if isinstance(x, tuple) and len(x) == 1 else x
    return Named(model, (x, _labels(model, specs.leaves(x)[0], batch, seq_len)))


def _labels(model: Any, first: specs.ArraySpec, batch: int, seq_len: int) -> Any:
    output = tuple(
        batch if i == 0 else (d or seq_len) for i, d in enumerate(model.outputs[0].shape)
    )
    loss = str(model.loss if isinstance(model.loss, str) else type(model.loss).__name__).lower()
    if "sparse" in loss or first.dtype.startswith("int"):
        return specs.ArraySpec(output[:-1], "int32")
    return specs.ArraySpec(output, "float32")
