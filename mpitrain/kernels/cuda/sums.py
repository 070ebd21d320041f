"""Sums of rows: of all of them, and of those with the same number: `csrc/rows.cu`, `csrc/embedding.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels import reference
from mpitrain.kernels.blocks import rows_of
from mpitrain.kernels.cuda.arrays import precision, solid
from mpitrain.kernels.cuda.launch import THREADS, launch
from mpitrain.kernels.cuda.rows import QUAD, fold_rows, summed_tiles

PART = 32  # rows that a block adds up; the source knows it
COUNTED = 1 << 16
"""Ids up to which they are sorted by comparing each with all; more are CuPy's to sort, who waits for the device."""


def sum_rows(x: Array) -> Array:
    compute = precision(x)
    if compute is None or not x.ndim:
        return reference.sum_rows(x)
    x, (rows, width) = solid(x), rows_of(x)
    blocks, groups = summed_tiles(rows, width)
    sums = array_module(x).empty((groups, width), compute)
    launch("rows", "fold_rows", x.dtype, blocks, THREADS, x, sums, rows, width)
    return sums[0] if groups == 1 else fold_rows(sums)


def row_sum(ids: Array, rows: Array, out: Array) -> None:
    """As the reference; a row whose id the table does not have is left out."""
    compute = precision(rows, beside=(out,))
    shapes = rows.ndim == out.ndim == 2 and ids.shape == rows.shape[:1] and out.shape[1] == rows.shape[1]
    whole = type(ids) is type(rows) and ids.dtype.kind in "iu" and out.flags.c_contiguous
    if compute is None or not shapes or not whole:
        reference.row_sum(ids, rows, out)
        return
    count, width = rows.shape
    if not rows.size or not out.size:
        return
    xp, rows = array_module(rows), solid(rows)
    order, ids = _sorted(ids, rows.dtype)
    threads = min(32 * -(-width // (32 * QUAD)), THREADS)
    tiles, parts = -(-width // (threads * QUAD)), -(-count // PART)
    pieces = xp.empty((parts, 2, width), compute) if parts > 1 else None
    table, grid, shape = (out, out.dtype != rows.dtype, out.shape[0]), (parts * tiles, threads), (count, width, tiles)
    launch("embedding", "add_rows", rows.dtype, *grid, order, ids, rows, *table, pieces, *shape)
    if pieces is not None:
        launch("embedding", "add_pieces", rows.dtype, *grid, ids, pieces, *table, *shape)


def _sorted(ids: Array, dtype: Any) -> tuple[Array, Array]:
    """The order in which ids rise, equal ones as they stand, and the ids in that order."""
    xp, ids = array_module(ids), solid(ids.astype(np.int64, copy=False))
    if ids.size > COUNTED:
        order = xp.argsort(ids, kind="stable")
        return order, xp.take(ids, order)
    order, ordered = xp.empty(ids.size, np.int64), xp.empty(ids.size, np.int64)
    launch("embedding", "sort_ids", dtype, -(-ids.size // 32), THREADS, ids, order, ordered, ids.size)
    return order, ordered
