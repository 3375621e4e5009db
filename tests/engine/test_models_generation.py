"""Generation: equal to the full forward pass, compiled once, reproducible."""

import keras
import numpy as np
import pytest

import colabtpu as ct
from colabtpu.errors import InvalidArgumentError
from colabtpu.models import generation

SEQ = 24


class Letters:
    """A tokenizer of the alphabet; token 0 separates documents."""

    vocab_size = 27
    separator_id = 0

    def encode(self, text):
        return np.array([ord(c) - 96 for c in text], "int32")

    def decode(self, ids):
        return "".join(chr(96 + i) for i in ids)


def model_of(**changes):
    model = ct.models.transformer_lm(
        **{"vocab_size": 27, "seq_len": SEQ, "layers": 2, "dim": 32, "heads": 4, **changes}
    )
    random = np.random.default_rng(2)
    for weight in model.weights:
        weight.assign(random.normal(0.1, 0.4, weight.shape))
    return model


def by_full_forward(model, ids, new):
    """Greedy continuation that runs the whole row again for each token."""
    row = np.zeros((1, SEQ), "int32")
    row[0, : len(ids)] = ids
    for end in range(len(ids), len(ids) + new):
        row[0, end] = keras.ops.convert_to_numpy(model(row))[0, end - 1, :27].argmax()
    return row[0, : len(ids) + new]


@pytest.mark.parametrize(
    "changes",
    [{}, {"positions": "learned", "norm": "layer", "tied": False}, {"kv_heads": 1}],
    ids=["rotary", "gpt2", "multi-query"],
)
def test_greedy_equals_the_full_forward_pass(changes):
    model = model_of(**changes)
    for ids in ([5], [3, 1, 4, 1, 5]):
        got = ct.models.generate(model, None, ids, 18)
        np.testing.assert_array_equal(got, by_full_forward(model, ids, 18))


def test_one_program_serves_every_prompt_length_and_temperature(monkeypatch):
    model = model_of()
    traces = []
    loop = generation._loop
    monkeypatch.setattr(generation, "_loop", lambda *a: traces.append(1) or loop(*a))
    for prompt, new, temperature in (([1], 4, 0.0), ([1, 2, 3], 20, 0.7), ([9] * 10, 1, 1.5)):
        ct.models.generate(model, None, prompt, new, temperature=temperature)
    assert len(traces) == 1


def test_new_weights_are_used_without_compiling_again():
    model = model_of()
    before = ct.models.generate(model, None, [1], 20)
    for weight in model.weights:
        weight.assign(-weight)
    after = ct.models.generate(model, None, [1], 20)
    np.testing.assert_array_equal(after, by_full_forward(model, [1], 20))
    assert not np.array_equal(before, after)


def test_same_seed_same_sample_other_seed_other_sample():
    model = model_of()
    first, again, other = (
        ct.models.generate(model, None, [1], 22, temperature=2.0, seed=seed) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_top_k_of_one_is_greedy():
    model = model_of()
    sample = ct.models.generate(model, None, [1], 20, temperature=5.0, top_k=1)
    np.testing.assert_array_equal(sample, ct.models.generate(model, None, [1], 20))


def test_padding_tokens_are_never_sampled():
    model = model_of()
    for seed in range(5):
        ids = ct.models.generate(model, None, [1], 23, temperature=1e4, seed=seed)
        assert ids.max() < 27  # of 128 logits
    assert len(set(ids)) > 8  # at that temperature the choice is close to uniform


def test_samples_follow_the_distribution():
    model = model_of(layers=1, seq_len=4)
    logits = keras.ops.convert_to_numpy(model(np.array([[7, 0, 0, 0]], "int32")))[0, 0, :27]
    chances = np.exp(logits / 2.0 - (logits / 2.0).max())
    chances /= chances.sum()
    draws = [
        ct.models.generate(model, None, [7], 1, temperature=2.0, seed=seed)[1]
        for seed in range(400)
    ]
    seen = np.bincount(draws, minlength=27) / 400
    assert np.abs(seen - chances).max() < 0.1  # four standard deviations


def test_text_goes_in_and_text_comes_out():
    model, letters = model_of(), Letters()
    text = ct.models.generate(model, letters, "abc", 10)
    ids = by_full_forward(model, [1, 2, 3], 10)
    ends = np.flatnonzero(ids[3:] == 0)
    stop = 3 + (ends[0] if len(ends) else 10)
    assert text == letters.decode(ids[:stop])
    assert isinstance(ct.models.generate(model, letters, "", 5), str)


def test_it_runs_under_a_distribution(eight_devices):
    plain = model_of()
    expected = ct.models.generate(plain, None, [1, 2], 10)
    with eight_devices.scope():
        model = model_of()
        np.testing.assert_array_equal(ct.models.generate(model, None, [1, 2], 10), expected)


@pytest.mark.parametrize(
    ("prompt", "options", "word"),
    [
        ([1] * 20, {"max_new_tokens": 5}, "seq_len"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens"),
        ([1], {"max_new_tokens": 2, "temperature": -1.0}, "temperature"),
        ([1], {"max_new_tokens": 2, "top_k": 28}, "top_k"),
        ([27], {"max_new_tokens": 2}, "0..26"),
        ([], {"max_new_tokens": 2}, "no token"),
    ],
)
def test_bad_requests_get_one_clear_error(prompt, options, word):
    with pytest.raises(InvalidArgumentError, match=word):
        ct.models.generate(model_of(), None, prompt, **options)
