"""RMS norm, alone and after a residual branch: `csrc/rms_norm.cu`."""

from __future__ import annotations

from mpitrain.backend import Array, array_module
from mpitrain.kernels import reference
from mpitrain.kernels.blocks import rows_of
from mpitrain.kernels.cuda.arrays import precision, solid, vector
from mpitrain.kernels.cuda.launch import THREADS, launch
from mpitrain.kernels.cuda.norm import branch_numbers, differentiable, norm_blocks, norm_results, normed
from mpitrain.kernels.cuda.rows import fold_rows, summed_tiles


def rms_norm(x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    compute = precision(x, beside=(weight,))
    if compute is None or not normed(x, weight):
        return reference.rms_norm(x, weight, eps)
    x = solid(x)
    y, rstd = norm_results(x, compute, 1)
    norm = *vector(weight, x.dtype), float(eps)
    launch("rms_norm", "rms_norm", x.dtype, *norm_blocks(x), x, *norm, y, rstd, *rows_of(x))
    return y, rstd


def residual_rms_norm(
    x: Array, y: Array, branch_bias: Array | None, rows: Array | None, p: float, weight: Array, eps: float
) -> tuple[Array, Array, Array]:
    compute = precision(x, y, beside=(branch_bias, weight))
    branch = branch_numbers(x, y, branch_bias, rows, p)
    if compute is None or branch is None or not normed(x, weight):
        return reference.residual_rms_norm(x, y, branch_bias, rows, p, weight, eps)
    x = solid(x)
    total = array_module(x).empty(x.shape, x.dtype)
    out, rstd = norm_results(x, compute, 1)
    norm = *vector(weight, x.dtype), float(eps)
    launch("rms_norm", "residual_rms_norm", x.dtype, *norm_blocks(x), x, *branch, *norm, total, out, rstd, *rows_of(x))
    return total, out, rstd


def rms_norm_backward(
    grad: Array, x: Array, rstd: Array, weight: Array, extra: Array | None = None
) -> tuple[Array, Array]:
    compute = precision(x, grad, extra, beside=(weight,))
    if compute is None or not normed(x, weight) or not differentiable(compute, x, (grad, extra), (rstd,)):
        return reference.rms_norm_backward(grad, x, rstd, weight, extra)
    xp, x, grad = array_module(x), solid(x), solid(grad)
    dx, (rows, width) = xp.empty(x.shape, x.dtype), rows_of(x)
    extra, rstd = None if extra is None else solid(extra), solid(rstd)
    norm = x, rstd, *vector(weight, x.dtype)
    launch("rms_norm", "rms_norm_backward", x.dtype, *norm_blocks(x), grad, extra, *norm, dx, rows, width)
    blocks, groups = summed_tiles(rows, width)
    sums = xp.empty((groups, width), compute)
    launch("rms_norm", "rms_norm_columns", x.dtype, blocks, THREADS, grad, x, rstd, sums, rows, width)
    return dx, sums[0] if groups == 1 else fold_rows(sums)
