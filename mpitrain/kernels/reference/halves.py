"""Half precision to single and back, and kernels whose formulas are worked out in single for halves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.backend import Array, is_half


def widen(x: Array, out: Array | None = None) -> Array:
    """A float16 (or bfloat16) array as float32, exactly; written into `out` if given."""
    if out is None:
        return x.astype(np.float32)
    out[...] = x
    return out


def narrow(x: Array, dtype: object, out: Array | None = None) -> Array:
    """A float32 array in a half precision, to the nearest, ties to even; beyond its range infinity, without a word.

    Args:
        x: float32.
        dtype: float16 or bfloat16.
        out: where to write.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # overflow is for the loss scale to find
        if out is None:
            return x.astype(dtype)
        out[...] = x
    return out


def in_single(like: int, *narrowed: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Work out a kernel's formula in float32 where its arrays are halves, and round what comes out once.

    Args:
        like: number of the argument that decides, and whose dtype the results get.
        narrowed: numbers of the results that become halves again; the others, statistics and sums, stay float32.
    """

    def decorate(kernel: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            dtype = arguments[like].dtype
            if not is_half(dtype):
                return kernel(*arguments, **named)
            results = kernel(*map(_widened, arguments), **named)
            if not isinstance(results, tuple):
                return narrow(results, dtype) if narrowed else results
            return tuple(narrow(y, dtype) if i in narrowed else y for i, y in enumerate(results))

        return wrapped

    return decorate


def _widened(x: Any) -> Any:
    return widen(x) if hasattr(x, "dtype") and is_half(x.dtype) else x
