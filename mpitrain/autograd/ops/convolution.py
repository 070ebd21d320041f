"""Convolution of images: filters that slide over them, in both passes a kernel (`mpitrain.kernels`).

    y[n, i, j, o] = b[o] + sum over dy, dx, c of x[n, i s + dy g - p, j s + dx g - p, c] w[o, dy, dx, c]

with stride s, padding p and dilation g.  What backward needs is the images, not what the filters saw of them, which is
kh kw times as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mpitrain import kernels
from mpitrain.autograd.function import Function
from mpitrain.autograd.lazy import Lazy, rounded, summed
from mpitrain.autograd.needs import NEAR
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, wide
from mpitrain.errors import ShapeError
from mpitrain.kernels.windows import Pair, Windows, pair, windows


class Conv2d(Function):
    """Convolution over dims 1 and 2; saves x.  dw is a recipe, written straight into the gradient buffer."""

    linear = (0, 2)
    bilinear = True
    saved_for = MappingProxyType({0: 1})
    needs = (NEAR,)

    @staticmethod
    def forward(
        x: Array, w: Array, b: Array | None = None, *, stride: Pair, padding: Pair, dilation: Pair, groups: int
    ) -> tuple[Array, tuple[Any, ...]]:
        slide = _slide(x, w, b, stride, padding, dilation, groups)
        return kernels.conv2d(x, w, b, slide, groups), (x, w, slide, x.dtype, None if b is None else b.dtype)

    @staticmethod
    def backward(
        grad: Array,
        x: Array | None,
        w: Array,
        slide: Windows,
        dtype: Any,
        b_dtype: Any,
        *,
        wanted: tuple[bool, ...],
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
    ) -> tuple[Any, ...]:
        if wanted[0] and wanted[1]:
            grad = kernels.factor(grad)
        dx = rounded(kernels.conv2d_images(grad, w, slide, groups), dtype) if wanted[0] else None
        dw = FilterGradient(x, grad, slide, groups, w.dtype) if wanted[1] and x is not None else None
        if len(wanted) == 2:
            return dx, dw
        return dx, dw, summed(kernels.sum_rows(grad), b_dtype) if wanted[2] else None


@dataclass(frozen=True)
class FilterGradient(Lazy):
    """The gradient of filters."""

    x: Array  # (b, h, w, groups c)
    grad: Array  # (b, oh, ow, out)
    slide: Windows
    groups: int
    dtype: Any  # of the filters

    def unrounded(self) -> Array:
        shape = (self.grad.shape[-1], *self.slide.window, self.x.shape[-1] // self.groups)
        out = array_module(self.x).empty(shape, wide(self.dtype))
        self.write(out, add=False)
        return out

    def write(self, out: Array, add: bool) -> None:
        kernels.conv2d_filters(self.x, self.grad, self.slide, out, self.groups, add)


def _slide(x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Windows:
    """Where the filters stand.

    Raises:
        ShapeError: images, filters and bias do not go together.
    """
    if w.ndim != 4 or (x.ndim == 4 and x.shape[-1] != w.shape[-1] * groups) or len(w) % groups:
        text = "" if groups == 1 else f" in {groups} groups: x has c groups channels, and groups divides out"
        raise ShapeError(f"conv2d: x {x.shape} (b, h, w, c) and w {w.shape} (out, kh, kw, c) do not go together{text}")
    if b is not None and b.shape != w.shape[:1]:
        raise ShapeError(f"conv2d: bias {b.shape} does not go with {len(w)} filters, w {w.shape} (out, kh, kw, c)")
    return windows("conv2d", x.shape, w.shape[1:3], stride, padding, dilation)


def conv2d(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
) -> Tensor:
    """Convolution of images with filters (without flipping them, as everywhere in the field), plus a bias.

    Args:
        x: (b, h, w, groups c), channels last.
        w: (out, kh, kw, c).
        b: (out,), or None.
        stride: pixels from a place to the next; a number, or one down and one to the right.
        padding: zeros around each image; likewise.
        dilation: pixels from an element of a filter to the next; likewise.
        groups: into which channels and filters are divided alike: filter o sees those of group o // (out / groups).

    Returns:
        (b, oh, ow, out) with oh = (h + 2 padding - dilation (kh - 1) - 1) // stride + 1, ow likewise.

    Raises:
        ShapeError: x and w do not go together, or the filter is larger than a padded image.

    Cost: 2 out kh kw c floating-point operations a place, twice that in backward; scratch of a block of places.
    """
    if not isinstance(groups, int) or groups < 1:
        raise ShapeError(f"conv2d: groups {groups}; it is a number from 1 on")
    inputs = (x, w) if b is None else (x, w, b)
    return Conv2d.apply(
        *inputs,
        stride=pair(stride, "conv2d", "stride"),
        padding=pair(padding, "conv2d", "padding", least=0),
        dilation=pair(dilation, "conv2d", "dilation"),
        groups=groups,
    )
