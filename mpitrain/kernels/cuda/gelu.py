"""GELU in its two forms, its gradient, and the error function: `csrc/gelu.cu`."""

from __future__ import annotations

from mpitrain.backend import Array, array_module
from mpitrain.kernels import reference
from mpitrain.kernels.blocks import rows_of
from mpitrain.kernels.cuda.arrays import precision, solid, vector
from mpitrain.kernels.cuda.launch import THREADS, blocks_for, launch
from mpitrain.kernels.cuda.rows import fold_rows, quads, summed_tiles, tiles


def gelu_tanh(x: Array, bias: Array | None = None) -> tuple[Array, Array]:
    return _gelu("gelu_tanh", x, bias) or reference.gelu_tanh(x, bias)


def gelu_erf(x: Array, bias: Array | None = None) -> tuple[Array, Array]:
    return _gelu("gelu_erf", x, bias) or reference.gelu_erf(x, bias)


def _gelu(name: str, x: Array, bias: Array | None) -> tuple[Array, Array] | None:
    """None where the kernels take no such arrays."""
    if precision(x, beside=(bias,)) is None or (bias is not None and bias.shape != x.shape[-1:]):
        return None
    xp, x = array_module(x), solid(x)
    y, slope = xp.empty(x.shape, x.dtype), xp.empty(x.shape, x.dtype)
    if bias is None:
        launch("gelu", name, x.dtype, quads(x.size), THREADS, x, y, slope, x.size)
    else:
        shape = rows_of(x)
        launch("gelu", f"{name}_biased", x.dtype, tiles(*shape), THREADS, x, *vector(bias, x.dtype), y, slope, *shape)
    return y, slope


def gelu_backward(grad: Array, slope: Array, with_bias: bool) -> tuple[Array, Array | None]:
    compute = precision(slope, grad)
    if compute is None or grad.shape != slope.shape:
        return reference.gelu_backward(grad, slope, with_bias)
    xp, grad, slope = array_module(slope), solid(grad), solid(slope)
    dx = xp.empty(slope.shape, slope.dtype)
    if not with_bias:
        launch("gelu", "gelu_backward", slope.dtype, quads(dx.size), THREADS, grad, slope, dx, dx.size)
        return dx, None
    rows, width = rows_of(slope)
    blocks, groups = summed_tiles(rows, width)
    sums = xp.empty((groups, width), compute)
    launch("gelu", "gelu_backward_sums", slope.dtype, blocks, THREADS, grad, slope, dx, sums, rows, width)
    return dx, sums[0] if groups == 1 else fold_rows(sums)


def erf(x: Array) -> Array:
    if precision(x) is None:
        return reference.erf(x)
    x = solid(x)
    y = array_module(x).empty(x.shape, x.dtype)
    launch("gelu", "error_function", x.dtype, blocks_for(x.size) if x.size else 0, THREADS, x, y, x.size)
    return y
