"""The fast versions for images: convolution and the largest numbers of windows, computed by `csrc`.

NumPy arrays of float32, float64 or one half precision go to C, anything else to the reference.  Halves are widened some
images at a time, and what is made of them is rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mpitrain.backend import Array, is_half
from mpitrain.kernels import _compiled, reference
from mpitrain.kernels.windows import Windows

_PRECISIONS = (np.dtype(np.float32), np.dtype(np.float64))
BLOCK = 1 << 17
"""Elements of images that are widened at a time."""
PLACES_OF_A_BYTE = 256


def conv2d(x: Array, w: Array, bias: Array | None, slide: Windows, groups: int = 1) -> Array:
    """As the reference."""
    if not _alike(x, w) or (bias is not None and (not _is_ours(bias) or bias.dtype != x.dtype)):
        return reference.conv2d(x, w, bias, slide, groups)
    y = np.empty((len(x), *slide.places, len(w)), x.dtype)
    _convolve(x, _wide(w), None if bias is None else _wide(bias), y, w.shape, slide, groups, turned=False)
    return y


def conv2d_images(grad: Array, w: Array, slide: Windows, groups: int = 1) -> Array:
    """Where filters stand at every pixel, a convolution of the gradient with filters that are turned around."""
    down, right = ((k - 1) * g - p for k, g, p in zip(slide.window, slide.dilation, slide.padding, strict=True))
    fits = _is_ours(grad) and _is_ours(w) and w.size and (grad.dtype == w.dtype or _wide_dtype(w) == grad.dtype)
    if slide.stride != (1, 1) or min(down, right) < 0 or not fits:
        return reference.conv2d_images(grad, w, slide, groups)
    out, kh, kw, channels = w.shape
    dx = np.empty((len(grad), *slide.image, groups * channels), _wide_dtype(grad))
    slide = Windows(slide.places, slide.window, (1, 1), (down, right), slide.dilation)
    _convolve(grad, _wide(w), None, dx, (groups * channels, kh, kw, out // groups), slide, groups, turned=True)
    return dx


def _convolve(
    x: Array,
    w: Array,
    bias: Array | None,
    y: Array,
    filters: tuple[int, ...],
    slide: Windows,
    groups: int,
    turned: bool,
) -> None:
    """Write y, of the precision of x or of that in which is computed; `filters` is the shape of w if it is turned."""
    for images in _blocks(x):
        part = _wide(x[images])
        out = y[images] if y.dtype == part.dtype else np.empty(y[images].shape, part.dtype)
        numbers = _geometry(slide, len(part), filters, groups)
        _compiled.conv2d(part, w, bias, out, turned, _scratch(part, numbers, backward=False), *numbers)
        if out.dtype != y.dtype:
            reference.narrow(out, y.dtype, y[images])


def conv2d_filters(x: Array, grad: Array, slide: Windows, out: Array, groups: int = 1, add: bool = False) -> None:
    """As the reference."""
    compute = out.dtype
    ours = _is_ours(x) and _is_ours(grad) and type(out) is np.ndarray and compute in _PRECISIONS
    fits = all(a.dtype == compute or (is_half(a.dtype) and compute == np.float32) for a in (x, grad))
    if not ours or not fits or not len(x) or not out.size or not out.flags.aligned:
        reference.conv2d_filters(x, grad, slide, out, groups, add)
        return
    for images in _blocks(x, grad):
        part, wanted = _wide(x[images]), _wide(grad[images])
        numbers = _geometry(slide, len(part), out.shape, groups)
        _compiled.conv2d_filters(part, wanted, out, add, _scratch(part, numbers, backward=True), *numbers)
        add = True


def max_pool2d(x: Array, slide: Windows) -> tuple[Array, Array]:
    """As the reference."""
    if not _is_ours(x) or not _is_small(slide) or not x.shape[-1]:
        return reference.max_pool2d(x, slide)
    shape = (len(x), *slide.places, x.shape[-1])
    y, where = np.empty(shape, _wide_dtype(x)), np.empty(shape, np.uint8)
    _compiled.max_pool2d(_wide(x), y, where, *_geometry(slide, len(x), (1, *slide.window, x.shape[-1]), 1))
    return y if y.dtype == x.dtype else reference.narrow(y, x.dtype), where


def max_pool2d_backward(grad: Array, where: Array, slide: Windows) -> Array:
    """As the reference."""
    channels = grad.shape[-1]
    if not _is_ours(grad) or type(where) is not np.ndarray or where.dtype != np.uint8 or not channels:
        return reference.max_pool2d_backward(grad, where, slide)
    dx = np.empty((len(grad), *slide.image, channels), _wide_dtype(grad))
    numbers = _geometry(slide, len(grad), (1, *slide.window, channels), 1)
    _compiled.max_pool2d_backward(_wide(grad), np.ascontiguousarray(where), dx, *numbers)
    return dx


def _is_ours(x: Array) -> bool:
    return type(x) is np.ndarray and (x.dtype in _PRECISIONS or is_half(x.dtype))


def _alike(x: Array, w: Array) -> bool:
    """Whether C computes with both, which are of one precision."""
    return _is_ours(x) and _is_ours(w) and x.dtype == w.dtype and x.shape[-1] > 0 and len(w) > 0


def _is_small(slide: Windows) -> bool:
    """Whether a place in the window fits a byte."""
    return slide.window[0] * slide.window[1] <= PLACES_OF_A_BYTE


def _wide_dtype(x: Array) -> Any:
    return np.dtype(np.float32) if is_half(x.dtype) else x.dtype


def _wide(x: Array) -> Array:
    """x in the precision to compute in, C-contiguous, each number at a multiple of its size."""
    if is_half(x.dtype):
        return np.ascontiguousarray(reference.widen(x))
    return x if x.flags.c_contiguous and x.flags.aligned else x.copy()


def _blocks(x: Array, other: Array | None = None) -> Iterator[slice]:
    """Some images at a time, of halves; else all."""
    if not len(x):
        return
    halves = is_half(x.dtype) or (other is not None and is_half(other.dtype))
    size = max(x.size, 0 if other is None else other.size) // len(x)
    step = max(1, BLOCK // max(1, size)) if halves else len(x)
    for start in range(0, len(x), step):
        yield slice(start, min(start + step, len(x)))


def _geometry(slide: Windows, images: int, filters: tuple[int, ...], groups: int) -> tuple[int, ...]:
    """What C needs to know of images and filters (out, kh, kw, c)."""
    out, kh, kw, channels = filters
    pairs = (*slide.stride, *slide.padding, *slide.dilation)
    return (images, *slide.image, channels, out // groups, groups, kh, kw, *pairs)


def _scratch(x: Array, numbers: tuple[int, ...], backward: bool) -> Array:
    return np.empty(_compiled.convolution_scratch(backward, x.itemsize, *numbers), np.uint8)
