"""Where caches live, and how a file is written so that a reader finds all of it or none.

cache_dir()                                  # $COLABTPU_CACHE, else ~/.cache/colabtpu
write_atomically(path, b"content")
"""

import os
import uuid
from io import BytesIO
from pathlib import Path

import numpy as np


def cache_dir() -> Path:
    """Returns where caches live: $COLABTPU_CACHE, else ~/.cache/colabtpu."""
    return Path(os.environ.get("COLABTPU_CACHE") or "~/.cache/colabtpu").expanduser()


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that a reader finds all of it or none, also after a power cut."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save_array(path: Path, array: np.ndarray) -> None:
    """Writes an array as .npy so that a reader finds all of it or none."""
    buffer = BytesIO()
    np.save(buffer, array)
    write_atomically(path, buffer.getvalue())
