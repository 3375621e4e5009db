"""Pictures and texts at the end of an epoch, checked against what is known of the model."""

import io

import keras
import numpy as np
import pytest
from monitor_helpers import tensors, text

import colabtpu as ct
from colabtpu import monitor
from colabtpu.monitor.pictures import attention_maps, confusion_counts


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids):
        return "".join("abcdefgh|\n"[i] for i in np.asarray(ids).reshape(-1))


def fit(model, x, y, folder, *pictures):
    logs = monitor.callbacks(folder, run="run", panel=False, pictures=pictures)
    model.fit(x, y, batch_size=4, callbacks=logs, verbose=0)


def pixels(folder, tag) -> np.ndarray:
    from PIL import Image

    (_, strings), *_ = tensors(folder)[tag]
    picture = np.asarray(Image.open(io.BytesIO(strings[2])))
    assert [int(strings[0]), int(strings[1])] == [picture.shape[1], picture.shape[0]]
    return picture


def test_confusion_is_counted_by_true_and_guessed_class():
    counts = confusion_counts(np.array([0, 0, 1, 2, 2]), np.array([0, 1, 1, 0, 0]), 3)
    assert counts.tolist() == [[1, 1, 0], [0, 1, 0], [2, 0, 0]]


def test_wrong_examples_are_named_surest_first(tmp_path):
    # The model says class 0 for all; the larger the first pixel, the surer.
    x = np.zeros((4, 2, 2, 1), "float32")
    x[:, 0, 0, 0] = [1, 2, 3, 4]
    y = np.array([0, 1, 1, 0])
    dense = keras.layers.Dense(2, use_bias=False)
    model = keras.Sequential([keras.Input((2, 2, 1)), keras.layers.Flatten(), dense])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.0), loss)
    dense.set_weights([np.array([[1, 0], [0, 0], [0, 0], [0, 0]], "float32")])
    fit(model, x, y, tmp_path, monitor.Confusion(x, y, ["cat", "dog"]))
    rows = text(tmp_path / "run", "pictures/wrong").splitlines()[2:]
    # e^3 / (e^3 + 1) = 95 %, e^2 / (e^2 + 1) = 88 %
    assert rows == ["| 2 | dog as cat 95% |", "| 1 | dog as cat 88% |"]
    assert pixels(tmp_path / "run", "pictures/confusion").std() > 0
    assert pixels(tmp_path / "run", "pictures/wrong").std() > 0


def test_next_tokens_show_where_the_model_is_least_sure(tmp_path):
    table = keras.layers.Embedding(10, 10)
    model = keras.Sequential([keras.Input((4,), dtype="int32"), table])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.0), loss)
    logits = np.zeros((10, 10), "float32")
    logits[0, 1] = 5  # after "a" comes "b", it thinks
    logits[1, 8] = 2  # after "b" comes "|"
    table.set_weights([logits])
    rows = np.array([[0, 2, 1, 8]], "int32")  # "a c b |"
    fit(model, rows, rows, tmp_path, monitor.NextTokens(Letters(), rows, places=2, top=1))
    first, second = text(tmp_path / "run", "pictures/next tokens").splitlines()[2:]
    # After "a" came "c": 1 / (e^5 + 9) = 0.64 %, while it guessed "b" at 94 %.
    assert first == "| `a` | `c` | 0.64% | `b` 94% |"
    # After "ac" every token has a tenth.
    assert second == "| `ac` | `b` | 10.00% | `a` 10% |"


def test_samples_are_what_the_generator_writes(tmp_path):
    def generate(model, tokenizer, prompt, max_new_tokens, temperature):
        return f"{prompt} and {max_new_tokens} more at {temperature}"

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((4, 2), "float32")
    samples = monitor.Samples(None, ["one", "two"], 5, 0.5, generate)
    fit(model, x, x[:, :1], tmp_path, samples)
    assert "one and 5 more at 0.5" in text(tmp_path / "run", "samples/0")
    assert "two and 5 more at 0.5" in text(tmp_path / "run", "samples/1")


def test_attention_of_keras_layers_equals_the_scores_they_return():
    keras.utils.set_random_seed(0)
    layer = keras.layers.MultiHeadAttention(2, 4)
    inputs = keras.Input((5, 8))
    model = keras.Model(inputs, layer(inputs, inputs, use_causal_mask=True))
    x = np.random.default_rng(0).normal(size=(1, 5, 8)).astype("float32")
    (found,) = attention_maps(model, x)
    _, scores = layer(x, x, use_causal_mask=True, return_attention_scores=True)
    np.testing.assert_allclose(found, keras.ops.convert_to_numpy(scores)[0], atol=1e-5)
    assert type(layer)._compute_attention is layer._compute_attention.__func__, "left as it was"


def test_attention_of_our_decoder_is_causal_and_sums_to_one(tmp_path):
    model = ct.models.transformer_lm(vocab_size=16, seq_len=6, layers=2, dim=16, heads=2)
    model.compile("sgd", loss=ct.losses.next_token(model), metrics=ct.losses.metrics(model))
    rows = np.arange(24).reshape(4, 6).astype("int32") % 16
    maps = attention_maps(model, rows[:1])
    assert [m.shape for m in maps] == [(2, 6, 6), (2, 6, 6)]
    for weights in maps:
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
        assert np.triu(weights, 1).max() == 0
    fit(model, rows, rows, tmp_path, monitor.AttentionMaps(rows[0]))
    run = tmp_path / "run"
    assert pixels(run, "attention/layer 0").shape == pixels(run, "attention/layer 1").shape


def test_failing_picture_is_said_and_ends_alone(tmp_path, capsys):
    drawn = []

    def bad(model, files, step):
        raise RuntimeError("no ink")

    def good(model, files, step):
        drawn.append(step)

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((8, 2), "float32")
    logs = monitor.callbacks(tmp_path, run="run", panel=False, pictures=[bad, good])
    model.fit(x, x[:, :1], batch_size=4, epochs=3, callbacks=logs, verbose=0)
    assert drawn == [2, 4, 6]
    assert capsys.readouterr().out.count("bad is off, training goes on: RuntimeError: no ink") == 1


def test_wandb_that_is_not_installed_is_named():
    with pytest.raises(ct.ColabTPUError, match="pip install wandb"):
        monitor.weights_and_biases("project")


def test_mirror_gets_the_same_numbers(tmp_path):
    told = []
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((8, 2), "float32")
    logs = monitor.callbacks(
        tmp_path, run="run", panel=False, mirror=lambda *args: told.append(args)
    )
    model.fit(x, x[:, :1], batch_size=4, callbacks=logs, verbose=0)
    steps = [(step, numbers["loss"]) for folder, step, numbers in told if "loss" in numbers]
    from monitor_helpers import scalars

    written = scalars(tmp_path / "run" / "train")["loss"]
    assert [s for s, _ in steps] == [s for s, _ in written] == [1, 2]
    np.testing.assert_allclose([v for _, v in steps], [v for _, v in written], rtol=1e-6)
