"""Layer norm, alone and after a residual branch: `csrc/norm.cu`."""

from __future__ import annotations

from typing import Any

from mpitrain.backend import Array, array_module
from mpitrain.kernels import reference
from mpitrain.kernels.blocks import rows_of
from mpitrain.kernels.cuda.arrays import precision, solid, vector
from mpitrain.kernels.cuda.launch import THREADS, launch
from mpitrain.kernels.cuda.residual import drop_numbers, hashes_of
from mpitrain.kernels.cuda.rows import fold_rows, summed_tiles

KEPT = 8  # elements of a row that a thread keeps: NORM_QUADS of them in the source
MOST_THREADS = 1_024  # NORM_THREADS
MOST_ROWS = 1 << 20
"""Blocks at most: each takes every so manieth row."""


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    compute = precision(x, beside=(weight, bias))
    if compute is None or not normed(x, weight, bias):
        return reference.layer_norm(x, weight, bias, eps)
    x = solid(x)
    y, center, rstd, shape = *norm_results(x, compute, 2), rows_of(x)
    norm = *vector(weight, x.dtype), *vector(bias, x.dtype), float(eps)
    launch("norm", "layer_norm", x.dtype, *norm_blocks(x), x, *norm, y, center, rstd, *shape)
    return y, center, rstd


def residual_norm(
    x: Array, y: Array, branch_bias: Array | None, rows: Array | None, p: float, weight: Array, bias: Array, eps: float
) -> tuple[Array, Array, Array, Array]:
    compute = precision(x, y, beside=(branch_bias, weight, bias))
    branch = branch_numbers(x, y, branch_bias, rows, p)
    if compute is None or branch is None or not normed(x, weight, bias):
        return reference.residual_norm(x, y, branch_bias, rows, p, weight, bias, eps)
    x = solid(x)
    total = array_module(x).empty(x.shape, x.dtype)
    out, center, rstd, shape = *norm_results(x, compute, 2), rows_of(x)
    norm = *vector(weight, x.dtype), *vector(bias, x.dtype), float(eps)
    made = total, out, center, rstd
    launch("norm", "residual_norm", x.dtype, *norm_blocks(x), x, *branch, *norm, *made, *shape)
    return total, out, center, rstd


def layer_norm_backward(
    grad: Array, x: Array, center: Array, rstd: Array, weight: Array, extra: Array | None = None
) -> tuple[Array, Array, Array]:
    compute = precision(x, grad, extra, beside=(weight,))
    alike = compute is not None and normed(x, weight) and differentiable(compute, x, (grad, extra), (center, rstd))
    if not alike:
        return reference.layer_norm_backward(grad, x, center, rstd, weight, extra)
    xp, x, grad = array_module(x), solid(x), solid(grad)
    dx, (rows, width) = xp.empty(x.shape, x.dtype), rows_of(x)
    extra, center, rstd = None if extra is None else solid(extra), solid(center), solid(rstd)
    norm = x, center, rstd, *vector(weight, x.dtype)
    launch("norm", "layer_norm_backward", x.dtype, *norm_blocks(x), grad, extra, *norm, dx, rows, width)
    blocks, groups = summed_tiles(rows, width)
    sums = xp.empty((groups, 2 * width), compute)
    launch("norm", "layer_norm_columns", x.dtype, blocks, THREADS, grad, x, center, rstd, sums, rows, width)
    total = sums[0] if groups == 1 else fold_rows(sums)
    return dx, total[:width], total[width:]


# ------------------------------------------------------------------------------------- shared with others of whole rows


def normed(x: Array, *vectors: Array) -> bool:
    """Whether x has rows, and the vectors a number for each of their elements."""
    return x.ndim > 0 and x.shape[-1] > 0 and all(v.shape == x.shape[-1:] for v in vectors)


def norm_blocks(x: Array) -> tuple[int, int]:
    """(blocks, threads of each): one for a row, of as few threads as can keep it."""
    rows, width = rows_of(x)
    return turns(rows), min(32 * -(-width // (32 * KEPT)), MOST_THREADS)


def turns(rows: int) -> int:
    """Blocks for so many rows: one each, as far as there may be blocks."""
    return min(rows, MOST_ROWS)


def norm_results(x: Array, compute: Any, statistics: int) -> tuple[Array, ...]:
    """Room for the normalised rows, and for so many numbers of each row."""
    xp, (rows, _) = array_module(x), rows_of(x)
    return xp.empty(x.shape, x.dtype), *[xp.empty((rows, 1), compute) for _ in range(statistics)]


def branch_numbers(x: Array, y: Array, bias: Array | None, rows: Array | None, p: float) -> tuple[Any, ...] | None:
    """What a kernel is told of a residual branch; None where it takes no such branch."""
    chance = drop_numbers(p if rows is not None else 0.0)
    if x.shape != y.shape or chance is None or (bias is not None and bias.shape != x.shape[-1:]):
        return None
    if rows is not None and not hashes_of(x, rows):
        return None
    return solid(y), *vector(bias, x.dtype), None if rows is None else solid(rows), *chance


def differentiable(compute: Any, x: Array, like: tuple[Array | None, ...], statistics: tuple[Array, ...]) -> bool:
    """Whether gradients are as large as x, and the statistics its rows', in the precision to compute in."""
    rows, _ = rows_of(x)
    return all(a is None or a.size == x.size for a in like) and all(
        type(s) is type(x) and s.dtype == compute and s.size == rows for s in statistics
    )
