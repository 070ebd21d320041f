"""Operations that move elements and compute nothing.  Their results are views where they can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mpitrain.autograd.function import Function, unbroadcast
from mpitrain.autograd.lazy import Lazy, Product, rounded, summed, unrounded, widened
from mpitrain.autograd.ops.reduce import dims_of
from mpitrain.autograd.ops.single import common_half
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, wide
from mpitrain.errors import ShapeError


class Reshape(Function):
    """The same elements, in the same order, in another shape."""

    linear = (0,)
    takes_lazy = True

    @staticmethod
    def forward(x: Array, *, shape: tuple[int, ...]) -> tuple[Array, tuple[Any, ...]]:
        return x.reshape(shape), (x.shape,)

    @staticmethod
    def backward(
        grad: Any, before: tuple[int, ...], *, wanted: tuple[bool, ...], shape: tuple[int, ...]
    ) -> tuple[Any, ...]:
        if isinstance(grad, Lazy):
            return (summed(grad.unrounded().reshape(before), grad.dtype),)
        return (grad.reshape(before),)


class Transpose(Function):
    """Dims in another order.  The gradient of a transposed weight stays a recipe."""

    linear = (0,)
    weight_side = True
    takes_lazy = True

    @staticmethod
    def forward(x: Array, *, dims: tuple[int, ...]) -> tuple[Array, tuple[Any, ...]]:
        return x.transpose(dims), ()

    @staticmethod
    def backward(grad: Any, *, wanted: tuple[bool, ...], dims: tuple[int, ...]) -> tuple[Any, ...]:
        if isinstance(grad, Product):
            return (grad if dims == (0, 1) else Product(grad.b.T, grad.a.T, grad.dtype),)
        back = [0] * len(dims)
        for i, dim in enumerate(dims):
            back[dim] = i
        if isinstance(grad, Lazy):
            return (summed(grad.unrounded().transpose(back), grad.dtype),)
        return (grad.transpose(back),)


class BroadcastTo(Function):
    """A view in which dims are repeated; its gradient is summed over them."""

    linear = (0,)

    @staticmethod
    def forward(x: Array, *, shape: tuple[int, ...]) -> tuple[Array, tuple[Any, ...]]:
        return array_module(x).broadcast_to(x, shape), (x.shape,)

    @staticmethod
    def backward(
        grad: Array, before: tuple[int, ...], *, wanted: tuple[bool, ...], shape: tuple[int, ...]
    ) -> tuple[Any, ...]:
        return (summed(unbroadcast(grad, before, wide(grad.dtype)), grad.dtype),)


class Concat(Function):
    """Tensors one after the other along a dim."""

    linear = range(2**31)

    @staticmethod
    def forward(*parts: Array, dim: int) -> tuple[Array, tuple[Any, ...]]:
        common_half(*parts)
        y = array_module(*parts).concatenate(parts, axis=dim)
        return y, tuple([(part.shape[dim], part.dtype) for part in parts])

    @staticmethod
    def backward(grad: Array, *saved: Any, wanted: tuple[bool, ...], dim: int) -> tuple[Any, ...]:
        grads, start = [], 0
        for (length, dtype), want in zip(saved, wanted, strict=True):
            which = (slice(None),) * dim + (slice(start, start + length),)
            grads.append(rounded(grad[which], dtype) if want else None)
            start += length
        return tuple(grads)


class Split(Function):
    """Views of consecutive pieces along a dim."""

    linear = (0,)

    @staticmethod
    def forward(x: Array, *, lengths: tuple[int, ...], dim: int) -> tuple[Any, tuple[Any, ...]]:
        ends = accumulate(lengths)
        cuts = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        pieces = tuple([x[(slice(None),) * dim + (cut,)] for cut in cuts])
        return pieces, (tuple([piece.shape for piece in pieces]),)

    @staticmethod
    def backward(
        grad: tuple[Array | None, ...],
        shapes: tuple[tuple[int, ...], ...],
        *,
        wanted: tuple[bool, ...],
        lengths: tuple[int, ...],
        dim: int,
    ) -> tuple[Any, ...]:
        some = next(g for g in grad if g is not None)
        xp = array_module(some)
        pieces = [xp.zeros(shape, some.dtype) if g is None else g for g, shape in zip(grad, shapes, strict=True)]
        return (xp.concatenate(pieces, axis=dim),)


class Pad(Function):
    """A constant around a tensor."""

    linear = (0,)

    @staticmethod
    def forward(x: Array, *, widths: tuple[tuple[int, int], ...], value: float) -> tuple[Array, tuple[Any, ...]]:
        return array_module(x).pad(x, widths, mode="constant", constant_values=value), (x.shape,)

    @staticmethod
    def backward(
        grad: Array,
        shape: tuple[int, ...],
        *,
        wanted: tuple[bool, ...],
        widths: tuple[tuple[int, int], ...],
        value: float,
    ) -> tuple[Any, ...]:
        inside = tuple([slice(before, before + n) for n, (before, _) in zip(shape, widths, strict=True)])
        return (grad[inside],)


class Cast(Function):
    """The same numbers in another dtype; the gradient comes back in the old one, unrounded where it was formed so."""

    linear = (0,)
    weight_side = True
    takes_lazy = True

    @staticmethod
    def forward(x: Array, *, dtype: Any) -> tuple[Array, tuple[Any, ...]]:
        return rounded(widened(x), dtype), (x.dtype,)

    @staticmethod
    def backward(grad: Any, before: Any, *, wanted: tuple[bool, ...], dtype: Any) -> tuple[Any, ...]:
        return (summed(unrounded(grad), before),)


# ------------------------------------------------------------------------------------------------------- as functions


def reshape(x: Tensor, *shape: Any) -> Tensor:
    """The same elements in another shape, given as numbers or one tuple; one length may be -1.

    Raises:
        ShapeError: the number of elements differs.
    """
    wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    known = math.prod([n for n in wanted if n != -1])
    holes = sum(1 for n in wanted if n == -1)
    fits = known == x.size if holes == 0 else holes == 1 and known > 0 and x.size % known == 0
    if not fits or any(n < -1 for n in wanted):
        raise ShapeError(f"reshape: {x.shape} has {x.size} elements, {wanted} cannot hold them")
    return Reshape.apply(x, shape=tuple([x.size // known if n == -1 else n for n in wanted]))


def transpose(x: Tensor, *dims: Any) -> Tensor:
    """Dims in another order, given as numbers or one tuple; all reversed where none are given."""
    wanted = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    order = dims_of(x, wanted or tuple(range(x.ndim))[::-1], "transpose")
    if len(order) != x.ndim:
        raise ShapeError(f"transpose: dims {wanted} of a tensor of shape {x.shape}")
    return Transpose.apply(x, dims=order)


def swap(x: Tensor, one: int, other: int) -> Tensor:
    """Two dims exchanged."""
    (a,), (b,) = dims_of(x, one, "swap"), dims_of(x, other, "swap")
    order = list(range(x.ndim))
    order[a], order[b] = b, a
    return Transpose.apply(x, dims=tuple(order))


def broadcast_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """x repeated along dims in front and dims of length 1.

    Raises:
        ShapeError: another dim would have to change.
    """
    shape = tuple(shape)
    extra = len(shape) - x.ndim
    if extra < 0 or any(n not in (1, m) for n, m in zip(x.shape, shape[extra:], strict=True)):
        raise ShapeError(f"broadcast_to: {x.shape} cannot be repeated to {shape}")
    return BroadcastTo.apply(x, shape=shape)


def concat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors one after the other along `dim`.

    Raises:
        ShapeError: there are none, or their other dims differ.
    """
    if not parts:
        raise ShapeError("concat: no tensors")
    (dim,) = dims_of(parts[0], dim, "concat")
    rest = [(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts]
    if any(part.ndim != parts[0].ndim or shape != rest[0] for part, shape in zip(parts, rest, strict=True)):
        raise ShapeError(f"concat: shapes {[part.shape for part in parts]} differ in more than dim {dim}")
    return Concat.apply(*parts, dim=dim)


def split(x: Tensor, parts: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Consecutive pieces along `dim`: so many equal ones, or of the given lengths.

    Raises:
        ShapeError: the pieces do not add up to the dim.
    """
    (dim,) = dims_of(x, dim, "split")
    n = x.shape[dim]
    if isinstance(parts, int):
        if parts < 1 or n % parts:
            raise ShapeError(f"split: dim {dim} of {x.shape} is not divisible by {parts}")
        parts = [n // parts] * parts
    if sum(parts) != n or any(length < 0 for length in parts):
        raise ShapeError(f"split: lengths {tuple(parts)} do not add up to dim {dim} of {x.shape}")
    if len(parts) == 1:
        return (x,)
    pieces: tuple[Tensor, ...] = Split.apply(x, lengths=tuple(parts), dim=dim)
    return pieces


def expand(x: Tensor, dim: int) -> Tensor:
    """A new dim of length 1 at place `dim` of the result."""
    place = dim + x.ndim + 1 if dim < 0 else dim
    if not 0 <= place <= x.ndim:
        raise ShapeError(f"expand: dim {dim} of a tensor of shape {x.shape}")
    return Reshape.apply(x, shape=(*x.shape[:place], 1, *x.shape[place:]))


def squeeze(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Without dims of length 1: the given ones, or all.

    Raises:
        ShapeError: a given dim has another length.
    """
    dims = tuple([i for i, n in enumerate(x.shape) if n == 1]) if dim is None else dims_of(x, dim, "squeeze")
    if any(x.shape[d] != 1 for d in dims):
        raise ShapeError(f"squeeze: dim {dim} of a tensor of shape {x.shape} is not of length 1")
    return Reshape.apply(x, shape=tuple([n for i, n in enumerate(x.shape) if i not in dims]))


def stack(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors of one shape along a new dim."""
    if not parts:
        raise ShapeError("stack: no tensors")
    return concat([expand(part, dim) for part in parts], dim)


def pad(x: Tensor, widths: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    """`value` before and after, so many times for each dim.

    Raises:
        ShapeError: there is not one pair of widths a dim, or one is negative.
    """
    pairs = tuple([(int(before), int(after)) for before, after in widths])
    if len(pairs) != x.ndim or any(n < 0 for pair in pairs for n in pair):
        raise ShapeError(f"pad: widths {pairs} for a tensor of shape {x.shape}")
    return Pad.apply(x, widths=pairs, value=value) if pairs else x


def cast(x: Tensor, dtype: Any) -> Tensor:
    """The same numbers in another dtype; x itself where it has that dtype."""
    dtype = np.dtype(dtype)
    return x if x.dtype == dtype else Cast.apply(x, dtype=dtype)
