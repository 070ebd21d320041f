"""Convolutions, and the largest numbers of windows, on images of a device.

A kernel lays out in rows what the windows see, block by block in scratch that is used again, and cuBLAS multiplies them
(`products`): halves as halves.  Of 1 x 1 windows the images are those rows themselves.  Nothing is added up by atomics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mpitrain.backend import Array, array_module, wide
from mpitrain.kernels import reference
from mpitrain.kernels.cuda.arrays import precision, solid
from mpitrain.kernels.cuda.launch import THREADS, blocks_for, launch
from mpitrain.kernels.cuda.products import matmul
from mpitrain.kernels.reference.convolution import blocks_of_places
from mpitrain.kernels.reference.products import product_dtype
from mpitrain.kernels.windows import Windows

BLOCK = 1 << 25
"""Numbers of a block of rows: 128 MiB in float32, so that the product of one fills a device."""
MOST = 1 << 31
"""Numbers that the rows of a block are fewer than: the kernel counts them in 32 bits."""
PLACES_OF_A_BYTE = 256


def conv2d(x: Array, w: Array, bias: Array | None, slide: Windows, groups: int = 1) -> Array:
    """As the reference; that does it where a row of places alone fills a block of 2^31 numbers."""
    same, filters = _alike(x, w)
    if precision(same, filters, bias) is None or _is_huge(same, slide):
        return reference.conv2d(x, w, bias, slide, groups)
    y = array_module(x).empty((len(x), *slide.places, len(w)), same.dtype)
    if bias is not None:
        y[...] = bias
    filters = _filters(filters, groups).swapaxes(1, 2)
    for (images, rows), seen in _unrolled(same, slide, groups):
        matmul(seen, filters, out=_by_group(y[images, rows], groups), add=bias is not None)
    return y


def conv2d_images(grad: Array, w: Array, slide: Windows, groups: int = 1) -> Array:
    """As the reference: where windows stand at every pixel, a convolution with filters that are turned around."""
    same, filters = _alike(grad, w)
    around = [(k - 1) * g - p for k, g, p in zip(slide.window, slide.dilation, slide.padding, strict=True)]
    back = Windows(slide.places, slide.window, (1, 1), (around[0], around[1]), slide.dilation)  # below 0 cuts off
    is_back = slide.stride == (1, 1)
    if precision(same, filters) is None or not filters.size or (is_back and _is_huge(same, back)):
        return reference.conv2d_images(grad, w, slide, groups)
    if not is_back:
        return _put_back(same, filters, slide, groups)
    out, kh, kw, channels = w.shape
    turned = filters.reshape(groups, out // groups, kh, kw, channels)[:, :, ::-1, ::-1].transpose(0, 2, 3, 1, 4)
    turned = solid(turned).reshape(groups, kh * kw * (out // groups), channels)
    dx = array_module(grad).empty((len(grad), *slide.image, groups * channels), wide(same.dtype))
    for (images, rows), seen in _unrolled(same, back, groups):
        matmul(seen, turned, out=_by_group(dx[images, rows], groups))
    return dx


def _put_back(grad: Array, w: Array, slide: Windows, groups: int) -> Array:
    """What each window's elements want, as rows; then each pixel adds up what was wanted of it."""
    channels = w.shape[-1]
    filters, width = _filters(w, groups), math.prod(slide.window) * groups * channels
    dx = array_module(grad).empty((len(grad), *slide.image, groups * channels), wide(grad.dtype))
    for images, rows in blocks_of_places(len(grad), slide, width, BLOCK):
        wanted = matmul(_by_group(grad[images, rows], groups), filters, dtype=dx.dtype)
        several, part = images.stop - images.start, dx[images]
        numbers = several, rows.start, rows.stop - rows.start, groups, channels, rows.start > 0, *_numbers(slide)
        launch("images", "fold", dx.dtype, blocks_for(part.size), THREADS, wanted, part, *numbers)
    return dx


def conv2d_filters(x: Array, grad: Array, slide: Windows, out: Array, groups: int = 1, add: bool = False) -> None:
    """As the reference: block after block is added to the gradient by cuBLAS itself."""
    same, wanted = _alike(x, grad)
    if precision(same, wanted) is None or _is_huge(same, slide) or not out.flags.c_contiguous:
        reference.conv2d_filters(x, grad, slide, out, groups, add)
        return
    total = _filters(out, groups)
    for (images, rows), seen in _unrolled(same, slide, groups):
        matmul(_by_group(wanted[images, rows], groups).swapaxes(1, 2), seen, out=total, add=add)
        add = True
    if not add:
        out.fill(0)


def max_pool2d(x: Array, slide: Windows) -> tuple[Array, Array]:
    """As the reference; that does it where a window has more places than a byte can name."""
    if precision(x) is None or math.prod(slide.window) > PLACES_OF_A_BYTE:
        return reference.max_pool2d(x, slide)
    xp, channels = array_module(x), x.shape[-1]
    shape = (len(x), *slide.places, channels)
    y, where = xp.empty(shape, x.dtype), xp.empty(shape, np.uint8)
    numbers = len(x), channels, *_numbers(slide)
    launch("images", "max_pool", x.dtype, blocks_for(y.size), THREADS, solid(x), y, where, *numbers)
    return y, where


def max_pool2d_backward(grad: Array, where: Array, slide: Windows) -> Array:
    """As the reference; each pixel adds up the windows whose largest it was."""
    if precision(grad) is None or where.dtype != np.uint8:
        return reference.max_pool2d_backward(grad, where, slide)
    channels = grad.shape[-1]
    dx = array_module(grad).empty((len(grad), *slide.image, channels), wide(grad.dtype))
    given = solid(grad), solid(where), dx, len(grad), channels, *_numbers(slide)
    launch("images", "max_pool_backward", grad.dtype, blocks_for(dx.size), THREADS, *given)
    return dx


def _alike(x: Array, w: Array) -> tuple[Array, Array]:
    """Both of one dtype, without gaps: the one in which their product is formed, where they differ."""
    if x.dtype != w.dtype:
        dtype = wide(product_dtype(x, w))
        x, w = x.astype(dtype, copy=False), w.astype(dtype, copy=False)
    return solid(x), solid(w)


def _is_huge(x: Array, slide: Windows) -> bool:
    return slide.places[1] * math.prod(slide.window) * x.shape[-1] >= MOST


def _filters(w: Array, groups: int) -> Array:
    """(groups, out / groups, kh kw c)."""
    return w.reshape(groups, len(w) // groups, math.prod(w.shape[1:]))


def _by_group(part: Array, groups: int) -> Array:
    """Places as (groups, places, channels of a group): the same memory."""
    places = math.prod(part.shape[:3])
    return part.reshape(places, groups, part.shape[3] // groups).swapaxes(0, 1)


def _numbers(slide: Windows) -> tuple[int, ...]:
    """What kernels are told of windows."""
    return (*slide.image, *slide.window, *slide.places, *slide.stride, *slide.padding, *slide.dilation)


def _unrolled(x: Array, slide: Windows, groups: int) -> Iterator[tuple[tuple[slice, slice], Array]]:
    """What is seen from the places, block by block.

    Yields:
        ((images, rows of places), (groups, places, kh kw c)): the matrix is the same memory each time.
    """
    down, right = slide.places
    if (slide.window, slide.stride, slide.padding) == ((1, 1), (1, 1), (0, 0)):
        if len(x):
            yield (slice(0, len(x)), slice(0, down)), _by_group(x, groups)
        return
    channels, elements = x.shape[-1] // groups, math.prod(slide.window)
    scratch = None
    for images, rows in blocks_of_places(len(x), slide, elements * x.shape[-1], BLOCK):
        several, height = images.stop - images.start, rows.stop - rows.start
        shape = (groups, several * height * right, elements * channels)
        if scratch is None:  # the first block is the largest
            scratch = array_module(x).empty(math.prod(shape), x.dtype)
        seen = scratch[: math.prod(shape)]
        part = x[images]
        unit = _unit(part, channels)
        given = part, seen, several, rows.start, height, groups, channels * x.itemsize // unit, *_numbers(slide)
        launch("images", f"unroll{unit}", np.float32, blocks_for(seen.nbytes // unit), THREADS, *given)
        yield (images, rows), seen.reshape(shape)


def _unit(x: Array, channels: int) -> int:
    """Bytes that a thread moves at a time: as many as divide the channels of a group, and the address of x."""
    together = math.gcd(channels * x.itemsize, x.data.ptr, 16)
    return max(2, together)
