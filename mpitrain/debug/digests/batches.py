"""What a batch holds, as one number that no layout changes: a sum of hashes, one a row.

A hash is of the row's place in the global batch, of its step and of all its numbers with their positions, so it tells
also of two rows that have changed places.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from mpitrain.backend import to_host
from mpitrain.rng import splitmix64

FIRST, LAST = "inputs", "targets"
_NOT_DATA = ("places", "positions", "lengths", "documents")


def hashes(batch: Any) -> dict[str, int]:
    """Name of an array -> its number, modulo 2^64.

    Arrays have a row for each sample; tokens are known by their positions.  A batch that does not know its places has
    numbers that do not depend on the order of its rows.
    """
    places, positions = (_numbers(getattr(batch, name, None)) for name in ("places", "positions"))
    found = {}
    for name, array in _arrays(batch):
        rows = np.ascontiguousarray(to_host(array))
        if not rows.size:
            found[name] = 0
            continue
        of_row = places if places is not None and len(places) == len(rows) else np.zeros(len(rows), np.int64)
        of_token = rows.ndim > 1 and positions is not None and len(positions) == rows.shape[1]
        key = splitmix64(of_row.astype(np.uint64))
        if of_token:
            key = splitmix64(key[:, None] ^ splitmix64(positions.astype(np.uint64))[None, :])  # type: ignore[union-attr]
        bits = _bits(rows).reshape(*key.shape, -1)
        columns = splitmix64(np.arange(bits.shape[-1], dtype=np.uint64))
        if of_token or places is not None:
            found[name] = int(splitmix64(bits ^ splitmix64(key[..., None] ^ columns)).sum(dtype=np.uint64))
        else:  # a row as a whole, wherever it stands
            of_each = splitmix64(bits ^ columns).sum(-1, dtype=np.uint64)
            found[name] = int(splitmix64(of_each).sum(dtype=np.uint64))
    return found


def _arrays(batch: Any) -> list[tuple[str, Any]]:
    if is_dataclass(batch):
        items = [(field.name, getattr(batch, field.name)) for field in fields(batch)]
    else:
        items = list(batch.items() if isinstance(batch, dict) else getattr(batch, "__dict__", {}).items())
    return [(n, x) for n, x in items if getattr(x, "ndim", 0) > 0 and hasattr(x, "dtype") and n not in _NOT_DATA]


def _bits(rows: np.ndarray) -> np.ndarray:
    """Elements as numbers of 64 bits: whole numbers as what they are worth, others by their bytes."""
    if rows.dtype.kind in "iub":
        return rows.astype(np.int64).view(np.uint64)
    return (
        rows.view(f"u{rows.dtype.itemsize}").astype(np.uint64)
        if rows.dtype.itemsize <= 8
        else np.zeros(rows.shape, np.uint64)
    )


def _numbers(array: Any) -> np.ndarray | None:
    return np.asarray(to_host(array)) if getattr(array, "ndim", 0) == 1 and array.dtype.kind in "iu" else None
