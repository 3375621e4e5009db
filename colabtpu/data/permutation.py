"""A shuffle that needs no memory: the place of one index is computed, not looked up.

    shuffled(np.arange(8), size=1_000_000, key=(seed, epoch))    # the first 8 of that epoch

A six-round Feistel network permutes the smallest even power of two that holds `size`;
values past the end are sent round again until they fall inside ("cycle walking": J. Black and
P. Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002).
"""

import hashlib

import numpy as np

_ROUNDS = 6


def shuffled(indices: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Maps indices below `size` one to one onto indices below `size`.

    Args:
        indices: whole numbers in [0, size), any shape.
        size: how many there are in all.
        key: numbers that choose the permutation, such as (seed, epoch).

    Returns:
        Their places, the same shape, int64.
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    keys = _round_keys(key)
    places = _feistel(np.asarray(indices, np.uint64), half, keys)
    outside = places >= size
    while outside.any():
        places[outside] = _feistel(places[outside], half, keys)
        outside = places >= size
    return places.astype(np.int64)


def _feistel(values: np.ndarray, half: int, keys: list[int]) -> np.ndarray:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ np.uint64(key)) & mask)
    return (left << bits) | right


def _mixed(values: np.ndarray) -> np.ndarray:
    """MurmurHash3's 64-bit finalizer (A. Appleby), which spreads every bit over all."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))


def _round_keys(key: tuple[int, ...]) -> list[int]:
    # hashlib, not numpy's generators, whose streams may change between releases.
    digest = hashlib.blake2b(repr(tuple(map(int, key))).encode(), digest_size=8 * _ROUNDS).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]
