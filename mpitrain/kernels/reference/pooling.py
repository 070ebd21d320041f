"""Maxima in a window that slides over images."""

from __future__ import annotations

import numpy as np

from mpitrain.backend import Array, array_module, is_half, wide
from mpitrain.kernels.reference.halves import narrow, widen
from mpitrain.kernels.windows import Windows


def max_pool2d(x: Array, slide: Windows) -> tuple[Array, Array]:
    """The largest number of each window; of those that lie outside of the image none counts.

    Returns:
        ((b, oh, ow, c) the maxima, and where in the window they were, counted row by row: of equal ones the first, and
        what is not a number before all others).
    """
    xp, dtype = array_module(x), x.dtype
    x = widen(x) if is_half(dtype) else x
    shape = (len(x), *slide.places, x.shape[-1])
    y = xp.full(shape, -xp.inf, x.dtype)
    where = xp.zeros(shape, np.min_scalar_type(slide.window[0] * slide.window[1] - 1))
    is_met = xp.zeros(shape, bool)
    for (dy, dx), (down, right), (i, j) in slide.elements():
        seen, best, place = x[:, i, j], y[:, down, right], where[:, down, right]
        met = is_met[:, down, right]
        better = (seen > best) | ((seen != seen) & (best == best)) | ~met
        best[...] = xp.where(better, seen, best)
        place[...] = xp.where(better, dy * slide.window[1] + dx, place)
        met[...] = True
    return narrow(y, dtype) if is_half(dtype) else y, where


def max_pool2d_backward(grad: Array, where: Array, slide: Windows) -> Array:
    """The gradient of the images: what was wanted of a window goes to the pixel that was its largest.

    Args:
        grad: (b, oh, ow, c).
        where: as `max_pool2d` gives it.

    Returns:
        (b, h, w, c) in at least float32.
    """
    xp = array_module(grad)
    shape = (len(grad), *slide.image, grad.shape[-1])
    dx = xp.zeros(shape, wide(grad.dtype))
    grad = widen(grad) if is_half(grad.dtype) else grad
    for (dy, dz), (down, right), (i, j) in slide.elements():
        part = xp.where(where[:, down, right] == dy * slide.window[1] + dz, grad[:, down, right], grad.dtype.type(0))
        if slide.overlap:
            dx[:, i, j] += part
        else:
            dx[:, i, j] = part
    return dx
