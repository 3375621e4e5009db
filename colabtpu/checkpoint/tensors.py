"""Named arrays in one file, in the safetensors format, written and checked as a stream.

    digest = write(file, {"model/0": array})         # sha256 of what was written
    arrays = read(path)                              # memory-mapped

The format (https://huggingface.co/docs/safetensors, *Format*): eight bytes with the length of
a JSON header, the header, the raw little-endian arrays. Written here because the `safetensors`
package takes no bfloat16 from NumPy and wants the whole file in memory at once.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

# The format's names for dtypes, by NumPy's.
_CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16",
    "uint32": "U32", "int32": "I32", "uint64": "U64", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_NAMES = {code: name for name, code in _CODES.items()}
_BLOCK = 8 << 20


def write(file: BinaryIO, arrays: dict[str, np.ndarray]) -> str:
    """Writes arrays to an open file; returns the sha256 of all that was written."""
    header, end = {}, 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _CODES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the arrays begin aligned
    digest = hashlib.sha256()
    for part in (len(encoded).to_bytes(8, "little"), encoded):
        digest.update(part)
        file.write(part)
    for array in arrays.values():
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, len(flat), _BLOCK):
            block = flat[start : start + _BLOCK].data
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


def read(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a file, read when they are used."""
    data = np.frombuffer(_content(path), np.uint8)
    length = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    return {name: _array(data[8 + length :], about) for name, about in header.items()}


def checksum(path: Path) -> str:
    """Returns the sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _content(path: Path) -> Any:
    if isinstance(path, Path):
        return np.memmap(path, np.uint8, "r")
    return path.read_bytes()


def _array(data: np.ndarray, about: dict[str, Any]) -> np.ndarray:
    start, end = about["data_offsets"]
    raw = np.ascontiguousarray(data[start:end])
    return raw.view(_dtype(_NAMES[about["dtype"]])).reshape(about["shape"])


def _dtype(name: str) -> np.dtype:
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes  # comes with Keras, and with JAX

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)
