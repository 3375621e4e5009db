"""Event files, read back with tensorboard's own reader."""

import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from colabtpu import InvalidArgumentError
from colabtpu.monitor import EventWriter

# The reader would import TensorFlow where it is installed; tests here import no framework.
sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]
    }


def test_scalars_come_back_as_written(tmp_path):
    writer = EventWriter(tmp_path)
    for step in range(1, 4):
        writer.scalars(step, {"loss": step / 4, "accuracy": step / 8})
    writer.close()
    assert scalars(tmp_path) == {
        "loss": [(1, 0.25), (2, 0.5), (3, 0.75)],
        "accuracy": [(1, 0.125), (2, 0.25), (3, 0.375)],
    }


def test_closing_twice_is_closing_once(tmp_path):
    writer = EventWriter(tmp_path)
    writer.scalars(1, {"loss": 1.0})
    writer.close()
    writer.close()
    assert scalars(tmp_path) == {"loss": [(1, 1.0)]}


def test_resumed_run_replaces_the_steps_it_repeats(tmp_path):
    first = EventWriter(tmp_path, start_step=0)
    for step in (1, 2, 3, 4):
        first.scalars(step, {"loss": float(step)})
    first.close()
    # Interrupted after step 4, while the last checkpoint was that of step 2.
    second = EventWriter(tmp_path, start_step=2)
    for step in (3, 4, 5):
        second.scalars(step, {"loss": 10.0 * step})
    second.close()
    assert scalars(tmp_path)["loss"] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]


def test_vanished_folder_costs_events_and_is_said_then_writing_goes_on(tmp_path):
    said: list[str] = []
    folder = tmp_path / "run"
    writer = EventWriter(folder, say=said.append)
    writer.scalars(1, {"loss": 1.0})
    assert writer.flush()
    shutil.rmtree(folder)
    writer.scalars(2, {"loss": 2.0})
    assert not writer.flush()
    writer.scalars(3, {"loss": 3.0})
    assert writer.flush()
    writer.close()
    assert scalars(folder) == {"loss": [(3, 3.0)]}
    assert writer.lost_events == 1
    assert [line.split(":")[0] for line in said] == ["Event files", "Event files"]
    assert "deleted" in said[0]
    assert "works again" in said[1]


def test_folder_that_cannot_be_made_never_raises(tmp_path):
    said: list[str] = []
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    writer = EventWriter(blocked / "run", say=said.append)
    for step in range(100):
        writer.scalars(step, {"loss": 1.0})
    assert not writer.flush()
    writer.close()
    assert writer.lost_events >= 100
    assert len(said) == 1, "said once, not a hundred times"


def test_full_disk_never_raises_and_what_fitted_stays_readable(tmp_path):
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))   # a write beyond it fails
from colabtpu.monitor import EventWriter
writer = EventWriter({str(tmp_path)!r})
for step in range(1, 31):
    writer.scalars(step, {{"loss": 1.0}})
    writer.flush()
for step in range(31, 2001):
    writer.scalars(step, {{"loss": 1.0}})
writer.flush()
writer.close()
print("training went on, lost:", writer.lost_events > 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cannot write" in done.stdout
    assert done.stdout.endswith("training went on, lost: True\n")
    assert scalars(tmp_path)["loss"][:30] == [(step, 1.0) for step in range(1, 31)]


def test_url_is_refused_with_the_way_out():
    with pytest.raises(InvalidArgumentError, match=r"gs://bucket/logs[^$]*gsutil rsync"):
        EventWriter("gs://bucket/logs")


def test_missing_tensorboard_package_is_named(tmp_path):
    program = """
import sys
sys.modules["tensorboard"] = None     # as if it were not installed
from colabtpu.monitor import EventWriter
try:
    EventWriter("unused")
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path.cwd()
    )
    assert "ColabTPUError" in done.stdout, done.stderr
    assert "pip install tensorboard" in done.stdout


def test_writer_imports_no_framework(tmp_path):
    program = f"""
import sys
from colabtpu.monitor import EventWriter
writer = EventWriter({str(tmp_path)!r})
writer.scalars(1, {{"loss": 1.0}})
writer.close()
print(sorted({{"tensorflow", "jax", "keras"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
