"""Half precision to single and back."""

from __future__ import annotations

import numpy as np

from mpitrain.backend import Array


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
