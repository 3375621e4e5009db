"""Results kept on disk, one small JSON file each, so that no program is compiled twice.

They lie in `$COLABTPU_CACHE/preflight`, else in `~/.cache/colabtpu/preflight`. Deleting the
folder is always safe. The newest 500 are kept.
"""

import json
import os
from pathlib import Path
from typing import Any

FORMAT = 1  # raise it when what is stored, or how it is found, changes its meaning
KEPT = 500


def folder() -> Path:
    """Returns where results are kept."""
    root = os.environ.get("COLABTPU_CACHE") or Path.home() / ".cache" / "colabtpu"
    return Path(root) / "preflight" / f"v{FORMAT}"


def read(key: str) -> dict[str, Any] | None:
    """Returns what is kept under `key`, or `None`; a damaged file counts as none."""
    try:
        return json.loads((folder() / f"{key}.json").read_text())
    except (OSError, ValueError):
        return None


def write(key: str, value: dict[str, Any]) -> None:
    """Keeps `value` under `key`; a disk that cannot be written is no error."""
    path = folder() / f"{key}.json"
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(value))
        scratch.replace(path)
        _prune()
    except OSError:
        return


def _prune() -> None:
    files = sorted(folder().glob("*.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in files[KEPT:]:
        old.unlink(missing_ok=True)
