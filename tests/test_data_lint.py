"""The input lint: each trap named with what was seen, and silence where all is well."""

import numpy as np
import pytest

from colabtpu.data import lint


def codes(findings):
    return [finding.code for finding in findings]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data.txt").write_text("text " * 100)
    return tmp_path


def test_plain_folder_has_nothing_to_say(folder):
    mounts = folder / "mounts"
    mounts.write_text("/dev/sda1 / ext4 rw 0 0\n")
    assert lint(folder, mounts=mounts) == []


def test_drive_is_found_through_the_mount_that_holds_the_path(folder):
    mounts = folder / "mounts"
    place = str(folder).replace(" ", "\\040")
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\ndrive {place} fuse.drive rw 0 0\n")
    (finding,) = lint(folder / "data.txt", mounts=mounts)
    assert finding.code == "drive-fuse"
    assert "fuse.drive" in finding.what
    assert "cp -r" in finding.fix


def test_local_disk_below_a_drive_mount_is_fine(folder):
    (folder / "local").mkdir()
    mounts = folder / "mounts"
    mounts.write_text(f"drive {folder} fuse rw 0 0\n/dev/sdb {folder}/local ext4 rw 0 0\n")
    assert lint(folder / "local", mounts=mounts) == []


def test_many_tiny_files_are_counted(folder):
    for i in range(1200):
        (folder / f"{i}.txt").write_text("x")
    (finding,) = lint(folder, mounts=folder / "none")
    assert finding.code == "tiny-files"
    assert "1,201 files" in finding.what


def test_data_larger_than_memory_is_found(folder):
    assert codes(lint(folder, mounts=folder / "none", memory_bytes=400)) == ["larger-than-memory"]
    assert lint(folder, mounts=folder / "none", memory_bytes=600) == []


def test_shapes_that_change_are_listed():
    batches = [(np.zeros((8, 16)), np.zeros(8)), (np.zeros((3, 16)), np.zeros(3))]
    (finding,) = lint(batches)
    assert finding.code == "changing-shapes"
    assert "(3, 16)" in finding.what
    assert lint(batches[:1] * 3) == []


def test_shapes_of_dictionaries_are_looked_at_too():
    batches = [{"x": np.zeros((8, n))} for n in (4, 5)]
    assert codes(lint(batches)) == ["changing-shapes"]
