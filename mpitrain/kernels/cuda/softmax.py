"""Softmax along any dim, with any mask, and its gradient: `csrc/softmax.cu`."""

from __future__ import annotations

import math
from typing import Any

from mpitrain.backend import Array, array_module
from mpitrain.kernels import reference
from mpitrain.kernels.cuda.arrays import precision, solid
from mpitrain.kernels.cuda.launch import THREADS, blocks_for, launch
from mpitrain.kernels.cuda.norm import turns

SHORT = 32
"""Lines that are no longer have a thread each, the others a block."""
_NO_MASK = (None, 1, 1, 0, 0, 0, 0)


def softmax(x: Array, dim: int, mask: Array | None) -> Array:
    xp = array_module(x)
    fits = mask is None or (type(mask) is type(x) and mask.dtype == bool and mask.ndim <= x.ndim)
    if precision(x) is None or not x.size or not x.ndim or not fits:
        return reference.softmax(x, dim, mask)
    x, dim = solid(x), dim % x.ndim
    y = xp.empty(x.shape, x.dtype)
    grid, lines = _lines(x.shape, dim)
    seen = _NO_MASK if mask is None else _seen(xp, mask, x.shape, dim)
    launch("softmax", "softmax", x.dtype, *grid, x, y, *lines, *seen)
    return y


def softmax_backward(grad: Array, y: Array, dim: int) -> Array:
    if precision(y, grad) is None or not y.size or not y.ndim or grad.shape != y.shape:
        return reference.softmax_backward(grad, y, dim)
    y, grad = solid(y), solid(grad)
    dx = array_module(y).empty(y.shape, y.dtype)
    grid, lines = _lines(y.shape, dim % y.ndim)
    launch("softmax", "softmax_backward", y.dtype, *grid, grad, y, dx, *lines)
    return dx


def _lines(shape: tuple[int, ...], dim: int) -> tuple[tuple[int, int], tuple[int, int, int, bool]]:
    """((blocks, threads of each), (how many lines, their length, how far apart their elements are, one a block))."""
    length, inner = shape[dim], math.prod(shape[dim + 1 :])
    count = math.prod(shape) // length
    of_blocks = inner == 1 and length > SHORT
    if of_blocks:
        grid = turns(count), min(32 * -(-length // (4 * 32)), THREADS)
    else:
        grid = blocks_for(count, 64), 64
    return grid, (count, length, inner, of_blocks)


def _seen(xp: Any, mask: Array, shape: tuple[int, ...], dim: int) -> tuple[Any, ...]:
    """A mask as kernels take it: its memory, and how its elements lie along the lines, which are up to three dims."""
    mask = xp.broadcast_to(mask, shape)
    dims = _joined(mask, dim)
    if len(dims) > 3:
        mask = xp.ascontiguousarray(mask)
        dims = _joined(mask, dim)
    (_, far), (middle, between), (last, near) = [(1, 0)] * (3 - len(dims)) + dims
    return mask, middle, last, far, between, near, mask.strides[dim]


def _joined(mask: Array, dim: int) -> list[tuple[int, int]]:
    """(length, stride) of the dims but one; what lies as one dim would is one."""
    dims: list[tuple[int, int]] = []
    for i, (length, stride) in enumerate(zip(mask.shape, mask.strides, strict=True)):
        if i == dim or length == 1:
            continue
        if dims and dims[-1][1] == length * stride:
            dims[-1] = (dims[-1][0] * length, stride)
        else:
            dims.append((length, stride))
    return dims
