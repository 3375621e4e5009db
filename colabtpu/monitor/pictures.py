"""Pictures and texts that people understand, drawn at the end of epochs.

    callbacks("logs", tpu, pictures=[
        NextTokens(tok, rows), Samples(tok, ["def ", "import "]), AttentionMaps(rows[:1], tok),
        Confusion(images, labels, names)])

Each is a function of `(model, files, step)`; so is anything of your own. They run when the
clock of the throughput stands still, and an error in one is said and ends that one alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import keras
import numpy as np

from colabtpu.monitor.run_files import RunFiles

Picture = Callable[[keras.Model, RunFiles, int], None]


@dataclass
class Confusion:
    """Which classes are taken for which, and the wrong examples the model is surest of.

    Args:
        x: inputs, `(examples, ...)`; pictures are shown when they are `(h, w)` or `(h, w, c)`.
        y: labels `(examples,)` int, or one-hot `(examples, classes)`.
        names: of the classes.
        wrong: how many wrong examples to show.
    """

    x: Any
    y: Any
    names: Sequence[str] | None = None
    wrong: int = 9

    def __call__(self, model: keras.Model, files: RunFiles, step: int) -> None:
        scores = np.asarray(model.predict(self.x, verbose=0), "float64")
        truth = np.asarray(self.y)
        truth = truth.argmax(-1) if truth.ndim == 2 and truth.shape[1] > 1 else truth.reshape(-1)
        scores = _probabilities(scores)
        names = list(self.names or map(str, range(scores.shape[1])))
        guess = scores.argmax(-1)
        counts = confusion_counts(truth, guess, len(names))
        files.image(step, "pictures/confusion", _draw_confusion(counts, names))
        worst = [i for i in np.argsort(-scores.max(-1), kind="stable") if guess[i] != truth[i]]
        titles = [f"{names[truth[i]]} as {names[guess[i]]} {scores[i].max():.0%}" for i in worst]
        inputs = np.asarray(self.x)
        if worst and inputs.ndim in (3, 4):
            worst = worst[: self.wrong]
            files.image(step, "pictures/wrong", _draw_grid(inputs[worst], titles))
        rows = "\n".join(
            f"| {i} | {t} |" for i, t in zip(worst, titles[: self.wrong], strict=False)
        )
        files.text(step, "pictures/wrong", f"| example | true as guessed |\n| --- | --- |\n{rows}")


@dataclass
class NextTokens:
    """What the model expects next, at the places of a text where it is least sure.

    Args:
        tokenizer: `decode(ids)` gives text.
        rows: token ids `(rows, seq)` int32.
        places: how many places to show.
        top: how many guesses at each.
    """

    tokenizer: Any
    rows: Any
    places: int = 12
    top: int = 3

    def __call__(self, model: keras.Model, files: RunFiles, step: int) -> None:
        rows = np.asarray(self.rows, "int32")
        chances = _probabilities(np.asarray(model.predict(rows, verbose=0), "float64"))
        true = np.take_along_axis(chances[:, :-1], rows[:, 1:, None], -1)[..., 0]
        lines = ["| text so far | true next | its chance | guesses |", "| --- | --- | --- | --- |"]
        for flat in np.argsort(true, axis=None, kind="stable")[: self.places]:
            row, at = np.unravel_index(flat, true.shape)
            best = np.argsort(-chances[row, at], kind="stable")[: self.top]
            guesses = ", ".join(f"{self._text([i])} {chances[row, at, i]:.0%}" for i in best)
            before = self._text(rows[row, max(0, at - 15) : at + 1])
            after = self._text(rows[row, at + 1 : at + 2])
            lines.append(f"| {before} | {after} | {true[row, at]:.2%} | {guesses} |")
        files.text(step, "pictures/next tokens", "\n".join(lines))

    def _text(self, ids: Any) -> str:
        return _cell(self.tokenizer.decode(np.asarray(ids)))


@dataclass
class Samples:
    """Texts that the model writes.

    Args:
        tokenizer: of the model.
        prompts: what it continues.
        max_new_tokens: how far.
        temperature: 0 takes the likeliest token each time.
        generate: `(model, tokenizer, prompt, max_new_tokens, temperature=...)` -> text; `None`
            takes `colabtpu.models.generate`.
    """

    tokenizer: Any
    prompts: Sequence[str]
    max_new_tokens: int = 64
    temperature: float = 0.8
    generate: Callable[..., str] | None = None

    def __call__(self, model: keras.Model, files: RunFiles, step: int) -> None:
        generate = self.generate or import_module("colabtpu.models").generate
        for number, prompt in enumerate(self.prompts):
            text = generate(
                model, self.tokenizer, prompt, self.max_new_tokens, temperature=self.temperature
            )
            files.text(step, f"samples/{number}", f"```\n{text}\n```")


@dataclass
class AttentionMaps:
    """Which tokens each head looks at, for one row: a picture for each attention layer.

    Reads the queries and keys of Keras' `MultiHeadAttention` and of this package's decoder
    blocks; each square is one head, queries downwards, keys to the right, bright is much.

    Args:
        row: token ids `(seq,)` or `(1, seq)`, or any input of one example.
        layers: how many layers to draw, evenly spread from the first to the last.
    """

    row: Any
    layers: int = 4

    def __call__(self, model: keras.Model, files: RunFiles, step: int) -> None:
        row = np.asarray(self.row)
        row = row[None] if row.ndim == 1 else row[:1]
        maps = attention_maps(model, row)
        chosen = np.unique(np.linspace(0, len(maps) - 1, min(self.layers, len(maps))).astype(int))
        for index in chosen:
            files.image(step, f"attention/layer {index}", _draw_heads(maps[index]))


def confusion_counts(truth: np.ndarray, guess: np.ndarray, classes: int) -> np.ndarray:
    """Returns how often class i was taken for class j, `(classes, classes)` int64."""
    counts = np.zeros((classes, classes), "int64")
    np.add.at(counts, (truth.astype(int), guess.astype(int)), 1)
    return counts


def attention_maps(model: keras.Model, row: np.ndarray) -> list[np.ndarray]:
    """Returns the attention weights of one example, `(heads, queries, keys)` for each layer."""
    with _watching_attention(model) as seen:
        model(row, training=False)
    return [_weights(*parts) for parts in seen]


@contextmanager
def _watching_attention(model: keras.Model) -> Iterator[list[Any]]:
    """Collects `(query, key, mask or None, causal)` of each attention that is computed."""
    from colabtpu.models import attention

    seen: list[Any] = []
    attend = attention.attend

    def watched_attend(
        query: Any, key: Any, value: Any, segment_ids: Any = None, window: int = 0
    ) -> Any:
        mask = None
        if segment_ids is not None:
            ids = keras.ops.convert_to_numpy(segment_ids)
            mask = ids[:, :, None] == ids[:, None, :]
        if window:
            places = np.arange(query.shape[2])
            near = (places[:, None] - places[None] < window)[None]
            mask = near if mask is None else mask & near
        heads_last = [keras.ops.swapaxes(each, 1, 2) for each in (query, key)]
        seen.append((*heads_last, mask, True))
        return attend(query, key, value, segment_ids, window)

    layers = [
        layer for layer in model._flatten_layers() if hasattr(layer, "_compute_attention")
    ]  # fmt: skip
    attention.attend = watched_attend
    for layer in layers:
        layer._compute_attention = _watched_attention(layer, seen)
    try:
        yield seen
    finally:
        attention.attend = attend
        for layer in layers:
            del layer._compute_attention


def _watched_attention(layer: Any, seen: list[Any]) -> Callable[..., Any]:
    compute = layer._compute_attention

    def compute_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask", args[0] if args else None)
        seen.append((query, key, mask, bool(kwargs.get("use_causal_mask"))))
        return compute(query, key, value, *args, **kwargs)

    return compute_attention


def _weights(query: Any, key: Any, mask: Any, causal: bool) -> np.ndarray:
    """Softmax of the scaled products of `(1, seq, heads, head_dim)`, as float64."""
    q, k = (
        np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(t, "float32"))) for t in (query, key)
    )
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = np.einsum("qhd,khd->hqk", q[0], k[0]).astype("float64") / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tri(*scores.shape[1:]) > 0, scores, -np.inf)
    if mask is not None:
        visible = np.asarray(keras.ops.convert_to_numpy(mask))[0]
        scores = np.where(visible, scores, -np.inf)
    return _probabilities(scores, logits=True)


def _probabilities(scores: np.ndarray, logits: bool | None = None) -> np.ndarray:
    """Softmax, unless the rows are probabilities already."""
    if logits is None:
        logits = bool((scores < 0).any() or not np.allclose(scores.sum(-1), 1, atol=1e-3))
    if not logits:
        return scores
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _draw_heads(weights: np.ndarray) -> np.ndarray:
    heads, queries, keys = weights.shape
    scale = max(1, 160 // max(queries, keys))
    columns = int(np.ceil(np.sqrt(heads)))
    tiles = [np.kron(head, np.ones((scale, scale))) for head in weights]
    blank = np.zeros_like(tiles[0])
    tiles += [blank] * (-heads % columns)
    tiles = [np.pad(tile, 2, constant_values=1.0) for tile in tiles]
    rows = [np.hstack(tiles[i : i + columns]) for i in range(0, len(tiles), columns)]
    # The square root shows weak attention too.
    grey = (255 * np.sqrt(np.vstack(rows))).astype("uint8")
    return np.repeat(grey[..., None], 3, axis=-1)


def _draw_confusion(counts: np.ndarray, names: list[str]) -> np.ndarray:
    side = min(12.0, 2.5 + 0.45 * len(names))
    figure, axes = _figure(side, side)
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    axes.set_xlabel("guessed")
    axes.set_ylabel("true")
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    if len(names) <= 20:
        for (i, j), count in np.ndenumerate(counts):
            colour = "white" if share[i, j] > 0.5 else "black"
            axes.text(j, i, str(count), ha="center", va="center", color=colour, fontsize=8)
    return _pixels(figure)


def _draw_grid(pictures: np.ndarray, titles: list[str]) -> np.ndarray:
    columns = int(np.ceil(np.sqrt(len(pictures))))
    rows = -(-len(pictures) // columns)
    figure, _ = _figure(2.2 * columns, 2.4 * rows, axes=False)
    for place, (picture, title) in enumerate(zip(pictures, titles, strict=False)):
        axes = figure.add_subplot(rows, columns, place + 1)
        axes.imshow(np.squeeze(picture), cmap="gray")
        axes.set_title(title, fontsize=8)
        axes.set_axis_off()
    return _pixels(figure)


def _figure(width: float, height: float, axes: bool = True) -> tuple[Any, Any]:
    # Without pyplot: no global state, and no window or inline output in a notebook.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot() if axes else None


def _pixels(figure: Any) -> np.ndarray:
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()


def _cell(text: str) -> str:
    """Text as it may stand in a Markdown table, white space made visible."""
    shown = text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "⏎").replace("\t", "⇥")
    return f"`{shown}`" if "`" not in shown else shown
