"""Convolution of images: one product of matrices for a block of places, whose pixels are laid out in rows first.

    y[n, i, j, o] = b[o] + sum over dy, dx, c of x[n, i s + dy - p, j s + dx - p, c] w[o, dy, dx, c]

What the window sees from one place is a row of kh kw c numbers, a column of the paper's: the sum is its product with
each filter.  The matrix of all those rows would be kh kw times as large as the images, so it is made block by block, in
scratch that stays in cache, and never kept: x waits for backward, which makes rows of it again.

Source: Chellapilla, Puri and Simard 2006, "High performance convolutional neural networks for document processing",
section 4.1 (unrolling of convolutions).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitrain import kernels
from mpitrain.autograd.function import Function
from mpitrain.autograd.lazy import Lazy, rounded, summed, widened
from mpitrain.autograd.needs import NEAR
from mpitrain.autograd.ops.windows import Pair, Windows, pair, windows
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, wide
from mpitrain.errors import ShapeError
from mpitrain.kernels.reference.products import product_dtype

BLOCK = 1 << 18
"""Elements of a block of rows on the CPU: 1 MiB in float32, about a second-level cache."""

DEVICE_BLOCK = 1 << 26
"""On a device, which a small product would leave idle: 256 MiB of scratch."""


class Conv2d(Function):
    """Convolution over dims 1 and 2; saves x.  dw is a recipe, written straight into the gradient buffer."""

    linear = (0, 2)
    bilinear = True
    needs = (NEAR,)

    @staticmethod
    def forward(
        x: Array, w: Array, b: Array | None = None, *, stride: Pair, padding: Pair
    ) -> tuple[Array, tuple[Any, ...]]:
        slide = _slide(x, w, stride, padding)
        dtype = product_dtype(x, w)
        filters = _filters(w, wide(dtype)).T
        y = array_module(x).empty((len(x), *slide.places, len(w)), wide(dtype))
        for at, rows in _unrolled(x, slide, y.dtype):
            kernels.matmul(rows, filters, out=y[at].reshape(len(rows), len(w)))
        if b is not None:
            y += b
        return rounded(y, dtype), (x, w, None if b is None else b.dtype)

    @staticmethod
    def backward(
        grad: Array, x: Array, w: Array, b_dtype: Any, *, wanted: tuple[bool, ...], stride: Pair, padding: Pair
    ) -> tuple[Any, ...]:
        slide = _slide(x, w, stride, padding)
        grad = widened(grad)
        dx = rounded(_spread(grad, w, x.shape, slide), x.dtype) if wanted[0] else None
        dw = FilterGradient(x, grad, slide, w.dtype) if wanted[1] else None
        if len(wanted) == 2:
            return dx, dw
        return dx, dw, summed(kernels.sum_rows(grad), b_dtype) if wanted[2] else None


@dataclass(frozen=True)
class FilterGradient(Lazy):
    """The gradient of filters: the sum over all places of what was wanted there times what was seen from there."""

    x: Array  # (b, h, w, c)
    grad: Array  # (b, oh, ow, o), at least float32
    slide: Windows
    dtype: Any  # of the filters

    def unrounded(self) -> Array:
        shape = (self.grad.shape[-1], *self.slide.window, self.x.shape[-1])
        out = array_module(self.x).empty(shape, wide(self.dtype))
        self.write(out, add=False)
        return out

    def write(self, out: Array, add: bool) -> None:
        assert out.flags.c_contiguous, "what is reshaped below would be a copy"
        total = out.reshape(len(out), math.prod(out.shape[1:]))
        for at, rows in _unrolled(self.x, self.slide, wide(self.grad.dtype)):
            wanted = self.grad[at].reshape(len(rows), len(out)).T
            if add:
                total += kernels.matmul(wanted, rows)
            else:
                kernels.matmul(wanted, rows, out=total)
            add = True
        if not add:
            out[...] = 0


def _slide(x: Array, w: Array, stride: Pair, padding: Pair) -> Windows:
    """Where the filters stand.

    Raises:
        ShapeError: images and filters do not go together.
    """
    if w.ndim != 4 or (x.ndim == 4 and x.shape[-1] != w.shape[-1]):
        raise ShapeError(f"conv2d: x {x.shape} (b, h, w, c) and w {w.shape} (out, kh, kw, c) do not go together")
    return windows("conv2d", x.shape, w.shape[1:3], stride, padding)


def _filters(w: Array, dtype: Any) -> Array:
    """(out, kh kw c) in the dtype to compute in."""
    return w.reshape(len(w), math.prod(w.shape[1:])).astype(dtype, copy=False)


def _unrolled(x: Array, slide: Windows, dtype: Any) -> Iterator[tuple[tuple[slice, slice], Array]]:
    """What is seen from the places, block by block.

    Yields:
        ((images, rows of places), (places, kh kw c)): the matrix is the same memory each time.
    """
    xp = array_module(x)
    scratch = None
    before = None
    for images, rows in _blocks(xp, len(x), slide, math.prod(slide.window) * x.shape[-1]):
        shape = (images.stop - images.start, rows.stop - rows.start, slide.places[1], *slide.window, x.shape[-1])
        if scratch is None:
            scratch = xp.empty(shape, dtype)
        seen = scratch[: shape[0], : shape[1]]
        if rows != before:  # else what lies outside of the images is where it was
            seen[...] = 0
            before = rows
        part = widened(x[images])
        for (dy, dx), (down, right), (y, z) in slide.elements(rows.start, rows.stop):
            seen[:, down, right, dy, dx] = part[:, y, z]
        yield (images, rows), seen.reshape(math.prod(shape[:3]), math.prod(shape[3:]))


def _spread(grad: Array, w: Array, shape: tuple[int, ...], slide: Windows) -> Array:
    """The gradient of the images: each element of the window brings to the pixels that it saw what was wanted of it.

    A product for each element, so its rows are whole rows of pixels: adding those is faster than to add the parts of
    one large product, whose runs are a pixel long.
    """
    xp = array_module(grad)
    w = w.astype(grad.dtype, copy=False)
    dx = xp.zeros(shape, grad.dtype)
    for images, rows in _blocks(xp, shape[0], slide, shape[-1]):
        wanted = grad[images, rows]
        places = wanted.shape[:3]
        matrix = wanted.reshape(math.prod(places), len(w))
        part = dx[images]
        for (dy, dz), (down, right), (y, z) in slide.elements(rows.start, rows.stop):
            back = kernels.matmul(matrix, w[:, dy, dz]).reshape(*places, shape[-1])
            part[:, y, z] += back[:, down, right]
    return dx


def _blocks(xp: Any, images: int, slide: Windows, width: int) -> Iterator[tuple[slice, slice]]:
    """(images, rows of places) that are about a block: whole images, or of one image some rows.

    Args:
        xp: the module of the arrays.
        images: how many there are.
        slide: what slides over them.
        width: numbers of scratch that a place takes.
    """
    most = BLOCK if xp is np else DEVICE_BLOCK
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


def conv2d(x: Tensor, w: Tensor, b: Tensor | None = None, stride: int | Pair = 1, padding: int | Pair = 0) -> Tensor:
    """Convolution of images with filters (without flipping them, as everywhere in the field), plus a bias.

    Args:
        x: (b, h, w, c), channels last.
        w: (out, kh, kw, c).
        b: (out,), or None.
        stride: pixels from a place to the next; a number, or one down and one to the right.
        padding: zeros around each image; likewise.

    Returns:
        (b, oh, ow, out) with oh = (h + 2 padding - kh) // stride + 1, ow likewise.

    Raises:
        ShapeError: x and w do not go together, or the filter is larger than a padded image.

    Cost: 2 out kh kw c floating-point operations a place, twice that in backward; scratch of a block of places.
    """
    inputs = (x, w) if b is None else (x, w, b)
    return Conv2d.apply(
        *inputs, stride=pair(stride, "conv2d", "stride"), padding=pair(padding, "conv2d", "padding", least=0)
    )
