"""Names and arguments of other years: what TensorFlow 2.20 and Keras 3 no longer know, or misuse.

Each rule looks at one `Piece` and yields findings; those with edits are safe to make.
"""

import ast
import re
from collections.abc import Callable, Iterator

from colabtpu.old_code import Finding, Piece, argument, calls, dotted, literal

Rule = Callable[[Piece], Iterator[Finding]]

_OPTIMIZERS = {
    "AdamOptimizer": "Adam",
    "GradientDescentOptimizer": "SGD",
    "MomentumOptimizer": "SGD",
    "RMSPropOptimizer": "RMSprop",
    "AdagradOptimizer": "Adagrad",
}
# With the module in front: torch.optim.Adam really takes `lr`.
_OPTIMIZER_CALL = re.compile(
    r"optimizers\.(\w+\.)?(Adam|AdamW|SGD|RMSprop|Adagrad|Adadelta|Adamax|Nadam|Ftrl|Lion)$"
)
_TENSORFLOW_1 = {
    "Session": "no sessions: TensorFlow 2 runs at once; train with model.fit",
    "placeholder": "keras.Input for a model, or plain arguments of a tf.function",
    "global_variables_initializer": "nothing: variables are initialised when made",
    "get_variable": "keras.Variable, or a keras layer",
    "InteractiveSession": "no sessions: TensorFlow 2 runs at once",
    "estimator": "a Keras model and fit() inside connection.scope()",
}


def renamed_optimizers(piece: Piece) -> Iterator[Finding]:
    """`tf.train.AdamOptimizer` and its like."""
    for name, call in calls(piece.tree):
        prefix, _, old = name.rpartition(".")
        if old not in _OPTIMIZERS or not prefix.endswith("train"):
            continue
        new = f"{prefix.partition('.')[0]}.keras.optimizers.{_OPTIMIZERS[old]}"
        # The other arguments were renamed as well: beta1 is beta_1, and so on.
        plain = all(k.arg == "learning_rate" for k in call.keywords)
        edits = [piece.replace(call.func, new)] if plain else []
        what = f"tf.train.{old} ended with TensorFlow 1."
        yield piece.found(call, "tf1-optimizer", what, f"{new}(...)", *edits)


def optimizer_arguments(piece: Piece) -> Iterator[Finding]:
    """`lr=`, and `decay=`, which Keras 3 ignores."""
    for name, call in calls(piece.tree):
        if not _OPTIMIZER_CALL.search(f"{piece.imported.get(name, '')}.{name}"):
            continue
        rate = argument(call, "lr")
        if rate:
            edit = piece.replace(rate, f"learning_rate={piece.source(rate.value)}")
            yield piece.found(
                call, "optimizer-lr", "Keras 3 does not know `lr`.", "learning_rate=...", edit
            )
        decay = argument(call, "decay")
        if decay:
            yield _decay(piece, call, decay)
        if argument(call, "clipnorm") or argument(call, "global_clipnorm"):
            what = (
                "Under a TensorFlow strategy with several replicas Keras 3 clips each replica's "
                "gradient before they are added up."
            )
            instead = "the JAX engine, where clipping sees the whole gradient; or clipvalue"
            yield piece.found(call, "clipping-by-replica", what, instead, dead=False)


def _decay(piece: Piece, call: ast.Call, decay: ast.keyword) -> Finding:
    rate = call.args[0] if call.args else getattr(argument(call, "learning_rate"), "value", None)
    what = "Keras 3 ignores `decay`; the old formula was rate / (1 + decay x step)."
    prefix, found, _ = dotted(call.func).partition("optimizers.")
    schedule = f"{prefix}optimizers.schedules.InverseTimeDecay"
    numbers = isinstance(literal(rate), float | int) and isinstance(literal(decay.value), float)
    if rate is None or not numbers or not found:
        return piece.found(call, "optimizer-decay", what, f"{schedule}(rate, 1, decay)")
    shown = piece.source(decay.value)
    new = f"{schedule}({piece.source(rate)}, decay_steps=1, decay_rate={shown})"
    edits = (piece.replace(rate, new), piece.remove_argument(call, decay))
    return piece.found(call, "optimizer-decay", what, new, *edits)


def compile_arguments(piece: Piece) -> Iterator[Finding]:
    """Arguments that fail under a strategy, and metrics given by position."""
    for name, call in calls(piece.tree):
        if not name.endswith("compile"):
            continue
        for keyword in ("experimental_steps_per_execution", "steps_per_execution"):
            found = argument(call, keyword)
            if found and literal(found.value) != 1:
                what = (
                    f"`{keyword}` fails: Keras 3 on a TensorFlow strategy cannot run several "
                    "steps at once."
                )
                edit = piece.remove_argument(call, found)
                yield piece.found(call, "steps-per-execution", what, "leave it out", edit)
        jit = argument(call, "jit_compile")
        if jit and literal(jit.value) is True:
            what = "`jit_compile=True` fails under a strategy; on a TPU everything is compiled."
            edit = piece.remove_argument(call, jit)
            yield piece.found(call, "jit-compile", what, "leave it out", edit)
        if len(call.args) > 2 and re.search(r"\.compile$", name):
            what = "The third argument of compile() is loss_weights in Keras 3; it was metrics."
            edit = piece.replace(call.args[2], f"metrics={piece.source(call.args[2])}")
            edits = [edit] if len(call.args) == 3 else []
            yield piece.found(call, "compile-order", what, "metrics=[...]", *edits)


def mixed_precision(piece: Piece) -> Iterator[Finding]:
    """`mixed_precision.experimental`."""
    for node in ast.walk(piece.tree):
        name = dotted(node) if isinstance(node, ast.Attribute) else ""
        base, dot, last = name.rpartition(".experimental.")
        if not dot or not base.endswith("mixed_precision"):
            continue
        new = f"{base}.{'set_global_policy' if last == 'set_policy' else last}"
        what = "mixed_precision.experimental is gone since TensorFlow 2.4."
        yield piece.found(node, "mixed-precision", what, new, piece.replace(node, new))


def autotune(piece: Piece) -> Iterator[Finding]:
    """`tf.data.experimental.AUTOTUNE`."""
    for node in ast.walk(piece.tree):
        if isinstance(node, ast.Attribute) and dotted(node).endswith("data.experimental.AUTOTUNE"):
            new = dotted(node).replace(".experimental", "")
            what = "AUTOTUNE has left experimental."
            yield piece.found(node, "autotune", what, new, piece.replace(node, new), dead=False)


def keras_nlp(piece: Piece) -> Iterator[Finding]:
    """keras_nlp, which is keras_hub now."""
    for node in ast.walk(piece.tree):
        what = "keras_nlp has become keras_hub."
        if isinstance(node, ast.Name) and node.id == "keras_nlp":
            yield piece.found(
                node, "keras-nlp", what, "keras_hub", piece.replace(node, "keras_hub")
            )
        elif isinstance(node, ast.Import | ast.ImportFrom):
            text = piece.source(node)
            new = re.sub(r"\bkeras_nlp\b", "keras_hub", text)
            if new != text:
                yield piece.found(node, "keras-nlp", what, new, piece.replace(node, new))


def saving(piece: Piece) -> Iterator[Finding]:
    """File names and formats that Keras 3 refuses."""
    for name, call in calls(piece.tree):
        path = literal(call.args[0]) if call.args else None
        named = path if isinstance(path, str) else ".keras"
        if re.search(r"\.(save|load)_weights$", name) and not named.endswith(_WEIGHTS):
            stem = re.sub(r"\.(h5|hdf5|ckpt|tf)$", "", named)
            new = f'"{stem}.weights.h5"'
            what = "Keras 3 wants the ending .weights.h5."
            edit = piece.replace(call.args[0], new)
            yield piece.found(call, "weights-file-name", what, new, edit)
        format_ = argument(call, "save_format")
        if re.search(r"(\.save|save_model)$", name) and format_:
            what = "Keras 3 goes by the ending of the file: `save_format` is deprecated."
            instead = "model.save('model.keras')"
            edits = [piece.remove_argument(call, format_)] if str(path).endswith(_MODELS) else []
            yield piece.found(call, "save-format", what, instead, *edits)
        elif re.search(r"(^|\.)(model|net)\w*\.save$", name) and not named.endswith(_MODELS):
            what = "Keras 3 saves to one file that ends in .keras."
            edit = piece.replace(call.args[0], f'"{named.rstrip("/")}.keras"')
            instead = "model.save('....keras'), or model.export(...) for a SavedModel"
            yield piece.found(call, "save-path", what, instead, edit)


_WEIGHTS = (".weights.h5", ".keras")
_MODELS = (".keras", ".h5", ".hdf5")


def layer_arguments(piece: Piece) -> Iterator[Finding]:
    """`input_length=` of Embedding."""
    for name, call in calls(piece.tree):
        length = argument(call, "input_length")
        if name.endswith("Embedding") and length:
            what = "Keras 3 takes the length from the input."
            edit = piece.remove_argument(call, length)
            yield piece.found(call, "input-length", what, "leave it out", edit, dead=False)


def renamed_methods(piece: Piece) -> Iterator[Finding]:
    """Methods that have other names now, or are gone."""
    for _, call in calls(piece.tree):
        func = call.func
        if not isinstance(func, ast.Attribute):
            continue
        base = piece.source(func.value)
        if func.attr == "sync_to_cpu":
            what = "A model of keras_to_tpu_model; today's model needs no copying back."
            yield piece.found(call, "sync-to-cpu", what, base, piece.replace(call, base))
        elif func.attr == "experimental_run_v2":
            edit = piece.replace(func, f"{base}.run")
            yield piece.found(call, "experimental-run", "It is called run now.", "run(...)", edit)
        elif func.attr in ("fit_generator", "predict_generator", "evaluate_generator"):
            new = func.attr.removesuffix("_generator")
            gone = [k for k in call.keywords if k.arg in _WORKERS]
            edits = [piece.replace(func, f"{base}.{new}")]
            edits += [piece.remove_argument(call, k) for k in gone]
            plain = len(call.args) <= 1 and len(gone) <= 1
            what = f"Keras 3 has no {func.attr}; {new} takes generators."
            yield piece.found(call, "fit-generator", what, f"{new}(...)", *edits[: 9 * plain])
        elif func.attr == "make_one_shot_iterator":
            what = "Data sets are iterated like lists."
            new = f"iter({base})"
            yield piece.found(call, "one-shot-iterator", what, new, piece.replace(call, new))


_WORKERS = ("workers", "use_multiprocessing", "max_queue_size")


def kaggle_buckets(piece: Piece) -> Iterator[Finding]:
    """`KaggleDatasets().get_gcs_path(...)`, which TPU Nodes needed."""
    what = "An attached TPU reads this machine's disk; no bucket is needed."
    for _, call in calls(piece.tree):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "get_gcs_path":
            name = literal(call.args[0]) if call.args else None
            new = f'"/kaggle/input/{name}"'
            edits = [piece.replace(call, new)] if isinstance(name, str) else []
            instead = new if edits else '"/kaggle/input/NAME-OF-THE-DATA-SET"'
            yield piece.found(call, "kaggle-bucket", what, instead, *edits)
    paths = [c for n, c in calls(piece.tree) if n.endswith("get_gcs_path")]
    for statement in piece.tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.module == "kaggle_datasets":
            safe = all(isinstance(literal(c.args[0]) if c.args else None, str) for c in paths)
            edit = piece.replace_lines(statement.lineno, statement.end_lineno or 0, "")
            edits = [edit] * safe
            yield piece.found(statement, "kaggle-bucket", what, "nothing: remove it", *edits)


def transformers(piece: Piece) -> Iterator[Finding]:
    """The TensorFlow half of transformers, which transformers 5 dropped."""
    what = "transformers 5 has no TensorFlow models, and those of 4 need Keras 2."
    model = (
        "keras_hub.models.*.from_preset('hf://...') and fit() on the texts themselves, which "
        "KerasHub tokenizes; keras.optimizers.AdamW with a schedule for create_optimizer"
    )
    for node in ast.walk(piece.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
            old = [a.name for a in node.names if a.name.startswith("TF") or a.name in _HF_GONE]
            if old:
                instead = f"{model} (gone: {', '.join(old)})"
                yield piece.found(node, "transformers-tensorflow", what, instead)
    for name, call in calls(piece.tree):
        if re.search(r"(prepare_tf_dataset|to_tf_dataset)$", name):
            yield piece.found(call, "transformers-tensorflow", what, model)


_HF_GONE = ("create_optimizer", "AdamWeightDecay", "KerasMetricCallback", "PushToHubCallback")


def tensorflow_1(piece: Piece) -> Iterator[Finding]:
    """`tf.contrib`, sessions, placeholders, estimators."""
    seen: set[int] = set()
    for node in ast.walk(piece.tree):
        name = dotted(node) if isinstance(node, ast.Attribute) else ""
        parts = name.split(".")
        line = getattr(node, "lineno", 0)
        if len(parts) < 2 or parts[0] not in ("tf", "tensorflow") or line in seen:
            continue
        rest = [part for part in parts[1:] if part not in ("compat", "v1")]
        if rest[:1] == ["contrib"]:
            what, instead = "tf.contrib ended with TensorFlow 1.", "see the set-up above, or Keras"
        elif rest and rest[0] in _TENSORFLOW_1:
            what = f"{name} is TensorFlow 1."
            instead = _TENSORFLOW_1[rest[0]]
        else:
            continue
        seen.add(line)
        yield piece.found(node, "tensorflow-1", what, instead)


def eight_cores(piece: Piece) -> Iterator[Finding]:
    """Batches of `n * 8`: there were eight cores, Colab's TPU has one."""
    for node in ast.walk(piece.tree):
        named = isinstance(node, ast.keyword) and node.arg == "batch_size"
        if isinstance(node, ast.Assign):
            named = "BATCH" in piece.source(node.targets[0]).upper()
        value = node.value if named else None  # type: ignore[attr-defined]
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
            sides = [literal(value.left), literal(value.right)]
            if 8 in sides and all(isinstance(side, int) for side in sides):
                per_core = sides[0] if sides[1] == 8 else sides[1]
                what = "Eight cores are assumed; Colab's TPU has one, Kaggle's eight."
                instead = f"{per_core} * strategy.num_replicas_in_sync"
                yield piece.found(value, "eight-cores", what, instead, dead=False)


def smaller_last_batch(piece: Piece) -> Iterator[Finding]:
    """`batch()` without `drop_remainder` where nothing repeats the data first."""
    for _, call in calls(piece.tree):
        func = call.func
        if not isinstance(func, ast.Attribute) or func.attr != "batch":
            continue
        chain = piece.source(func.value)
        if "repeat(" in chain or argument(call, "drop_remainder") or len(call.args) != 1:
            continue
        what = "The last, smaller batch compiles the program a second time on a TPU."
        instead = "batch(..., drop_remainder=True) for training"
        yield piece.found(call, "smaller-last-batch", what, instead, dead=False)


RULES: tuple[Rule, ...] = (
    renamed_optimizers,
    optimizer_arguments,
    compile_arguments,
    mixed_precision,
    autotune,
    keras_nlp,
    saving,
    layer_arguments,
    renamed_methods,
    kaggle_buckets,
    transformers,
    tensorflow_1,
    eight_cores,
    smaller_last_batch,
)
