"""Half precision to single and back: `csrc/halves.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module, is_half
from mpitrain.kernels import reference
from mpitrain.kernels.cuda.arrays import solid
from mpitrain.kernels.cuda.launch import THREADS, launch
from mpitrain.kernels.cuda.rows import quads

_SINGLE = np.dtype(np.float32)


def widen(x: Array, out: Array | None = None) -> Array:
    if not is_half(x.dtype) or not _takes(out, x, _SINGLE):
        return reference.widen(x, out)
    y = array_module(x).empty(x.shape, np.float32) if out is None else out
    launch("halves", "widen", x.dtype, quads(x.size), THREADS, solid(x), y, x.size)
    return y


def narrow(x: Array, dtype: Any, out: Array | None = None) -> Array:
    dtype = np.dtype(dtype)
    if x.dtype != _SINGLE or not is_half(dtype) or not _takes(out, x, dtype):
        return reference.narrow(x, dtype, out)
    y = array_module(x).empty(x.shape, dtype) if out is None else out
    launch("halves", "narrow", dtype, quads(x.size), THREADS, solid(x), y, x.size)
    return y


def _takes(out: Array | None, x: Array, dtype: Any) -> bool:
    """Whether a kernel can write what it makes of x: into a new array, or into `out`."""
    if out is None:
        return True
    return type(out) is type(x) and out.dtype == dtype and out.shape == x.shape and bool(out.flags.c_contiguous)
