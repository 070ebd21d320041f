"""How rows and elements are dealt out to blocks, and the second pass of sums over rows."""

from __future__ import annotations

from mpitrain.backend import Array, array_module
from mpitrain.kernels.cuda.launch import THREADS, blocks_for, launch

QUAD = 4  # neighbours that a thread has at once
TILE = 128  # columns of a warp; csrc/rows.cuh knows it as MT_TILE
WARPS = THREADS // 32
BLOCKS = 2_048
"""Of a pass over rows at most: they fill every GPU of today, and the order of sums is the same on all."""
GROUPS = 256  # of rows that are summed, at most


def quads(size: int) -> int:
    """Blocks of a pass over elements, four to a thread; none for none."""
    return blocks_for(-(-size // QUAD)) if size else 0


def tiles(rows: int, width: int) -> int:
    """Blocks of a pass over rows by threads that keep their columns: all of some groups of rows; none for no rows."""
    across = -(-width // TILE)
    return across * min(-(-rows // WARPS), max(1, BLOCKS // max(1, across)))


def summed_tiles(rows: int, width: int) -> tuple[int, int]:
    """The same of a pass that also sums each group of rows: (blocks, groups)."""
    across = -(-width // TILE)
    groups = min(-(-rows // WARPS), GROUPS, max(1, BLOCKS // max(1, across)))
    return across * groups, groups


def fold_rows(sums: Array) -> Array:
    """The sum over the rows of a matrix of few rows, in a fixed order; of float32 or float64."""
    xp = array_module(sums)
    rows, width = sums.shape
    total = xp.empty(width, sums.dtype)
    launch("rows", "fold_rows", sums.dtype, -(-width // TILE), THREADS, sums, total, rows, width)
    return total
