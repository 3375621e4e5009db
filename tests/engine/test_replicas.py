"""One device, eight devices, the other engine: the same training, step for step.

The model is a small causal transformer in float32; data, initial weights and global batch are
the same everywhere, so the loss curves must agree within float tolerance.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colabtpu import environment as surroundings
from colabtpu.connection import Connection, Wish, open_connection

VOCABULARY, LENGTH, WIDTH, BATCH, STEPS = 17, 8, 16, 16, 6
# Eight partial sums instead of one reorder float32 additions; the curves drift apart by rounding.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _distribution_is_put_back(engine: str) -> Any:
    import keras

    before = keras.distribution.distribution()
    yield
    keras.distribution.set_distribution(before)


def _connect(engine: str, devices: int) -> Connection:
    return open_connection(Wish(engine, devices), surroundings.detect())


def transformer() -> Any:
    """Tied embeddings: their gradient is dense.

    An untied one gets a sparse gradient on TensorFlow, whose repeated rows Keras 3.15 squares
    before it adds them up, so Adam's second moment differs from JAX's.
    """
    import keras
    from keras import layers

    class Logits(layers.Layer):
        def __init__(self, embedding: Any) -> None:
            super().__init__(name="logits")
            self.embedding = embedding

        def call(self, x: Any) -> Any:
            return keras.ops.matmul(x, keras.ops.transpose(self.embedding.embeddings))

    ids = keras.Input((LENGTH,), dtype="int32")
    embedding = layers.Embedding(VOCABULARY, WIDTH, name="embedding")
    x = embedding(ids)
    y = layers.LayerNormalization(name="norm")(x)
    y = layers.MultiHeadAttention(2, WIDTH // 2, use_bias=False, name="attention")(
        y, y, use_causal_mask=True
    )
    y = layers.Dense(WIDTH, activation="gelu", name="dense")(x + y)
    return keras.Model(ids, Logits(embedding)(y))


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, VOCABULARY, (BATCH * STEPS, LENGTH + 1), dtype=np.int32)
    return rows[:, :-1], rows[:, 1:]


def initial_weights() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.normal(0, 0.3, w.shape).astype("float32") for w in transformer().weights]


def curve(connection: Connection, optimizer: str, weights: list[np.ndarray]) -> np.ndarray:
    """Trains for two passes over the data and returns the loss of every step."""
    import keras

    means: list[dict[str, Any]] = []
    with connection.scope():
        model = transformer()
        model.set_weights(weights)
        model.compile(
            {
                "sgd": lambda: keras.optimizers.SGD(1.0),
                "adamw": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.01),
            }[optimizer](),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    model.fit(
        *data(),
        batch_size=BATCH,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: means.append(logs))
        ],
    )
    # Keras logs the mean since the epoch began: differences of the sums give each step's loss.
    sums = np.array([float(logs["loss"]) for logs in means]).reshape(2, STEPS)
    sums *= np.arange(1, STEPS + 1)
    return np.diff(sums, axis=1, prepend=0).ravel()


# SGD would show a gradient that is scaled wrongly, to which AdamW is blind.
@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
def test_eight_devices_learn_what_one_learns(engine: str, optimizer: str) -> None:
    weights = initial_weights()
    one = curve(_connect(engine, 1), optimizer, weights)
    eight = curve(_connect(engine, 8), optimizer, weights)
    np.testing.assert_allclose(eight, one, **TOLERANCE)
    # The same batches a second time: a curve that stood still would agree with itself too.
    assert sum(one[STEPS:]) < sum(one[:STEPS]) - 0.1


def test_the_batch_is_really_split(engine: str) -> None:
    import keras

    connection = _connect(engine, 8)
    with connection.scope():
        model = transformer()
    variable = model.get_layer("dense").kernel
    if engine == "tensorflow":
        assert len(variable.value.values) == 8
        seen = connection.strategy.run(lambda: keras.ops.zeros((2,)))
        assert len(connection.strategy.experimental_local_results(seen)) == 8
    else:
        assert len(variable.value.sharding.device_set) == 8
        assert connection.mesh.shape == {"batch": 8}


@pytest.mark.skipif(os.environ.get("ENGINE") == "jax", reason="one of the two runs compares both")
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
def test_both_engines_learn_the_same(engine: str, tmp_path: Path, optimizer: str) -> None:
    weights = initial_weights()
    np.savez(tmp_path / "weights.npz", *weights)
    other = subprocess.run(
        [sys.executable, __file__, str(tmp_path), optimizer],
        env={**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert other.returncode == 0, other.stderr[-3000:]
    ours = curve(_connect(engine, 1), optimizer, weights)
    np.testing.assert_allclose(np.load(tmp_path / "curve.npy"), ours, **TOLERANCE)


if __name__ == "__main__":
    folder, name = Path(sys.argv[1]), sys.argv[2]
    stored = np.load(folder / "weights.npz")
    np.save(folder / "curve.npy", curve(_connect("jax", 1), name, list(stored.values())))
