"""Indexes of a device array, for the NumPy array inside it: ids wrap around, and nothing else may be a host array."""

from __future__ import annotations

from typing import Any

import numpy as np


def places_of(index: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """The index for NumPy: integer arrays without their device, taken modulo the length of their dim, as CuPy does."""
    items = list(index) if isinstance(index, tuple) else [index]
    taken = [_dims(item) for item in items]
    at = 0
    for i, item in enumerate(items):
        if isinstance(item, (list, np.ndarray)):
            raise TypeError(f"Unsupported type {type(item)}: a device array is indexed by device arrays")
        if item is Ellipsis:
            at = len(shape) - sum(taken[i + 1 :])
        elif _is_array(item):
            is_ids = item.dtype.kind in "iu" and at < len(shape) and shape[at]
            items[i] = item._values % shape[at] if is_ids else item._values
        at += taken[i]
    return tuple(items)


def is_scatter(index: Any) -> bool:
    """Whether a write to this index may reach one element twice."""
    items = index if isinstance(index, tuple) else (index,)
    return any(_is_array(item) and item.dtype.kind in "iu" for item in items)


def _dims(item: Any) -> int:
    """How many dims of the array an item of an index takes."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if _is_array(item) and item.dtype == bool else 1


def _is_array(item: Any) -> bool:
    return hasattr(item, "_values")
