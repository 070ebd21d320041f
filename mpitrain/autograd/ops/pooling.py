"""Maxima in a window that slides over images.

Backward needs to know which pixel of each window was the largest, and nothing else: a byte an output for every window
of up to 256 pixels.  Neither the input nor the value waits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from mpitrain.autograd.function import Function
from mpitrain.autograd.lazy import rounded
from mpitrain.autograd.needs import Below
from mpitrain.autograd.ops.windows import Pair, pair, windows
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, wide


class MaxPool2d(Function):
    """Maximum in each window; saves where in the window it was, counted row by row, of equal ones the first."""

    needs = (Below(lambda window, stride: window[0] * window[1]),)

    @staticmethod
    def forward(x: Array, *, window: Pair, stride: Pair) -> tuple[Array, tuple[Any, ...]]:
        xp = array_module(x)
        seen = [x[:, down, right] for _, _, (down, right) in windows("max_pool2d", x.shape, window, stride).elements()]
        y = functools.reduce(xp.maximum, seen[1:], seen[0].copy())
        where = xp.zeros(y.shape, np.min_scalar_type(len(seen) - 1))
        later = xp.ones(y.shape, bool)  # whether it is none of those that were looked at
        for each in seen[:-1]:
            later &= each != y
            where += later
        return y, (where, x.shape)

    @staticmethod
    def backward(
        grad: Array, where: Array, shape: tuple[int, ...], *, wanted: tuple[bool, ...], window: Pair, stride: Pair
    ) -> tuple[Any, ...]:
        xp = array_module(grad)
        slide = windows("max_pool2d", shape, window, stride)
        dx = xp.zeros(shape, wide(grad.dtype) if slide.overlap else grad.dtype)
        for (dy, dz), _, (down, right) in slide.elements():
            is_here = where == dy * window[1] + dz
            if slide.overlap:
                dx[:, down, right] += grad * is_here
            else:
                xp.multiply(grad, is_here, out=dx[:, down, right])
        return (rounded(dx, grad.dtype),)


def max_pool2d(x: Tensor, window: int | Pair = 2, stride: int | Pair | None = None) -> Tensor:
    """The largest pixel of each window, channel by channel.

    Args:
        x: (b, h, w, c), channels last.
        window: its pixels; a number, or one down and one to the right.
        stride: from a window to the next; None: as large as the window, so that none overlap.

    Returns:
        (b, oh, ow, c) with oh = (h - kh) // stride + 1, ow likewise: pixels that fill no window do not count.  Of equal
        ones the first, row by row, has the gradient.

    Raises:
        ShapeError: no images, or the window is larger than one.
    """
    both = pair(window, "max_pool2d", "window")
    step = both if stride is None else pair(stride, "max_pool2d", "stride")
    return MaxPool2d.apply(x, window=both, stride=step)
