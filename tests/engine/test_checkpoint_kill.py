"""Kill training at random moments, run it again each time: the end must be the same.

Each run is a process of its own. So that twenty of them are quick, they are forks of one
that has imported Keras and run nothing yet: `python test_checkpoint_kill.py` is that one.
"""

import contextlib
import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

EXAMPLES, BATCH, FEATURES, EPOCHS = 101, 8, 6, 4
STEPS = EPOCHS * (EXAMPLES // BATCH)


class Numbered:
    """Examples that know their numbers: the last feature of row i is i."""

    seq_len, path, weighted = FEATURES, Path(), False
    num_tokens, num_bytes, padding_share, lengths = EXAMPLES, EXAMPLES, 0.0, None
    identity = {"corpus": "numbers", "rows": EXAMPLES}  # noqa: RUF012

    def __len__(self):
        return EXAMPLES

    def fetch(self, numbers):
        grid = np.sin(np.outer(numbers + 1, np.arange(1, FEATURES + 1))).astype(np.float32)
        x = np.concatenate([grid, numbers[:, None].astype(np.float32)], axis=1)
        return x, grid.sum(axis=1, keepdims=True).clip(0, 1), None


def build():
    """A model with dropout, a schedule, and a count of how often it saw each example."""
    import keras
    from keras import ops

    class Seen(keras.layers.Layer):
        def build(self, shape):
            self.seen = self.add_weight(shape=(EXAMPLES,), initializer="zeros", trainable=False)

        def call(self, x, training=False):
            if training:
                numbers = ops.cast(x[:, -1], "int32")
                self.seen.assign(self.seen + ops.sum(ops.one_hot(numbers, EXAMPLES), axis=0))
            return x[:, :-1]

    keras.utils.set_random_seed(5)
    parts = [Seen(), keras.layers.Dense(16, "tanh"), keras.layers.Dropout(0.3)]
    model = keras.Sequential([keras.Input((FEATURES + 1,)), *parts, keras.layers.Dense(1)])
    schedule = keras.optimizers.schedules.CosineDecay(0.02, STEPS)
    model.compile(keras.optimizers.AdamW(schedule), "mse", metrics=["mae"])
    return model


def train(directory, begun):
    """One session: builds everything anew, as a notebook run from the top does."""
    import keras

    from colabtpu import checkpoint
    from colabtpu.data import Batches

    class Begun(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            os.write(begun, b"x")

    batches = Batches(Numbered(), BATCH, seed=9)
    model = build()
    saver = checkpoint.resume(directory, batches, every_steps=3, every_minutes=None, best="loss")
    log = []
    keep = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: log.append([epoch, logs["loss"], logs["mae"]])
    )
    model.fit(batches, epochs=EPOCHS, verbose=0, callbacks=[saver, keep, Begun()])
    arrays = checkpoint.Store(directory).newest_whole(saver.run)[0].arrays()
    np.savez(Path(directory) / "end.npz", **arrays)
    (Path(directory) / "end.json").write_text(json.dumps([log, saver.messages]))


def serve():
    """For each line (directory, seconds until the kill or null) runs a session in a fork."""
    import keras  # noqa: F401

    import colabtpu.checkpoint.resuming
    import colabtpu.data.batches  # noqa: F401

    with contextlib.suppress(ImportError):
        import tensorflow  # noqa: F401  # `set_random_seed` imports it where it is installed

    for line in sys.stdin:
        directory, seconds = json.loads(line)
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            faulthandler.dump_traceback_later(240, exit=True)  # a hang fails, with its stack
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            train(directory, writes)
            os._exit(0)
        os.close(writes)
        os.read(reads, 1)  # until training begins, or the child is gone
        os.close(reads)
        start = time.monotonic()
        timer = threading.Timer(seconds or 0, os.kill, (child, signal.SIGKILL))
        if seconds is not None:
            timer.start()
        _, status = os.waitpid(child, 0)
        timer.cancel()
        if seconds is not None:
            timer.join()  # a fork must not find a thread halfway
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        print(json.dumps([code, time.monotonic() - start]), flush=True)


class Sessions:
    """Runs sessions one after the other."""

    def __init__(self, engine, cache):
        root = str(Path(__file__).parents[2])
        # One device: what is compared is bit for bit.
        environment = {**os.environ, "KERAS_BACKEND": engine, "PYTHONPATH": root, "XLA_FLAGS": ""}
        # JAX's compiled step is the same in every session: compile it once.
        environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, directory, seconds=None):
        directory.mkdir(exist_ok=True)
        self._process.stdin.write(json.dumps([str(directory), seconds]) + "\n")
        self._process.stdin.flush()
        status, self.seconds = json.loads(self._process.stdout.readline())
        return status

    def close(self):
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def sessions(engine, tmp_path_factory):
    running = Sessions(engine, tmp_path_factory.mktemp("compiled"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def uninterrupted(sessions, tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    assert sessions.run(directory) == 0
    return directory


def result(directory):
    log, messages = json.loads((directory / "end.json").read_text())
    return dict(np.load(directory / "end.npz")), log, messages


def check_kills(sessions, uninterrupted, directory, kills, seed):
    pick = random.Random(seed)
    killed = 0
    assert sessions.run(directory.with_name("timing")) == 0
    whole = sessions.seconds  # from compiling to the last checkpoint
    while killed < kills:
        status = sessions.run(directory, pick.random() * whole)
        assert status in (0, -signal.SIGKILL)
        killed += status != 0
        if status == 0:  # it got through: kill another run, in another directory
            check_same(uninterrupted, directory)
            directory = directory.with_name(f"{directory.name}-again")
    assert sessions.run(directory) == 0
    check_same(uninterrupted, directory)


def check_same(uninterrupted, directory):
    expected, expected_log, _ = result(uninterrupted)
    found, log, _ = result(directory)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    # The last session's epochs, whose means begin before it did: to the bit as well.
    assert log == expected_log[len(expected_log) - len(log) :]


def test_uninterrupted_run_sees_every_example_as_often(uninterrupted):
    arrays, log, _ = result(uninterrupted)
    seen = next(a for a in arrays.values() if a.shape == (EXAMPLES,))
    assert seen.sum() == STEPS * BATCH
    assert set(seen.tolist()) <= {STEPS * BATCH // EXAMPLES, STEPS * BATCH // EXAMPLES + 1}
    assert len(log) == EPOCHS


def test_killed_runs_end_like_the_uninterrupted_one(sessions, uninterrupted, tmp_path):
    check_kills(sessions, uninterrupted, tmp_path / "run", kills=5, seed=0)


@pytest.mark.slow
def test_a_hundred_kills_leave_no_trace(sessions, uninterrupted, tmp_path):
    check_kills(sessions, uninterrupted, tmp_path / "run", kills=100, seed=1)


if __name__ == "__main__":
    serve()
