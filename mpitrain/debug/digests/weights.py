"""Factors for the rows and columns of a value, by which a sum notices that two of them have changed places.

A factor is a pure function of the global place: a row's of its sample's place in the global batch and of its token's
position in the sequence, a column's of its number in the whole tensor.  So slices of a value, wherever they lie, are
weighted as they would be in the whole, and their sums add up.

Factors are of both signs and lie between 1/2 and 3/2: errors of rounding, which have no sign, do not add up, and no
two rows count alike.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mpitrain.rng import lowbias32

PLACES, POSITIONS, COLUMNS = 0x5EED0001, 0x5EED0002, 0x5EED0003
_SCALE = 2.0**-31


def factors(kind: int, numbers: np.ndarray) -> np.ndarray:
    """The factors of global numbers.

    Args:
        kind: one of PLACES, POSITIONS, COLUMNS: places and positions of the same number have other factors.
        numbers: integers (n,).

    Returns:
        float64 (n,), in (-3/2, -1/2] or [1/2, 3/2).
    """
    word = lowbias32(np.asarray(numbers, np.int64).astype(np.uint32) * np.uint32(2654435769) + np.uint32(kind))
    size = 0.5 + (word >> np.uint32(1)) * _SCALE
    return np.where(word & np.uint32(1), size, -size)


@lru_cache(maxsize=256)
def run_of(kind: int, start: int, length: int) -> np.ndarray:
    """The factors of consecutive numbers; not to be written."""
    found = factors(kind, np.arange(start, start + length))
    found.flags.writeable = False
    return found


@lru_cache(maxsize=256)
def block_of(kind: int, starts: tuple[int, ...], lengths: tuple[int, ...]) -> np.ndarray:
    """The products of the factors of several dims, in the order of their elements; (1,) for no dims."""
    found = np.ones(1)
    for start, length in zip(starts, lengths, strict=True):
        found = np.multiply.outer(found, run_of(kind, start, length)).reshape(-1)
    found.flags.writeable = False
    return found
