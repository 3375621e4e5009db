"""Every kind of attention against the plain one: values, gradients, masks, the TPU kernel too."""

import keras
import numpy as np
import pytest
from keras import ops

from colabtpu.models import attention

SEQ = 256


def inputs(heads=4, kv_heads=4, seq=SEQ, head_dim=16, batch=2, segments=False, seed=0):
    random = np.random.default_rng(seed)

    def normal(heads):
        return random.normal(size=(batch, heads, seq, head_dim)).astype("float32")

    ids = np.sort(random.integers(0, 4, (batch, seq)), axis=1).astype("int32")
    return normal(heads), normal(kv_heads), normal(kv_heads), ids if segments else None


def by_hand(query, key, value, ids, window=0):
    """Masked softmax attention in numpy and float64; `query` is not yet scaled."""
    group = query.shape[1] // key.shape[1]
    key, value = (np.repeat(x.astype("float64"), group, axis=1) for x in (key, value))
    scores = np.einsum("bhqd,bhkd->bhqk", query, key) / np.sqrt(query.shape[-1])
    distance = np.arange(query.shape[2])[:, None] - np.arange(query.shape[2])
    seen = np.broadcast_to(distance >= 0, scores.shape).copy()
    if window:
        seen &= distance < window
    if ids is not None:
        seen &= (ids[:, :, None] == ids[:, None])[:, None]
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bhkd->bhqd", weights / weights.sum(-1, keepdims=True), value)


def gradients(function, *arrays):
    """Gradients of a fixed weighted sum of `function(*arrays)`."""
    probe = np.random.default_rng(9).normal(size=arrays[0].shape).astype("float32")
    if keras.backend.backend() == "jax":
        import jax

        total = lambda *a: (function(*a) * probe).sum()  # noqa: E731
        return [np.asarray(g) for g in jax.grad(total, argnums=(0, 1, 2))(*arrays)]
    import tensorflow as tf

    tensors = [tf.constant(a) for a in arrays]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        total = tf.reduce_sum(function(*tensors) * probe)
    return [g.numpy() for g in tape.gradient(total, tensors)]


CASES = [
    {},
    {"kv_heads": 2},
    {"kv_heads": 1, "segments": True},
    {"segments": True, "window": 40},
    {"window": 100},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_give_the_values_and_gradients_of_the_formula(case):
    case = dict(case)
    window = case.pop("window", 0)
    query, key, value, ids = inputs(**case)
    scale = np.float32(query.shape[-1] ** -0.5)

    def chunked(query, key, value):
        return attention.attend_in_chunks(query * scale, key, value, ids, window, chunks=4)

    def plain(query, key, value):
        seen = attention.visible(0, SEQ, 0, SEQ, ids, window)
        return attention.attend_where(query * scale, key, value, seen)

    expected = by_hand(query, key, value, ids, window)
    for function in (chunked, plain):
        got = ops.convert_to_numpy(function(query, key, value))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    # The plain one is differentiated by the engine, the chunked one by our own rule.
    for ours, theirs in zip(
        gradients(chunked, query, key, value), gradients(plain, query, key, value), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("case", CASES[:1] + CASES[2:4], ids=str)
def test_the_tpu_kernel_computes_the_same(engine, case):
    if engine != "jax":
        pytest.skip("the kernel is JAX's")
    from colabtpu.models import splash

    case = dict(case)
    window = case.pop("window", 0)
    query, key, value, ids = inputs(head_dim=128, batch=1, heads=4, **case)
    scale = np.float32(128**-0.5)

    def kernel(query, key, value):
        return splash.attend(query * scale, key, value, ids, window, interpret=True)

    def plain(query, key, value):
        seen = attention.visible(0, SEQ, 0, SEQ, ids, window)
        return attention.attend_where(query * scale, key, value, seen)

    expected = by_hand(query, key, value, ids, window)
    np.testing.assert_allclose(kernel(query, key, value), expected, rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(
        gradients(kernel, query, key, value), gradients(plain, query, key, value), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-2, atol=1e-3)


def test_the_tpu_kernel_runs_on_each_device_of_a_distribution(engine):
    if engine != "jax":
        pytest.skip("the kernel is JAX's")
    from colabtpu.models import splash

    query, key, value, ids = inputs(batch=4, heads=2, kv_heads=1, seq=128, segments=True)
    expected = by_hand(query, key, value, ids)
    mesh = keras.distribution.DeviceMesh(
        (4,), ["batch"], devices=keras.distribution.list_devices()[:4]
    )
    with keras.distribution.DataParallel(mesh).scope():
        got = splash.attend(query * query.shape[-1] ** -0.5, key, value, ids, interpret=True)
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


def test_bfloat16_stays_within_its_precision():
    query, key, value, _ = inputs()
    expected = by_hand(query, key, value, None)
    half = [ops.cast(x, "bfloat16") for x in (query * 0.25, key, value)]
    got = ops.convert_to_numpy(ops.cast(attention.attend_in_chunks(*half, chunks=4), "float32"))
    assert np.abs(got - expected).max() < 0.03  # values are of size one; bfloat16 has 8 bits


def test_the_choice_and_its_reason_follow_device_engine_and_shape(engine):
    assert attention.choose(128).kind == "plain"
    assert attention.choose(1024).kind == "chunked"
    assert "CPU" in attention.choose(1024).reason
    with attention.target_device("tpu"):
        choice = attention.choose(1024)
        if engine == "jax":
            assert choice.kind == "splash"
            assert attention.choose(1000).kind == "chunked"
            assert "1000" in attention.choose(1000).reason
        else:
            assert choice.kind == "chunked"
            assert "TensorFlow" in choice.reason
    assert attention.device_kind() == "cpu"


def test_no_score_of_a_whole_row_is_held(engine):
    seq = 1024
    shape = (1, 2, seq, 16)
    if engine == "jax":
        import jax

        total = lambda q, k, v: attention.attend(q, k, v).sum()  # noqa: E731
        x = jax.ShapeDtypeStruct(shape, "float32")
        program = jax.jit(jax.grad(total)).lower(x, x, x).as_text()
        assert f"x{seq}x{seq}x" not in program
        assert f"x256x{seq}x" in program
    else:
        import tensorflow as tf

        @tf.function(jit_compile=True)
        def gradient(query, key, value):
            with tf.GradientTape() as tape:
                tape.watch(query)
                total = tf.reduce_sum(attention.attend(query, key, value))
            return tape.gradient(total, query)

        x = tf.zeros(shape)
        program = gradient.experimental_get_compiler_ir(x, x, x)(stage="hlo")
        assert f",{seq},{seq}]" not in program
        assert f",256,{seq}]" in program
