"""Convolution of images: one product of matrices for a block of places, whose pixels are laid out in rows first.

What the window sees from one place is a row of kh kw c numbers, a column of the paper's: the sum is its product with
each filter.  The matrix of all those rows would be kh kw times as large as the images, so it is made block by block, in
scratch that stays in cache, and never kept: backward makes rows of the images again.  With groups there is a matrix for
each, of its own channels.

Source: Chellapilla, Puri and Simard 2006, "High performance convolutional neural networks for document processing",
section 4.1 (unrolling of convolutions).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module, wide
from mpitrain.kernels.reference.halves import narrow, widen
from mpitrain.kernels.reference.products import matmul, product_dtype
from mpitrain.kernels.windows import Windows

BLOCK = 1 << 18
"""Elements of a block of rows on the CPU: 1 MiB in float32, about a second-level cache."""

DEVICE_BLOCK = 1 << 26
"""On a device, which a small product would leave idle: 256 MiB of scratch."""


def conv2d(x: Array, w: Array, bias: Array | None, slide: Windows, groups: int = 1) -> Array:
    """Filters over images, plus a bias.

    Args:
        x: (b, h, w, groups c).
        w: (out, kh, kw, c).
        bias: (out,), or None.
        slide: where the filters stand.
        groups: into which channels and filters are divided alike; filters see the channels of their own.

    Returns:
        (b, oh, ow, out).
    """
    xp, dtype = array_module(x), product_dtype(x, w)
    filters = _filters(w, groups, wide(dtype)).swapaxes(1, 2)
    y = xp.empty((len(x), *slide.places, len(w)), wide(dtype))
    for at, rows in _unrolled(x, slide, groups, y.dtype):
        block = y[at]
        if groups == 1:
            matmul(rows[0], filters[0], out=block.reshape(rows.shape[1], len(w)))
        else:
            block[...] = matmul(rows, filters).swapaxes(0, 1).reshape(block.shape)
    if bias is not None:
        y += bias if bias.dtype.itemsize > 2 else widen(bias)
    return y if y.dtype == dtype else narrow(y, dtype)


def conv2d_images(grad: Array, w: Array, slide: Windows, groups: int = 1) -> Array:
    """The gradient of the images: each element of the window brings to the pixels that it saw what was wanted of it.

    A product for each element, so its rows are whole rows of pixels: adding those is faster than to add the parts of
    one large product, whose runs are a pixel long.

    Args:
        grad: (b, oh, ow, out).
        w: (out, kh, kw, c).
        slide, groups: as in forward.

    Returns:
        (b, h, w, groups c), in at least float32.
    """
    xp, dtype = array_module(grad), wide(product_dtype(grad, w))
    channels, each = groups * w.shape[-1], len(w) // groups
    by_group = w.astype(dtype, copy=False).reshape(groups, each, *w.shape[1:])
    dx = xp.zeros((len(grad), *slide.image, channels), dtype)
    for images, rows in blocks_of_places(len(grad), slide, channels, _most(xp)):
        wanted = _wide(grad[images, rows])
        places = wanted.shape[:3]
        matrix = wanted.reshape(math.prod(places), groups, each).swapaxes(0, 1)
        part = dx[images]
        for (dy, dz), (down, right), (y, z) in slide.elements(rows.start, rows.stop):
            back = matmul(matrix, by_group[:, :, dy, dz]).swapaxes(0, 1).reshape(*places, channels)
            part[:, y, z] += back[:, down, right]
    return dx


def conv2d_filters(x: Array, grad: Array, slide: Windows, out: Array, groups: int = 1, add: bool = False) -> None:
    """The gradient of the filters: the sum over all places of what was wanted there times what was seen from there.

    Args:
        x: (b, h, w, groups c).
        grad: (b, oh, ow, out).
        slide, groups: as in forward.
        out: (out, kh, kw, c) in at least float32, C-contiguous; where the gradient is written.
        add: to what is there.
    """
    assert out.flags.c_contiguous, "what is reshaped below would be a copy"
    total = out.reshape(groups, len(out) // groups, math.prod(out.shape[1:]))
    for at, rows in _unrolled(x, slide, groups, out.dtype):
        wanted = _wide(grad[at]).reshape(rows.shape[1], groups, total.shape[1]).transpose(1, 2, 0)
        if add:
            total += matmul(wanted, rows)
        else:
            matmul(wanted, rows, out=total)
        add = True
    if not add:
        out[...] = 0


def _wide(x: Array) -> Array:
    return widen(x) if x.dtype.itemsize == 2 else x


def _filters(w: Array, groups: int, dtype: Any) -> Array:
    """(groups, out / groups, kh kw c) in the dtype to compute in."""
    return w.reshape(groups, len(w) // groups, math.prod(w.shape[1:])).astype(dtype, copy=False)


def _unrolled(x: Array, slide: Windows, groups: int, dtype: Any) -> Iterator[tuple[tuple[slice, slice], Array]]:
    """What is seen from the places, block by block.

    Yields:
        ((images, rows of places), (groups, places, kh kw c)): the matrix is the same memory each time.
    """
    xp = array_module(x)
    scratch = None
    before = None
    channels = x.shape[-1] // groups
    for images, rows in blocks_of_places(len(x), slide, math.prod(slide.window) * x.shape[-1], _most(xp)):
        several = images.stop - images.start
        shape = (groups, several, rows.stop - rows.start, slide.places[1], *slide.window, channels)
        if scratch is None:
            scratch = xp.empty(shape, dtype)
        seen = scratch[:, : shape[1], : shape[2]]
        if rows != before:  # else what lies outside of the images is where it was
            seen[...] = 0
            before = rows
        part = _wide(x[images])
        part = part.reshape(several, *slide.image, groups, channels).transpose(3, 0, 1, 2, 4)
        for (dy, dx), (down, right), (y, z) in slide.elements(rows.start, rows.stop):
            seen[:, :, down, right, dy, dx] = part[:, :, y, z]
        yield (images, rows), seen.reshape(groups, math.prod(shape[1:4]), math.prod(shape[4:]))


def _most(xp: Any) -> int:
    return BLOCK if xp is np else DEVICE_BLOCK


def blocks_of_places(images: int, slide: Windows, width: int, most: int) -> Iterator[tuple[slice, slice]]:
    """(images, rows of places) that are about a block: whole images, or of one image some rows.

    Args:
        images: how many there are.
        slide: what slides over them.
        width: numbers of scratch that a place takes.
        most: numbers of a block.
    """
    down, right = slide.places
    row = max(1, right * width)
    if row * down <= most:
        several = most // (row * down)
        for start in range(0, images, several):
            yield slice(start, min(start + several, images)), slice(0, down)
        return
    height = max(1, most // row)
    for image in range(images):
        for start in range(0, down, height):
            yield slice(image, image + 1), slice(start, min(start + height, down))
