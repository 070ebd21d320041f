"""Indexes of a device array, for the NumPy array inside it: ids wrap around, and nothing may be a host array."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_index(index: Any, kind: type) -> str:
    """Refuse what CuPy refuses in an index.

    Returns:
        "view" for slices and numbers, "ids" and "mask" for arrays of a device.

    Raises:
        TypeError: a list or a host array.
    """
    found = "view"
    for item in _items(index):
        if isinstance(item, (list, np.ndarray)):
            raise TypeError(f"Unsupported type {type(item)}: a device array is indexed by device arrays")
        if isinstance(item, kind):
            found = "mask" if item.dtype == bool or found == "mask" else "ids"
    return found


def places_of(index: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """The index for NumPy: its arrays of integers taken modulo the length of their dim, as CuPy does."""
    items = _items(index)
    taken = [_dims(item) for item in items]
    at = 0
    for i, item in enumerate(items):
        if item is Ellipsis:
            at = len(shape) - sum(taken[i + 1 :])
        elif isinstance(item, np.ndarray) and item.dtype.kind in "iu" and at < len(shape) and shape[at]:
            items[i] = item % shape[at]
        at += taken[i]
    return tuple(items)


def is_scatter(index: Any) -> bool:
    """Whether a write to this index may reach one element twice."""
    return any(isinstance(item, np.ndarray) and item.dtype.kind in "iu" for item in _items(index))


def _items(index: Any) -> list[Any]:
    return list(index) if isinstance(index, tuple) else [index]


def _dims(item: Any) -> int:
    """How many dims of the array an item of an index takes."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, np.ndarray) and item.dtype == bool else 1
