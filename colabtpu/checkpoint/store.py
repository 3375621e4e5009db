"""Checkpoints on disk: whole or absent, the last few and the best, a number for each run.

    store = Store("checkpoints")
    run = store.newest_run()
    found, damaged = store.newest_whole(run)          # the newest checkpoint that is intact

    checkpoints/run-0003/run.json                     # who writes it
    checkpoints/run-0003/step-00001240/state.safetensors
    checkpoints/run-0003/step-00001240/manifest.json  # written last, with the checksums

A step without a readable manifest whose checksums hold does not exist. That needs no rename of
folders, so it holds on Google Drive and on gs:// as well. Imports no ML framework.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from colabtpu.checkpoint import tensors
from colabtpu.data.storage import cache_dir, write_atomically
from colabtpu.errors import ColabTPUError

FORMAT_VERSION = 1
STATE, MANIFEST, RUN = "state.safetensors", "manifest.json", "run.json"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: where it lies, and what its manifest says.

    Attributes:
        path: its folder.
        step: batches trained since the run's start.
        manifest: position, identity, checksums: what `Store.commit` was given.
    """

    path: Path
    step: int
    manifest: dict[str, Any] = field(repr=False)

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns its arrays."""
        return tensors.read(self.path / STATE)


class Store:
    """A directory of runs, with a local one beside it for when it cannot be written.

    Args:
        directory: a local folder, a mounted Google Drive or a gs:// address.
        fallback: the local folder to write to instead; one in the cache folder if absent.
    """

    def __init__(self, directory: str | Path, fallback: str | Path | None = None) -> None:
        self.directory = _path(directory)
        name = hashlib.sha256(str(self.directory).encode()).hexdigest()[:16]
        self.fallback = Path(fallback) if fallback else cache_dir() / "checkpoints" / name

    def runs(self) -> list[str]:
        """Returns the names of the runs, oldest first."""
        found = {each.name for root in self._roots() for each in _children(root, "run-")}
        return sorted(found)

    def newest_run(self) -> str | None:
        """Returns the name of the newest run, None where there is none."""
        return self.runs()[-1] if self.runs() else None

    def new_run(self) -> str:
        """Begins a run, and returns its name; the others stay as they are."""
        runs = self.runs()
        name = f"run-{int(runs[-1][4:]) + 1 if runs else 1:04}"
        (self.directory / name).mkdir(parents=True, exist_ok=True)
        return name

    def claim(self, run: str) -> str:
        """Makes this process the one that writes a run; returns the proof.

        Another live process on this machine keeps it. One on another machine cannot be asked
        (after a disconnect there is none): it loses the run, and is told at its next save.
        """
        about = _read_json(self.directory / run / RUN)
        if about and about["host"] == socket.gethostname() and _alive(about):
            raise ColabTPUError(
                f"{run} in {self.directory} is being written by process {about['pid']}, "
                "which is alive.",
                "Stop that one, or pass another directory, or new_run=True.",
            )
        token = uuid.uuid4().hex
        mine = {"token": token, "host": socket.gethostname(), "pid": os.getpid()}
        mine["started"] = _started(os.getpid())
        (self.directory / run).mkdir(parents=True, exist_ok=True)
        _write(self.directory / run / RUN, json.dumps(mine).encode())
        return token

    def commit(
        self, run: str, step: int, arrays: dict[str, np.ndarray], manifest: dict[str, Any]
    ) -> Checkpoint:
        """Writes a checkpoint, the manifest last.

        Args:
            run: its run.
            step: batches trained.
            arrays: by name.
            manifest: what else to keep, as JSON takes it; "token" must be the proof of `claim`.

        Returns:
            The checkpoint, in the directory, or in the local fallback if it could not be
            written there: its path says where.

        Raises:
            OSError: neither place can be written.
            ColabTPUError: another process has taken the run over.
        """
        try:
            self._check_owner(run, manifest["token"])
            return self._commit(self.directory, run, step, arrays, manifest)
        except OSError as error:
            if self.fallback == self.directory:
                raise
            try:
                return self._commit(self.fallback, run, step, arrays, manifest)
            except OSError:
                raise error from None

    def whole(self, run: str) -> tuple[list[Checkpoint], list[tuple[Any, str]]]:
        """Returns the run's checkpoints with sound manifests, oldest first, and what is wrong
        with the others. Their states are not read."""
        sound: dict[int, Checkpoint] = {}
        wrong: list[tuple[Any, str]] = []
        for root in self._roots():
            for folder in _children(root / run, "step-"):
                manifest = _sound_manifest(folder)
                if manifest is not None:
                    step = int(folder.name[5:])
                    sound.setdefault(step, Checkpoint(folder, step, manifest))
                elif (folder / MANIFEST).exists():
                    wrong.append((folder, "the checksum of its manifest does not hold"))
        return [sound[step] for step in sorted(sound)], wrong

    def newest_whole(self, run: str) -> tuple[Checkpoint | None, list[tuple[Any, str]]]:
        """Returns the newest checkpoint whose checksums hold; and folders that are damaged, each
        with what is wrong."""
        sound, wrong = self.whole(run)
        for checkpoint in reversed(sound):
            damage = _damage(checkpoint)
            if damage is None:
                return checkpoint, wrong
            wrong.append((checkpoint.path, damage))
        return None, wrong

    def set_aside(self, folder: Any) -> None:
        """Renames a damaged checkpoint, so that it neither counts nor is lost."""
        with contextlib.suppress(OSError):
            folder.rename(folder.with_name(f"damaged-{folder.name}-{uuid.uuid4().hex[:4]}"))

    def prune(self, run: str, keep: int, best: int | None) -> None:
        """Removes all but the last `keep` checkpoints and the best, and torn ones before them."""
        sound, _ = self.whole(run)
        kept = {checkpoint.step for checkpoint in sound[-keep:]} | {best}
        newest = sound[-1].step if sound else 0
        for root in self._roots():
            for folder in _children(root / run, "step-"):
                step = int(folder.name[5:])
                torn = not (folder / MANIFEST).exists() and step < newest
                if torn or (step not in kept and any(c.path == folder for c in sound)):
                    _remove(folder)

    def _roots(self) -> list[Any]:
        return [self.directory, self.fallback]

    def _check_owner(self, run: str, token: str) -> None:
        # Absent: the directory has vanished, as an unmounted Drive does. Making it anew would
        # write below the mount point, where the next mount hides it.
        if not (self.directory / run / RUN).exists():
            raise OSError(f"{self.directory / run} is gone")
        about = _read_json(self.directory / run / RUN)
        if about and about["token"] != token:
            raise ColabTPUError(
                f"Process {about['pid']} on {about['host']} has taken over {run} in "
                f"{self.directory}; this one stops writing to it.",
                "Let only one notebook train in a directory; give the other a new_run=True.",
            )

    def _commit(
        self,
        root: Any,
        run: str,
        step: int,
        arrays: dict[str, np.ndarray],
        manifest: dict[str, Any],
    ) -> Checkpoint:
        folder = root / run / f"step-{step:08}"
        if root == self.directory:
            folder.mkdir(exist_ok=True)
        else:
            folder.mkdir(parents=True, exist_ok=True)
        try:
            (folder / MANIFEST).unlink(missing_ok=True)
            with (folder / STATE).open("wb") as file:
                checksum = tensors.write(file, arrays)
                file.flush()
                if isinstance(folder, Path):
                    os.fsync(file.fileno())
            whole = {**manifest, "format": FORMAT_VERSION, "step": step, "sha256": checksum}
            _write(folder / MANIFEST, _signed(whole))
        except OSError:
            _remove(folder)  # half a checkpoint takes the room that a whole one needs
            raise
        return Checkpoint(folder, step, whole)


def _path(directory: str | Path) -> Any:
    if "://" not in str(directory):
        return Path(directory).expanduser().absolute()
    try:
        from etils import epath
    except ImportError as error:
        raise ColabTPUError(
            f"{directory} needs etils to be reached, which is not installed.",
            "pip install 'etils[epath-gcs]', or pass a local folder.",
        ) from error
    return epath.Path(directory)


def _children(folder: Any, prefix: str) -> list[Any]:
    try:
        return sorted(each for each in folder.iterdir() if each.name.startswith(prefix))
    except OSError:
        return []


def _write(path: Any, content: bytes) -> None:
    if isinstance(path, Path):
        write_atomically(path, content)
    else:  # an object of a bucket appears whole or not at all
        path.write_bytes(content)


def _remove(folder: Any) -> None:
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        folder.rmtree(missing_ok=True)


def _signed(manifest: dict[str, Any]) -> bytes:
    body = json.dumps(manifest, sort_keys=True)
    return json.dumps({"manifest": manifest, "sha256": _digest(body)}, sort_keys=True).encode()


def _sound_manifest(folder: Any) -> dict[str, Any] | None:
    about = _read_json(folder / MANIFEST)
    if not isinstance(about, dict) or "manifest" not in about:
        return None
    body = json.dumps(about["manifest"], sort_keys=True)
    return about["manifest"] if _digest(body) == about.get("sha256") else None


def _damage(checkpoint: Checkpoint) -> str | None:
    path = checkpoint.path / STATE
    try:
        found = tensors.checksum(path)
    except OSError as error:
        return f"{STATE} cannot be read ({error.strerror or error})"
    wanted = checkpoint.manifest["sha256"]
    return None if found == wanted else f"the checksum of {STATE} does not hold"


def _read_json(path: Any) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _alive(about: dict[str, Any]) -> bool:
    """Whether that process still runs, and is another than this one."""
    pid = about["pid"]
    return pid != os.getpid() and about["started"] is not None and _started(pid) == about["started"]


def _started(pid: int) -> str | None:
    """When a process began, in ticks since the machine did; None where it cannot be known."""
    try:
        # The name of a program, in parentheses, may itself hold spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
