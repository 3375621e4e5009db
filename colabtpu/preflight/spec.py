"""What one batch looks like: shapes and dtypes, taken from whatever the user would give to `fit`.

    batch_spec((x, y))                       # arrays: their own shapes
    batch_spec(dataset, batch=8)             # a tf.data.Dataset, PyDataset or loader
    tokens(batch=8, seq_len=1024)            # ((8, 1024) ids, (8, 1024) labels)

No framework is imported here: anything with a `shape` and a `dtype` is an array.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from colabtpu.errors import InvalidArgumentError

ITEM_BYTES = {"bool": 1, "int4": 1, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class ArraySpec:
    """The shape and dtype of one array; a dimension that nobody knows is `None`.

    Attributes:
        shape: sizes, the batch first.
        dtype: NumPy's name, such as `"int32"`.
        ragged: whether rows differ in length, which no TPU program can hold.
    """

    shape: tuple[int | None, ...]
    dtype: str
    ragged: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the array; unknown dimensions count as 1."""
        return prod(d or 1 for d in self.shape) * item_bytes(self.dtype)


def item_bytes(dtype: str) -> int:
    """Returns the bytes of one item, `"float32"` -> 4."""
    if dtype in ITEM_BYTES:
        return ITEM_BYTES[dtype]
    digits = "".join(c for c in dtype if c.isdigit())
    return max(int(digits) // 8, 1) if digits else 1


def tokens(batch: int, seq_len: int, dtype: str = "int32") -> tuple[ArraySpec, ArraySpec]:
    """Returns the spec of a language-model batch: ids and labels, both `(batch, seq_len)`."""
    row = ArraySpec((batch, seq_len), dtype)
    return (row, row)


def batch_spec(data: Any, batch: int | None = None, seq_len: int | None = None) -> Any:
    """Returns the spec of one batch, in the structure that `fit` would see.

    Args:
        data: a batch (`x`, `(x, y)` or `(x, y, sample_weight)`; arrays, tensors or specs), or a
            data set: anything with an `element_spec`, with `__getitem__`, or that can be
            iterated anew. An iterator is refused, as looking would eat a batch.
        batch: the global batch, in rows; replaces the leading dimension.
        seq_len: fills second dimensions that are unknown.

    Returns:
        The same structure with `ArraySpec` leaves.

    Raises:
        InvalidArgumentError: no batch can be found in `data`, or a dimension stays unknown.
    """
    structure = look_at(data)
    if not leaves(structure):
        raise InvalidArgumentError(
            f"`data` holds no array. Received: {type(data).__name__}",
            "Pass a batch such as (x, y), or a data set of such batches.",
        )
    return map_structure(lambda leaf: filled(leaf, batch, seq_len), structure)


def look_at(data: Any) -> Any:
    """Returns the spec of one batch as it is, unknown dimensions and all."""
    return map_structure(_as_spec, _one_batch(data))


def with_batch(structure: Any, batch: int) -> Any:
    """Returns the same spec for another number of rows."""
    return map_structure(lambda s: ArraySpec((batch, *s.shape[1:]), s.dtype, s.ragged), structure)


def rows(structure: Any) -> int:
    """Returns the batch of a spec: the leading dimension of its first array."""
    return next((s.shape[0] or 1 for s in leaves(structure) if s.shape), 1)


def sequence_length(structure: Any) -> int | None:
    """Returns the second dimension of the first array of ids `(batch, seq)`, if there is one."""
    for leaf in leaves(structure):
        if len(leaf.shape) == 2 and leaf.dtype.startswith(("int", "uint")):
            return leaf.shape[1]
    return None


def map_structure(function: Callable[[Any], Any], structure: Any) -> Any:
    """Applies `function` to every array of nested tuples, lists and dicts; `None` stays."""
    if structure is None:
        return None
    if isinstance(structure, Mapping):
        return {key: map_structure(function, value) for key, value in structure.items()}
    if isinstance(structure, tuple | list):
        return tuple(map_structure(function, value) for value in structure)
    return function(structure)


def leaves(structure: Any) -> list[Any]:
    """Returns the arrays of a structure in order; dictionaries by sorted key, as JAX does."""
    if structure is None:
        return []
    if isinstance(structure, Mapping):
        return [leaf for key in sorted(structure) for leaf in leaves(structure[key])]
    if isinstance(structure, tuple | list):
        return [leaf for value in structure for leaf in leaves(value)]
    return [structure]


def filled(leaf: ArraySpec, batch: int | None, seq_len: int | None) -> ArraySpec:
    """Returns the spec with its unknown dimensions set: rows first, then the length."""
    shape = list(leaf.shape)
    if shape and (batch is not None or shape[0] is None):
        shape[0] = batch
    if len(shape) > 1 and shape[1] is None:
        shape[1] = seq_len
    if None in shape and not leaf.ragged:
        missing = "batch" if shape[0] is None else "seq_len"
        raise InvalidArgumentError(
            f"A TPU program needs every dimension. Received: shape={leaf.shape} of {leaf.dtype}",
            f"Pass `{missing}=`, or fix the shape in the data set (`drop_remainder=True`, "
            "padding to one length).",
        )
    return ArraySpec(tuple(shape), leaf.dtype, leaf.ragged)


def refill(structure: Any, values: Iterable[Any]) -> Any:
    """Returns the structure with other leaves, given in the order of `leaves`."""
    remaining = iter(values)

    def fill(part: Any) -> Any:
        if part is None:
            return None
        if isinstance(part, Mapping):
            filled = {key: fill(part[key]) for key in sorted(part)}
            return {key: filled[key] for key in part}
        if isinstance(part, tuple | list):
            return tuple(fill(value) for value in part)
        return next(remaining)

    return fill(structure)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _one_batch(data: Any) -> Any:
    if data is None or _is_array(data) or isinstance(data, tuple | list | Mapping):
        return data
    if hasattr(data, "element_spec"):
        return data.element_spec
    if isinstance(data, Iterator):
        raise InvalidArgumentError(
            f"`data` is an iterator, and looking at it would eat a batch. "
            f"Received: {type(data).__name__}",
            "Pass one batch, its spec, or the data set that the iterator came from.",
        )
    if hasattr(data, "__getitem__"):
        return data[0]
    if hasattr(data, "__iter__"):
        return next(iter(data))
    raise InvalidArgumentError(
        f"`data` is neither a batch nor a data set. Received: {type(data).__name__}",
        "Pass (x, y) arrays, their specs, or a tf.data.Dataset, PyDataset or loader.",
    )


def _as_spec(value: Any) -> ArraySpec:
    if isinstance(value, ArraySpec):
        return value
    if not _is_array(value):
        raise InvalidArgumentError(
            f"A batch must hold arrays or specs. Received: {type(value).__name__} {value!r:.60}",
            "Convert it to a NumPy array first.",
        )
    ragged = "ragged" in type(value).__name__.lower()
    dtype = getattr(value.dtype, "name", None) or str(value.dtype)
    shape = value.shape
    dims = tuple(shape) if getattr(shape, "rank", 0) is not None else (None,)
    return ArraySpec(tuple(None if d is None else int(d) for d in dims), _plain(dtype), ragged)


def _plain(dtype: str) -> str:
    """NumPy calls strings `str_`, `object`, `<U5`, `bytes_`; TensorFlow calls them `string`."""
    if dtype in ("object", "string") or dtype.lower().startswith(("str", "bytes", "<u", "|s")):
        return "string"
    return dtype
