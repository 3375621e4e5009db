"""Shapes taken from what a user would give to `fit`."""

import numpy as np
import pytest

from colabtpu.errors import InvalidArgumentError
from colabtpu.preflight import spec as specs
from colabtpu.preflight.spec import ArraySpec, batch_spec, leaves, refill, tokens


def test_arrays_are_taken_as_they_are():
    x, y = batch_spec((np.zeros((4, 8), "int32"), np.zeros(4, "float32")))
    assert (x, y) == (ArraySpec((4, 8), "int32"), ArraySpec((4,), "float32"))
    assert x.nbytes == 4 * 8 * 4


def test_rows_and_length_can_be_set():
    open_ended = (ArraySpec((None, None), "int32"), ArraySpec((None, None), "int32"))
    assert batch_spec(open_ended, batch=8, seq_len=1024) == tokens(8, 1024)
    with pytest.raises(InvalidArgumentError, match="batch="):
        batch_spec(open_ended)
    with pytest.raises(InvalidArgumentError, match="seq_len="):
        batch_spec(open_ended, batch=8)


def test_a_data_set_by_number_and_one_by_iteration():
    class Numbered:
        def __getitem__(self, index):
            return (np.zeros((2, 3), "int32"),)

    assert batch_spec(Numbered()) == (ArraySpec((2, 3), "int32"),)

    class Iterable:
        def __iter__(self):
            return iter([{"ids": np.zeros((2, 3), "int32")}])

    assert batch_spec(Iterable()) == {"ids": ArraySpec((2, 3), "int32")}


def test_an_iterator_is_not_eaten():
    batches = iter([np.zeros(3)])
    with pytest.raises(InvalidArgumentError, match="eat a batch"):
        batch_spec(batches)
    assert next(batches).shape == (3,)


def test_no_array_is_no_batch():
    with pytest.raises(InvalidArgumentError):
        batch_spec("text")
    with pytest.raises(InvalidArgumentError):
        batch_spec((None,))


def test_leaves_come_in_jax_s_order_and_go_back():
    structure = ({"b": 1, "a": 2}, None, [3])
    assert leaves(structure) == [2, 1, 3]
    assert refill(structure, "xyz") == ({"b": "y", "a": "x"}, None, ("z",))


def test_strings_are_told_by_any_of_their_names():
    for array in (np.array(["a"]), np.array([b"a"]), np.array(["a"], dtype=object)):
        assert batch_spec(array).dtype == "string"


def test_the_sequence_length_is_that_of_the_ids():
    assert specs.sequence_length(tokens(8, 1024)) == 1024
    assert specs.sequence_length(ArraySpec((8, 1024), "float32")) is None
