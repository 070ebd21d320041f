"""Operations along dims: sums, maxima, softmax.  Sums are formed in at least float32."""

from __future__ import annotations

import math
from typing import Any

from mpitrain import kernels
from mpitrain.autograd.function import Function
from mpitrain.autograd.lazy import rounded, widened
from mpitrain.autograd.needs import NEAR
from mpitrain.autograd.ops.single import in_single
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, wide
from mpitrain.errors import ShapeError

Dims = tuple[int, ...]


def _total(x: Array, dims: Dims, keepdims: bool) -> Array:
    return rounded(x.sum(axis=dims, keepdims=keepdims, dtype=wide(x.dtype)), x.dtype)


def spread(y: Array, shape: tuple[int, ...], dims: Dims) -> Array:
    """A reduced array with its lost dims back, of length 1."""
    return y.reshape(tuple([1 if i in dims else n for i, n in enumerate(shape)]))


class Sum(Function):
    """Sum over dims; its gradient is a broadcast view."""

    linear = (0,)

    @staticmethod
    def forward(x: Array, *, dims: Dims, keepdims: bool) -> tuple[Array, tuple[Any, ...]]:
        return _total(x, dims, keepdims), (x.shape,)

    @staticmethod
    def backward(
        grad: Array, shape: tuple[int, ...], *, wanted: tuple[bool, ...], dims: Dims, keepdims: bool
    ) -> tuple[Any, ...]:
        return (array_module(grad).broadcast_to(spread(grad, shape, dims), shape),)


class Mean(Function):
    """Mean over dims."""

    linear = (0,)

    @staticmethod
    def forward(x: Array, *, dims: Dims, keepdims: bool) -> tuple[Array, tuple[Any, ...]]:
        compute = wide(x.dtype)
        y = x.sum(axis=dims, keepdims=keepdims, dtype=compute) / count(x.shape, dims)
        return rounded(y, x.dtype), (x.shape,)

    @staticmethod
    def backward(
        grad: Array, shape: tuple[int, ...], *, wanted: tuple[bool, ...], dims: Dims, keepdims: bool
    ) -> tuple[Any, ...]:
        each = in_single(lambda grad: grad / count(shape, dims), spread(grad, shape, dims))
        return (array_module(grad).broadcast_to(each, shape),)


def count(shape: tuple[int, ...], dims: Dims) -> int:
    """How many elements lie along some dims."""
    return math.prod([shape[dim] for dim in dims])


class Max(Function):
    """Maximum over dims; equal maxima share the gradient."""

    @staticmethod
    def forward(x: Array, *, dims: Dims, keepdims: bool) -> tuple[Array, tuple[Any, ...]]:
        y = x.max(axis=dims, keepdims=keepdims)
        return y, (x, y)

    @staticmethod
    def backward(
        grad: Array, x: Array, y: Array, *, wanted: tuple[bool, ...], dims: Dims, keepdims: bool
    ) -> tuple[Any, ...]:
        hits = x == spread(y, x.shape, dims)
        shares = hits.sum(axis=dims, keepdims=True).astype(wide(x.dtype))  # a half does not count beyond 2048
        each = in_single(lambda grad: grad / shares, spread(grad, x.shape, dims))
        return (hits * each,)


class Min(Max):
    """Minimum over dims; equal minima share the gradient."""

    @staticmethod
    def forward(x: Array, *, dims: Dims, keepdims: bool) -> tuple[Array, tuple[Any, ...]]:
        y = x.min(axis=dims, keepdims=keepdims)
        return y, (x, y)


class Logsumexp(Function):
    """log(sum(exp(x))) over dims, without overflow."""

    @staticmethod
    def forward(x: Array, *, dims: Dims, keepdims: bool) -> tuple[Array, tuple[Any, ...]]:
        xp = array_module(x)
        z = widened(x)
        lowest = xp.finfo(z.dtype).min
        highest = xp.maximum(z.max(axis=dims, keepdims=True), lowest)  # -inf - -inf would be NaN
        total = xp.exp(z - highest).sum(axis=dims, keepdims=True)
        y = xp.log(xp.maximum(total, xp.finfo(z.dtype).tiny)) + highest
        y = xp.where(total > 0, y, -math.inf).astype(z.dtype, copy=False)
        shape = y.shape if keepdims else tuple([n for i, n in enumerate(x.shape) if i not in dims])
        return rounded(y.reshape(shape), x.dtype), (x, y)

    @staticmethod
    def backward(
        grad: Array, x: Array, y: Array, *, wanted: tuple[bool, ...], dims: Dims, keepdims: bool
    ) -> tuple[Any, ...]:
        xp = array_module(x)
        p = xp.exp(widened(x) - xp.maximum(y, xp.finfo(y.dtype).min)) * widened(spread(grad, x.shape, dims))
        return (rounded(p, x.dtype),)


class Var(Function):
    """Variance over dims: the mean squared distance from the mean, in two passes."""

    @staticmethod
    def forward(x: Array, *, dims: Dims, keepdims: bool, correction: int) -> tuple[Array, tuple[Any, ...]]:
        centered = _centered(x, dims)
        y = (centered * centered).sum(axis=dims, keepdims=keepdims) / (count(x.shape, dims) - correction)
        return rounded(y, x.dtype), (x,)

    @staticmethod
    def backward(
        grad: Array, x: Array, *, wanted: tuple[bool, ...], dims: Dims, keepdims: bool, correction: int
    ) -> tuple[Any, ...]:
        dx = _centered(x, dims)
        dx *= widened(spread(grad, x.shape, dims))
        dx *= 2.0 / (count(x.shape, dims) - correction)
        return (rounded(dx, x.dtype),)


def _centered(x: Array, dims: Dims) -> Array:
    """Distances from the mean; exactly 0 where all elements are equal, whose mean may be rounded."""
    z = widened(x)
    z = z - z[tuple([slice(1) if dim in dims else slice(None) for dim in range(x.ndim)])]
    z -= z.sum(axis=dims, keepdims=True) / count(x.shape, dims)
    return z


class Std(Function):
    """Standard deviation over dims: the root of the variance; its slope where all elements are equal is 0."""

    @staticmethod
    def forward(x: Array, *, dims: Dims, keepdims: bool, correction: int) -> tuple[Array, tuple[Any, ...]]:
        centered = _centered(x, dims)
        y = (centered * centered).sum(axis=dims, keepdims=keepdims) / (count(x.shape, dims) - correction)
        y = array_module(x).sqrt(y)
        return rounded(y, x.dtype), (x, y)

    @staticmethod
    def backward(
        grad: Array, x: Array, y: Array, *, wanted: tuple[bool, ...], dims: Dims, keepdims: bool, correction: int
    ) -> tuple[Any, ...]:
        xp = array_module(x)
        slope = widened(grad) / xp.where(y == 0, math.inf, y).astype(y.dtype, copy=False)
        dx = _centered(x, dims)
        dx *= spread(slope, x.shape, dims)
        dx *= 1.0 / (count(x.shape, dims) - correction)
        return (rounded(dx, x.dtype),)


class Softmax(Function):
    """exp(x) over its sum along a dim; saves its value."""

    needs = (NEAR,)

    @staticmethod
    def forward(x: Array, mask: Array | None = None, *, dim: int) -> tuple[Array, tuple[Any, ...]]:
        y = kernels.softmax(x, dim, mask)
        return y, (y,)

    @staticmethod
    def backward(grad: Array, y: Array, *, wanted: tuple[bool, ...], dim: int) -> tuple[Any, ...]:
        return (kernels.softmax_backward(grad, y, dim), None)[: len(wanted)]


class LogSoftmax(Function):
    """x - logsumexp(x) along a dim; saves its value."""

    @staticmethod
    def forward(x: Array, *, dim: int) -> tuple[Array, tuple[Any, ...]]:
        xp = array_module(x)
        y = x.astype(wide(x.dtype), copy=True)
        if y.size:
            y -= xp.maximum(y.max(axis=dim, keepdims=True), xp.finfo(y.dtype).min)
            y -= xp.log(xp.exp(y).sum(axis=dim, keepdims=True))
        y = rounded(y, x.dtype)
        return y, (y,)

    @staticmethod
    def backward(grad: Array, y: Array, *, wanted: tuple[bool, ...], dim: int) -> tuple[Any, ...]:
        xp = array_module(y)
        p = y.astype(wide(y.dtype), copy=True)
        xp.exp(p, out=p)
        p *= grad.sum(axis=dim, keepdims=True, dtype=p.dtype)
        return (rounded(xp.subtract(widened(grad), p), y.dtype),)


# ------------------------------------------------------------------------------------------------------- as functions


def dims_of(x: Tensor, dim: int | Dims | None, op: str) -> Dims:
    """All dims for None, else the given ones counted from 0.

    Raises:
        ShapeError: a dim that x does not have, or one twice.
    """
    if dim is None:
        return tuple(range(x.ndim))
    given = (dim,) if isinstance(dim, int) else tuple(dim)
    dims = tuple([d + x.ndim if d < 0 else d for d in given])
    if len(set(dims)) != len(dims) or any(not 0 <= d < x.ndim for d in dims):
        raise ShapeError(f"{op}: dim {dim} of a tensor of shape {x.shape}")
    return dims


def some(x: Tensor, dims: Dims, op: str) -> Dims:
    """The dims.

    Raises:
        ShapeError: x has no elements along them.
    """
    if count(x.shape, dims) == 0:
        raise ShapeError(f"{op} over dims {dims} of a tensor of shape {x.shape}: there are no elements")
    return dims


def sum(x: Tensor, dim: int | Dims | None = None, keepdims: bool = False) -> Tensor:
    """Sum over a dim, several, or all."""
    return Sum.apply(x, dims=dims_of(x, dim, "sum"), keepdims=keepdims)


def mean(x: Tensor, dim: int | Dims | None = None, keepdims: bool = False) -> Tensor:
    """Mean over a dim, several, or all."""
    return Mean.apply(x, dims=some(x, dims_of(x, dim, "mean"), "mean"), keepdims=keepdims)


def max(x: Tensor, dim: int | Dims | None = None, keepdims: bool = False) -> Tensor:
    """Maximum over a dim, several, or all; equal maxima share the gradient."""
    return Max.apply(x, dims=some(x, dims_of(x, dim, "max"), "max"), keepdims=keepdims)


def min(x: Tensor, dim: int | Dims | None = None, keepdims: bool = False) -> Tensor:
    """Minimum over a dim, several, or all; equal minima share the gradient."""
    return Min.apply(x, dims=some(x, dims_of(x, dim, "min"), "min"), keepdims=keepdims)


def logsumexp(x: Tensor, dim: int | Dims | None = None, keepdims: bool = False) -> Tensor:
    """log(sum(exp(x))) over a dim, several, or all; -inf where all of x is."""
    return Logsumexp.apply(x, dims=some(x, dims_of(x, dim, "logsumexp"), "logsumexp"), keepdims=keepdims)


def var(x: Tensor, dim: int | Dims | None = None, keepdims: bool = False, correction: int = 0) -> Tensor:
    """Variance over a dim, several, or all: divided by the number of elements less `correction`.

    Raises:
        ShapeError: no more elements than `correction`.
    """
    return Var.apply(x, dims=_corrected(x, dim, correction, "var"), keepdims=keepdims, correction=correction)


def std(x: Tensor, dim: int | Dims | None = None, keepdims: bool = False, correction: int = 0) -> Tensor:
    """Standard deviation over a dim, several, or all: the root of `var`; where that is 0 the gradient is 0, too.

    Raises:
        ShapeError: no more elements than `correction`.
    """
    return Std.apply(x, dims=_corrected(x, dim, correction, "std"), keepdims=keepdims, correction=correction)


def _corrected(x: Tensor, dim: int | Dims | None, correction: int, op: str) -> Dims:
    dims = some(x, dims_of(x, dim, op), op)
    if count(x.shape, dims) <= correction:
        raise ShapeError(f"{op}: {count(x.shape, dims)} elements less a correction of {correction}")
    return dims


def softmax(x: Tensor, dim: int = -1, mask: Array | None = None) -> Tensor:
    """exp(x) over its sum along `dim`.

    Args:
        mask: bool, broadcastable to x; where it is False the probability is exactly 0, and so is the gradient, also
            where nothing is left to share the 1.
    """
    (dim,) = dims_of(x, dim, "softmax")
    return Softmax.apply(x, dim=dim) if mask is None else Softmax.apply(x, mask, dim=dim)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """x - logsumexp(x) along `dim`."""
    (dim,) = dims_of(x, dim, "log_softmax")
    return LogSoftmax.apply(x, dim=dim)
