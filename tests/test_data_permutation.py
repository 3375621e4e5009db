"""The shuffle without memory: a permutation, another for each key, and no pattern left."""

import numpy as np
import pytest

from colabtpu.data.permutation import shuffled


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1000, 65536, 100_003])
def test_every_index_comes_exactly_once(size):
    places = shuffled(np.arange(size), size, (0, 0))
    np.testing.assert_array_equal(np.sort(places), np.arange(size))


def test_part_of_the_indices_gives_that_part_of_the_whole():
    whole = shuffled(np.arange(5000), 5000, (7, 2))
    np.testing.assert_array_equal(shuffled(np.arange(990, 1010), 5000, (7, 2)), whole[990:1010])


def test_seed_and_epoch_choose_the_order():
    orders = [shuffled(np.arange(1000), 1000, key) for key in ((0, 0), (0, 1), (1, 0), (1, 1))]
    for i, order in enumerate(orders):
        for other in orders[:i]:
            assert (order == other).mean() < 0.02  # 1 in 1,000 by chance


def test_order_is_the_same_on_every_machine():
    # Written down once; a change would break the resumption of every run out there.
    assert shuffled(np.arange(6), 1000, (0, 0)).tolist() == [930, 753, 227, 415, 412, 708]


def test_shuffle_leaves_no_trace_of_the_old_order():
    size = 20_000
    places = shuffled(np.arange(size), size, (3, 4)).astype(float)
    assert abs(np.corrcoef(np.arange(size), places)[0, 1]) < 4 / np.sqrt(size)
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 4 / np.sqrt(size)
    # Quarters of the old order spread evenly over quarters of the new: chi-squared, 9 degrees.
    table = np.histogram2d(np.arange(size), places, bins=4)[0]
    assert ((table - size / 16) ** 2 / (size / 16)).sum() < 27.9  # 1 in 1,000 by chance


def test_huge_set_needs_no_memory():
    places = shuffled(np.arange(10), 10**15, (0, 0))
    assert len(set(places.tolist())) == 10
    assert 0 <= places.min() < places.max() < 10**15
