"""The transformer against a numpy one, and what a user relies on: causality, packing, saving."""

import keras
import numpy as np
import pytest

import colabtpu as ct
from colabtpu.models import attention

SMALL = {"vocab_size": 50, "seq_len": 12, "layers": 2, "dim": 32, "heads": 4}


def small(**changes):
    model = ct.models.transformer_lm(**{**SMALL, **changes})
    random = np.random.default_rng(3)
    for weight in model.weights:  # norms too: at one and zero a mistake in them would not show
        weight.assign(random.normal(0.1, 0.3, weight.shape))
    return model


def tokens(batch=3, seed=0):
    return np.random.default_rng(seed).integers(0, 50, (batch, 12)).astype("int32")


def logits_of(model, inputs):
    return keras.ops.convert_to_numpy(model(inputs))


def reference(model, rows):
    """The same function in numpy and float64, one token and one head at a time."""
    spec = model.spec
    w = {x.path: np.asarray(keras.ops.convert_to_numpy(x), "float64") for x in model.weights}

    def norm(x, name):
        if spec.norm == "rms":
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}/scale"]
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * w[f"{name}/gamma"] + w[f"{name}/beta"]

    def turn(x):  # each pair is a complex number, turned by position * frequency
        half = spec.head_dim // 2
        angle = np.arange(len(x))[:, None, None] * 10000.0 ** (-np.arange(half) / half)
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1)

    def attend(q, k, v):
        out = np.zeros_like(q)
        for head, t in np.ndindex(spec.heads, len(q)):
            kv = head // (spec.heads // spec.kv_heads)
            scores = k[: t + 1, kv] @ q[t, head] / np.sqrt(spec.head_dim)
            weights = np.exp(scores - scores.max())
            out[t, head] = weights / weights.sum() @ v[: t + 1, kv]
        return out

    def logits(row):
        x = w["embedding/embeddings"][row]
        if spec.positions == "learned":
            x = x + w["position_embedding/embeddings"]
        for block in (f"block_{index}" for index in range(spec.layers)):
            h = norm(x, f"{block}/attention_norm")
            q, k, v = (
                np.einsum("td,dhk->thk", h, w[f"{block}/{name}/kernel"])
                for name in ("query", "key", "value")
            )
            if spec.positions == "rotary":
                q, k = turn(q), turn(k)
            x = x + np.einsum("thk,hkd->td", attend(q, k, v), w[f"{block}/attention_output/kernel"])
            u = norm(x, f"{block}/mlp_norm") @ w[f"{block}/mlp_up/kernel"]
            gelu = 0.5 * u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))
            x = x + gelu @ w[f"{block}/mlp_down/kernel"]
        head = w["embedding/embeddings"].T if spec.tied else w["embedding/reverse_embeddings"]
        return norm(x, "final_norm") @ head

    return np.stack([logits(row) for row in rows])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"positions": "learned", "norm": "layer"},
        {"kv_heads": 2},
        {"tied": False, "mlp_dim": 48},
    ],
    ids=["rotary", "gpt2", "grouped-queries", "untied"],
)
def test_it_computes_what_the_numpy_transformer_computes(changes):
    model, rows = small(**changes), tokens()
    expected = reference(model, rows)[..., :50]
    np.testing.assert_allclose(logits_of(model, rows)[..., :50], expected, rtol=1e-4, atol=1e-4)
    assert model.count_params() == model.spec.parameters


def test_a_token_changes_no_logit_before_it():
    model, rows = small(), tokens()
    before = logits_of(model, rows)
    changed = rows.copy()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    after = logits_of(model, changed)
    np.testing.assert_array_equal(after[:, :7], before[:, :7])
    assert np.abs(after[:, 7:] - before[:, 7:]).max() > 1e-3


def test_the_logits_of_padding_rows_are_masked():
    logits = logits_of(small(), tokens())
    assert logits.shape == (3, 12, 128)
    assert logits.dtype == np.float32
    assert logits[..., 50:].max() < -1e29


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_packed_row_equals_its_documents_alone(positions):
    packed = small(packed=True, positions=positions)
    alone = small(positions=positions)
    first, second = tokens(1, seed=1)[0, :5], tokens(1, seed=2)[0, :7]
    inputs = {
        "tokens": np.concatenate([first, second])[None],
        "segment_ids": np.array([[1] * 5 + [2] * 7], "int32"),
        "positions": np.array([[*range(5), *range(7)]], "int32"),
    }
    out = logits_of(packed, inputs)[0]
    for document, part in ((first, out[:5]), (second, out[5:])):
        row = np.zeros((1, 12), "int32")
        row[0, : len(document)] = document  # causal: what follows a document changes nothing
        expected = logits_of(alone, row)[0, : len(document)]
        np.testing.assert_allclose(part, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{}, {"packed": True, "positions": "learned", "norm": "layer", "kv_heads": 1, "tied": False}],
)
def test_a_saved_model_loads_bit_equal_and_compiled(tmp_path, changes):
    model = small(**changes)
    rows = tokens(8)
    x = dict.fromkeys(("tokens", "segment_ids", "positions"), rows) if changes else rows
    if changes:
        x["positions"] = np.tile(np.arange(12, dtype="int32"), (8, 1))
    options = {"label_smoothing": 0.1, "ignore_index": 3}
    loss = ct.losses.next_token(model, **options)
    model.compile("adamw", loss=loss, metrics=ct.losses.metrics(model))
    model.fit(x, np.roll(rows, -1, 1), batch_size=8, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", safe_mode=True)
    np.testing.assert_array_equal(logits_of(loaded, x), logits_of(model, x))
    assert loaded.spec == model.spec
    assert {name: loaded.loss.get_config()[name] for name in options} == options
    y = np.roll(rows, -1, 1)
    assert loaded.evaluate(x, y, verbose=0, return_dict=True) == model.evaluate(
        x, y, verbose=0, return_dict=True
    )


def test_mixed_bfloat16_keeps_float32_weights_and_logits():
    full, mixed = small(), small(dtype="mixed_bfloat16")
    assert {weight.dtype for weight in mixed.weights} == {"float32"}
    assert mixed.blocks[0].compute_dtype == "bfloat16"
    out = logits_of(mixed, tokens())
    assert out.dtype == np.float32
    wide = logits_of(full, tokens())[..., :50]
    assert np.abs(out[..., :50] - wide).max() < 0.03 * np.abs(wide).max()


def test_the_default_precision_follows_the_device_and_the_global_policy():
    model = ct.models.transformer_lm(50, 12, layers=1, dim=32)
    assert model.dtype_policy.name == "float32"  # the tests see CPUs
    with attention.target_device("tpu"):
        model = ct.models.transformer_lm(50, 12, layers=1, dim=32)
    assert model.dtype_policy.name == "mixed_bfloat16"
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = ct.models.transformer_lm(50, 12, layers=1, dim=32)
    finally:
        keras.config.set_dtype_policy("float32")
    assert model.dtype_policy.name == "mixed_float16"


def test_weights_have_the_names_that_layouts_and_adapters_look_for():
    paths = {weight.path for weight in ct.models.named("tiny", layers=1, seq_len=8).weights}
    for name in ("query", "key", "value", "attention_output", "mlp_up", "mlp_down"):
        assert f"block_0/{name}/kernel" in paths
    assert "embedding/embeddings" in paths


def trained(**changes):
    """A model and its losses after two steps of SGD, whose updates are the gradients."""
    model, rows = small(**changes), tokens(4)
    model.compile(keras.optimizers.SGD(0.1), loss=ct.losses.next_token(model))
    return model, [float(model.train_on_batch(rows, np.roll(rows, -1, 1))) for _ in range(2)]


@pytest.mark.parametrize("remat", ["full", "attention", "dots"])
def test_rematerialisation_changes_no_gradient(remat):
    plain, plain_loss = trained()
    again, loss = trained(remat=remat)
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    for one, other in zip(plain.weights, again.weights, strict=True):
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(other), keras.ops.convert_to_numpy(one), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("remat", ["none", "full"])
def test_stacked_blocks_compute_and_train_like_separate_ones(remat, tmp_path):
    separate = small()
    stacked = ct.models.transformer_lm(**SMALL, scan=True, remat=remat)
    assert stacked.count_params() == separate.count_params()
    stacked.embedding.set_weights(separate.embedding.get_weights())
    stacked.final_norm.set_weights(separate.final_norm.get_weights())
    per_block = [block.get_weights() for block in separate.blocks]
    stacked.blocks[0].set_weights([np.stack(parts) for parts in zip(*per_block, strict=True)])
    rows = tokens()
    expected = logits_of(separate, rows)
    np.testing.assert_allclose(logits_of(stacked, rows), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(
        ct.models.generate(stacked, None, [1, 2, 3], 8),
        ct.models.generate(separate, None, [1, 2, 3], 8),
    )
    for model in (separate, stacked):
        model.compile(keras.optimizers.SGD(0.1), loss=ct.losses.next_token(model))
        model.train_on_batch(rows, np.roll(rows, -1, 1))
    after = [np.stack(p) for p in zip(*[b.get_weights() for b in separate.blocks], strict=True)]
    for one, other in zip(after, stacked.blocks[0].get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)
    stacked.save(tmp_path / "stacked.keras")
    loaded = keras.saving.load_model(tmp_path / "stacked.keras")
    np.testing.assert_array_equal(logits_of(loaded, rows), logits_of(stacked, rows))


def test_stacked_blocks_start_from_different_weights_of_the_same_spread():
    stack = ct.models.transformer_lm(50, 12, layers=4, dim=64, scan=True).blocks[0]
    by_name = {weight.name: np.asarray(weight) for weight in stack.weights}
    query, down = by_name["query_kernel"], by_name["mlp_down_kernel"]
    assert np.abs(query[0] - query[1]).max() > 0.01
    assert query.std() == pytest.approx(0.02, rel=0.05)
    assert down.std() == pytest.approx(0.02 / np.sqrt(8), rel=0.05)
    assert (by_name["mlp_norm_scale"] == 1).all()


def test_a_window_hides_what_is_further_back():
    model, rows = small(window=3, layers=1), tokens()
    before = logits_of(model, rows)
    changed = rows.copy()
    changed[:, 2] = (changed[:, 2] + 1) % 50
    after = logits_of(model, changed)
    seen = np.abs(after - before)[..., :50].max(axis=(0, 2)) > 1e-6
    np.testing.assert_array_equal(np.flatnonzero(seen), [2, 3, 4])


def test_slim_adamw_halves_the_first_moments_and_still_trains(tmp_path):
    model = ct.models.transformer_lm(**SMALL)
    optimizer = ct.models.SlimAdamW(1e-2)
    model.compile(optimizer, loss=ct.losses.next_token(model))
    rows = tokens(8)
    losses = [float(model.train_on_batch(rows, np.roll(rows, -1, 1))) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    dtypes = {v.path.rsplit("_", 1)[-1]: v.dtype for v in optimizer.variables}
    assert dtypes["momentum"] == "bfloat16"
    assert dtypes["velocity"] == "float32"
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.momentum_dtype == "bfloat16"
