"""Maxima and means in a window that slides over images.

Of maxima backward needs to know which pixel of each window was the largest, and nothing else: a byte an output for
every window of up to 256 pixels.  Of means it needs no array at all.
"""

from __future__ import annotations

import math
from typing import Any

from mpitrain import kernels
from mpitrain.autograd.function import Function
from mpitrain.autograd.lazy import rounded, widened
from mpitrain.autograd.needs import Below
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, wide
from mpitrain.errors import ShapeError
from mpitrain.kernels.windows import Pair, Windows, pair, windows


class MaxPool2d(Function):
    """Maximum in each window; saves where in the window it was, counted row by row, of equal ones the first."""

    needs = (Below(lambda window, **_: window[0] * window[1]),)

    @staticmethod
    def forward(x: Array, *, window: Pair, stride: Pair, padding: Pair) -> tuple[Array, tuple[Any, ...]]:
        y, where = kernels.max_pool2d(x, windows("max_pool2d", x.shape, window, stride, padding))
        return y, (where, x.shape)

    @staticmethod
    def backward(
        grad: Array,
        where: Array,
        shape: tuple[int, ...],
        *,
        wanted: tuple[bool, ...],
        window: Pair,
        stride: Pair,
        padding: Pair,
    ) -> tuple[Any, ...]:
        slide = windows("max_pool2d", shape, window, stride, padding)
        return (rounded(kernels.max_pool2d_backward(grad, where, slide), grad.dtype),)


class AvgPool2d(Function):
    """Mean in each window; saves nothing but the shape of its input."""

    linear = (0,)

    @staticmethod
    def forward(
        x: Array, *, window: Pair, stride: Pair, padding: Pair, count_padding: bool
    ) -> tuple[Array, tuple[Any, ...]]:
        slide = windows("avg_pool2d", x.shape, window, stride, padding)
        xp, z = array_module(x), widened(x)
        total = xp.zeros((len(x), *slide.places, x.shape[-1]), z.dtype)
        for _, (down, right), (i, j) in slide.elements():
            total[:, down, right] += z[:, i, j]
        total *= _share(xp, slide, z.dtype, count_padding)
        return rounded(total, x.dtype), (x.shape,)

    @staticmethod
    def backward(
        grad: Array,
        shape: tuple[int, ...],
        *,
        wanted: tuple[bool, ...],
        window: Pair,
        stride: Pair,
        padding: Pair,
        count_padding: bool,
    ) -> tuple[Any, ...]:
        slide = windows("avg_pool2d", shape, window, stride, padding)
        xp = array_module(grad)
        each = widened(grad) * _share(xp, slide, wide(grad.dtype), count_padding)
        dx = xp.zeros(shape, each.dtype)
        for _, (down, right), (i, j) in slide.elements():
            dx[:, i, j] += each[:, down, right]
        return (rounded(dx, grad.dtype),)


def _share(xp: Any, slide: Windows, dtype: Any, count_padding: bool) -> Any:
    """The weight of a pixel in the mean of its window: a number, or (oh, ow, 1) where places have other ones."""
    if count_padding or slide.padding == (0, 0):
        return 1.0 / math.prod(slide.window)
    seen = xp.zeros(slide.places, dtype)
    for _, (down, right), _ in slide.elements():
        seen[down, right] += 1
    return 1.0 / seen[..., None]


def _pooled(op: str, window: int | Pair, stride: int | Pair | None, padding: int | Pair) -> dict[str, Pair]:
    """The keyword arguments of a pool.

    Raises:
        ShapeError: something is no pair of numbers, or a window could lie in the padding alone.
    """
    both = pair(window, op, "window")
    around = pair(padding, op, "padding", least=0)
    if any(2 * p > k for p, k in zip(around, both, strict=True)):
        raise ShapeError(
            f"{op}: padding {around[0]} x {around[1]} is more than half of the window, {both[0]} x {both[1]}, which"
            " could then lie outside of the image"
        )
    return {"window": both, "stride": both if stride is None else pair(stride, op, "stride"), "padding": around}


def max_pool2d(x: Tensor, window: int | Pair = 2, stride: int | Pair | None = None, padding: int | Pair = 0) -> Tensor:
    """The largest pixel of each window, channel by channel.

    Args:
        x: (b, h, w, c), channels last.
        window: its pixels; a number, or one down and one to the right.
        stride: from a window to the next; None: as large as the window, so that none overlap.
        padding: pixels around each image that count in no maximum; at most half of the window.

    Returns:
        (b, oh, ow, c) with oh = (h + 2 padding - kh) // stride + 1, ow likewise: pixels that fill no window do not
        count.  Of equal ones the first, row by row, has the gradient.

    Raises:
        ShapeError: no images, the window is larger than one, or the padding more than half of it.
    """
    return MaxPool2d.apply(x, **_pooled("max_pool2d", window, stride, padding))


def avg_pool2d(
    x: Tensor,
    window: int | Pair = 2,
    stride: int | Pair | None = None,
    padding: int | Pair = 0,
    count_padding: bool = True,
) -> Tensor:
    """The mean of each window, channel by channel.

    Args:
        x: (b, h, w, c), channels last.
        window, stride: as of `max_pool2d`.
        padding: zeros around each image; at most half of the window.
        count_padding: whether these zeros count in the mean; else it is that of the pixels in the image.

    Returns:
        (b, oh, ow, c), as of `max_pool2d`.

    Raises:
        ShapeError: as `max_pool2d`, or x has integers, whose means have no place among them.
    """
    if x.dtype.kind in "biu":
        raise ShapeError(f"avg_pool2d: x is {x.dtype}, and a mean is none of these; cast it, as x.astype(np.float32)")
    return AvgPool2d.apply(x, **_pooled("avg_pool2d", window, stride, padding), count_padding=bool(count_padding))
