"""What every launcher asks of its arrays: whether kernels can read them, and in which precision they compute."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module, wide

_PRECISIONS = (np.dtype(np.float32), np.dtype(np.float64))


def precision(first: Array, *others: Array | None, beside: tuple[Array | None, ...] = ()) -> Any:
    """The dtype that kernels compute in for these arrays; None: they take no such arrays.

    Args:
        first: an array of a device.
        others: of the same dtype, or None.
        beside: of that dtype, or of the one that is computed in; kernels are told which (`is_wide`).
    """
    dtype, kind = first.dtype, type(first)
    compute = _computed_in(dtype)
    if compute is None:
        return None
    for array in others:
        if array is not None and (type(array) is not kind or array.dtype != dtype):
            return None
    for array in beside:
        if array is not None and (type(array) is not kind or (array.dtype != dtype and array.dtype != compute)):
            return None
    return compute


@functools.cache
def _computed_in(dtype: Any) -> Any:
    return wide(dtype) if wide(dtype) in _PRECISIONS else None


def solid(x: Array) -> Array:
    """The same values, C-contiguous: itself, or a copy."""
    return x if x.flags.c_contiguous else array_module(x).ascontiguousarray(x)


def vector(x: Array | None, dtype: Any) -> tuple[Array | None, bool]:
    """A vector that lies beside an array of this dtype, as kernels take it: without gaps, and whether it is wider."""
    return (None, False) if x is None else (solid(x), x.dtype != dtype)
