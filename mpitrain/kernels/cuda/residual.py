"""Dropout, and the sum that ends a residual branch: `csrc/residual.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels import reference
from mpitrain.kernels.blocks import rows_of
from mpitrain.kernels.cuda.arrays import precision, solid, vector
from mpitrain.kernels.cuda.launch import THREADS, launch
from mpitrain.kernels.cuda.rows import quads, tiles
from mpitrain.kernels.reference.residual import keep_scale


def dropout(x: Array, rows: Array, p: float) -> Array:
    chance = drop_numbers(p)
    if precision(x) is None or chance is None or not hashes_of(x, rows):
        return reference.dropout(x, rows, p)
    x = solid(x)
    y, shape = array_module(x).empty(x.shape, x.dtype), rows_of(x)
    launch("residual", "dropout", x.dtype, tiles(*shape), THREADS, x, solid(rows), y, *shape, *chance)
    return y


def residual(x: Array, y: Array, bias: Array | None, rows: Array | None, p: float) -> Array:
    chance = drop_numbers(p if rows is not None else 0.0)
    fits = precision(x, y, beside=(bias,)) is not None and x.shape == y.shape
    fits &= (bias is None or bias.shape == x.shape[-1:]) and (rows is None or hashes_of(x, rows))
    if not fits or chance is None:
        return reference.residual(x, y, bias, rows, p)
    x, y = solid(x), solid(y)
    out = array_module(x).empty(x.shape, x.dtype)
    if bias is rows is None:
        launch("residual", "residual", x.dtype, quads(x.size), THREADS, x, y, out, x.size)
        return out
    branch, shape = (*vector(bias, x.dtype), None if rows is None else solid(rows)), rows_of(x)
    launch("residual", "residual_branch", x.dtype, tiles(*shape), THREADS, x, y, *branch, out, *shape, *chance)
    return out


def drop_numbers(p: float) -> tuple[Any, float] | None:
    """The lowest word that is kept, and by what the kept are scaled; None where no word is kept."""
    threshold = round(p * 2**32)
    return (np.uint32(threshold), keep_scale(p)) if threshold < 2**32 else None


def hashes_of(x: Array, rows: Array) -> bool:
    """Whether `rows` has a hash for each row of x, beside it."""
    return type(rows) is type(x) and rows.dtype == np.uint64 and rows.shape == x.shape[:-1] and x.ndim > 0
