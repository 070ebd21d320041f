"""Hashes of rows: the chain of `mpitrain.rng` in NumPy (or CuPy)."""

from __future__ import annotations

from typing import Any

from mpitrain.backend import Array
from mpitrain.rng import absorb


def hash_rows(first: Array, key: Any, *more: Array) -> Array:
    """One hash for each combination of numbers: of a sample and a position, say.

    Args:
        first: int64 (n,).
        key: uint64, the stream's.
        more: int64 vectors, one or two.

    Returns:
        uint64, a dim for each vector: `absorb(absorb(key, first)[:, None], more[0])`, and so on.
    """
    rows = absorb(key, first)
    for numbers in more:
        rows = absorb(rows[..., None], numbers)
    return rows
