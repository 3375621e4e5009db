"""Checkpoints on disk: whole or ignored, the newest sound one found, the right ones kept."""

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from colabtpu.checkpoint import Ledger, Store, tensors
from colabtpu.errors import ColabTPUError


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "checkpoints", fallback=tmp_path / "local")


@pytest.fixture
def run(store):
    return store.new_run()


def arrays(value=0):
    return {"model/0": np.full((100, 7), value, np.float32), "random/python": np.arange(3)}


def commit(store, run, *steps):
    token = store.claim(run)
    return [store.commit(run, step, arrays(step), {"token": token}) for step in steps]


def newest(store, run):
    found, _ = store.newest_whole(run)
    return found.step if found else None


def test_arrays_come_back_as_they_were(tmp_path):
    every = {
        "scalar": np.float32(3).reshape(()),
        "half": np.array([1.5, -2], ml_dtypes.bfloat16),
        "empty": np.zeros((0, 4), np.int64),
        "transposed": np.arange(6, dtype=np.uint32).reshape(2, 3).T,
        "flags": np.array([True, False]),
    }
    path = tmp_path / "state.safetensors"
    with path.open("wb") as file:
        digest = tensors.write(file, every)
    assert tensors.checksum(path) == digest
    found = tensors.read(path)
    for name, array in every.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_the_safetensors_package_reads_the_file(tmp_path):
    numpy_api = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "state.safetensors"
    with path.open("wb") as file:
        tensors.write(file, arrays(4))
    for name, array in numpy_api.load_file(path).items():
        np.testing.assert_array_equal(array, arrays(4)[name])


def test_newest_checkpoint_is_found(store, run):
    commit(store, run, 10, 20, 30)
    found, damaged = store.newest_whole(run)
    assert (found.step, damaged) == (30, [])
    np.testing.assert_array_equal(found.arrays()["model/0"], arrays(30)["model/0"])


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["state.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", [truncate, flip, os.remove])
def test_damaged_checkpoint_is_named_and_the_one_before_is_used(store, run, file, damage):
    *_, last = commit(store, run, 10, 20)
    damage(last.path / file)
    found, damaged = store.newest_whole(run)
    assert found.step == 10
    if (damage, file) != (os.remove, "manifest.json"):  # that one was never committed
        assert [folder for folder, _ in damaged] == [last.path]
        store.set_aside(last.path)
        assert store.newest_whole(run)[1] == []


def test_every_checkpoint_damaged_leaves_none(store, run):
    for each in commit(store, run, 10, 20):
        flip(each.path / "state.safetensors")
    found, damaged = store.newest_whole(run)
    assert found is None
    assert len(damaged) == 2


def test_last_ones_and_the_best_are_kept(store, run):
    commit(store, run, 10, 20, 30, 40)
    store.prune(run, keep=2, best=10)
    assert [each.step for each in store.whole(run)[0]] == [10, 30, 40]
    store.prune(run, keep=1, best=None)
    assert [each.step for each in store.whole(run)[0]] == [40]


def test_torn_checkpoint_is_swept_when_a_newer_one_is_whole(store, run):
    commit(store, run, 10)
    torn = store.directory / run / "step-00000005"
    torn.mkdir()
    store.prune(run, keep=1, best=None)
    assert not torn.exists()


def test_runs_are_numbered_and_never_deleted(store):
    first = store.new_run()
    commit(store, first, 10)
    second = store.new_run()
    assert (first, second) == ("run-0001", "run-0002")
    assert store.newest_run() == second
    assert newest(store, first) == 10


def test_disk_that_is_full_leaves_the_last_whole_checkpoint(store, run, tmp_path):
    token = store.claim(run)
    store.commit(run, 10, arrays(), {"token": token})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            store.commit(run, 20, arrays(), {"token": token})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert newest(store, run) == 10
    assert not (store.directory / run / "step-00000020").exists()  # no room is left taken


def test_directory_that_vanished_is_not_made_anew_and_the_local_one_serves(store, run):
    token = store.claim(run)
    store.commit(run, 10, arrays(10), {"token": token})
    away = store.directory.rename(store.directory.with_name("unmounted"))
    made = store.commit(run, 20, arrays(20), {"token": token})
    assert made.path.is_relative_to(store.fallback)
    assert not store.directory.exists()  # a folder below a mount point would hide there
    away.rename(store.directory)
    assert newest(store, run) == 20
    assert store.commit(run, 30, arrays(), {"token": token}).path.is_relative_to(store.directory)


def test_run_that_a_live_process_writes_is_refused(store, run):
    code = "import sys; from colabtpu.checkpoint import Store; s = Store(sys.argv[1]);"
    code += "s.claim(sys.argv[2]); print('claimed', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, str(store.directory), run]
    root = str(Path(__file__).parents[1])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": root}, **pipes) as other:
        other.stdout.readline()
        with pytest.raises(ColabTPUError, match=f"process {other.pid}"):
            store.claim(run)
        other.stdin.close()
    store.claim(run)  # it has ended


def test_run_taken_over_from_another_machine_stops_the_one_before(store, run):
    token = store.claim(run)
    about = store.directory / run / "run.json"
    theirs = {"token": "other", "host": f"not-{socket.gethostname()}", "pid": 1, "started": "1"}
    about.write_text(json.dumps(theirs))
    with pytest.raises(ColabTPUError, match="taken over"):
        store.commit(run, 10, arrays(), {"token": token})
    store.commit(run, 20, arrays(), {"token": store.claim(run)})
    assert newest(store, run) == 20


def test_paths_of_epath_work_like_local_ones(tmp_path):
    epath = pytest.importorskip("etils.epath")
    store = Store(tmp_path / "bucket", fallback=tmp_path / "local")
    store.directory = epath.Path(tmp_path / "bucket")  # as for gs://, but on this disk
    run = store.new_run()
    commit(store, run, 10, 20, 30)
    store.prune(run, keep=1, best=None)
    assert [each.step for each in store.whole(run)[0]] == [30]
    assert newest(store, run) == 30


def test_ledger_adds_up_over_sessions(tmp_path):
    for seconds in (60, 30):
        ledger = Ledger(tmp_path / "ledger.json")
        ledger.add("train", seconds)
        ledger.add("lost", 10)
        ledger.save()
    assert Ledger(tmp_path / "ledger.json").seconds["train"] == 90
    printed = str(Ledger(tmp_path / "ledger.json"))
    assert "0:01:30  81.8%" in printed
    assert "0:01:50" in printed
