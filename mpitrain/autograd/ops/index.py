"""Elements picked by their place.  Gradients of places that are picked twice add up, in a fixed order."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.autograd.function import Function
from mpitrain.autograd.lazy import Lazy, RowSum, summed
from mpitrain.autograd.ops.reduce import dims_of
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module
from mpitrain.errors import ShapeError


class Getitem(Function):
    """Basic indexing: numbers, slices, None and ...; a view.  A gradient that is a sum stays unrounded."""

    linear = (0,)
    takes_lazy = True

    @staticmethod
    def forward(x: Array, *, index: Any) -> tuple[Array, tuple[Any, ...]]:
        return x[index], (x.shape, x.dtype)

    @staticmethod
    def backward(
        grad: Any, shape: tuple[int, ...], dtype: Any, *, wanted: tuple[bool, ...], index: Any
    ) -> tuple[Any, ...]:
        if isinstance(grad, Lazy):
            grad = grad.unrounded()
        dx = array_module(grad).zeros(shape, grad.dtype)
        dx[index] = grad
        return (summed(dx, dtype),)


class Take(Function):
    """Slices along a dim, by an array of their numbers.  The gradient of a table is a recipe, a `RowSum`."""

    linear = (0,)
    takes_lazy = True

    @staticmethod
    def forward(x: Array, ids: Array, *, dim: int) -> tuple[Array, tuple[Any, ...]]:
        return array_module(x).take(x, ids, axis=dim), (ids, x.shape)

    @staticmethod
    def backward(
        grad: Any, ids: Array, shape: tuple[int, ...], *, wanted: tuple[bool, ...], dim: int
    ) -> tuple[Any, ...]:
        dtype = grad.dtype
        if isinstance(grad, Lazy):
            grad = grad.unrounded()
        xp = array_module(grad)
        length = shape[dim]
        flat = ids.reshape(-1)
        flat = xp.where(flat < 0, flat + length, flat)  # else -1 and the last number would be two rows
        rest = (*shape[:dim], *shape[dim + 1 :])
        if dim:  # the dims of ids to the front
            grad = xp.moveaxis(grad, tuple(range(dim, dim + ids.ndim)), tuple(range(ids.ndim)))
        width = int(np.prod(rest, dtype=np.int64))
        rows = RowSum(flat, grad.reshape(flat.size, width), (length, width), dtype)
        if dim == 0 and len(shape) == 2:
            return rows, None
        return summed(xp.moveaxis(rows.unrounded().reshape(length, *rest), 0, dim), dtype), None


class GatherAlong(Function):
    """One element for each number in ids, along a dim: y[.., i, ..] = x[.., ids[.., i, ..], ..]."""

    linear = (0,)

    @staticmethod
    def forward(x: Array, ids: Array, *, dim: int) -> tuple[Array, tuple[Any, ...]]:
        return array_module(x).take_along_axis(x, ids, axis=dim), (ids, x.shape)

    @staticmethod
    def backward(
        grad: Array, ids: Array, shape: tuple[int, ...], *, wanted: tuple[bool, ...], dim: int
    ) -> tuple[Any, ...]:
        xp = array_module(grad)
        length = shape[dim]
        place = xp.where(ids < 0, ids + length, ids)
        # The place of each picked element in the flattened x, whose gradient is then a table with rows of one element.
        strides = [int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape))]
        flat = place * strides[dim]
        for i, n in enumerate(ids.shape):
            if i != dim:
                along = [1] * len(shape)
                along[i] = n
                flat = flat + (xp.arange(n) * strides[i]).reshape(along)
        size = int(np.prod(shape, dtype=np.int64))
        return RowSum(flat.reshape(-1), grad.reshape(-1, 1), (size, 1)).array().reshape(shape), None


# ------------------------------------------------------------------------------------------------------- as functions


def _is_array(item: Any) -> bool:
    return isinstance(item, (list, Tensor)) or (hasattr(item, "ndim") and item.ndim > 0)


def getitem(x: Tensor, index: Any) -> Tensor:
    """x[index].

    Args:
        index: numbers, slices, None and ..., or one array of integers, alone or among full or partial slices.

    Raises:
        ShapeError: an index that x does not have, or a kind that is not meant (bool arrays, several arrays).
    """
    items = index if isinstance(index, tuple) else (index,)
    arrays = [i for i, item in enumerate(items) if _is_array(item)]
    try:
        if not arrays:
            return Getitem.apply(x, index=index)
        at = arrays[0]
        ids = items[at].data if isinstance(items[at], Tensor) else items[at]
        ids = ids if hasattr(ids, "dtype") else array_module(x.data).asarray(ids)
        others = (*items[:at], *items[at + 1 :])
        if len(arrays) > 1 or ids.dtype.kind not in "iu" or not all(map(_is_slice, others)):
            raise ShapeError(
                f"x[...] of a tensor of shape {x.shape}: one integer array among slices can be taken; for more, use"
                " take, gather_along or where"
            )
        basic = (*items[:at], slice(None), *items[at + 1 :])
        cut = x if len(items) == 1 else Getitem.apply(x, index=basic)
        before = any(item is Ellipsis for item in items[:at])  # then the dim counts from the end
        return take(cut, ids, at - len(items) if before else at)
    except IndexError as error:
        raise ShapeError(f"x[...] of a tensor of shape {x.shape}: {error}") from None


def _is_slice(item: Any) -> bool:
    return isinstance(item, slice) or item is Ellipsis


def take(x: Tensor, ids: Any, dim: int = 0) -> Tensor:
    """Slices of x along `dim`, by number: rows of an embedding table.

    Args:
        x: (..., n, ...).
        ids: integer array of any shape; negative numbers count from the end.

    Returns:
        x's shape with the dims of ids in the place of `dim`.

    Raises:
        ShapeError: a number is not in [-n, n).
    """
    (dim,) = dims_of(x, dim, "take")
    ids = integers(ids.data if isinstance(ids, Tensor) else ids)
    try:
        return Take.apply(x, ids, dim=dim)
    except IndexError:
        raise beyond(ids, dim, x.shape) from None


def integers(ids: Array) -> Array:
    """Numbers of slices as int64: bytes could not count a table of 256 rows from its end.

    Raises:
        ShapeError: they are no integers.
    """
    if ids.dtype.kind not in "iu":
        raise ShapeError(f"take: ids are integers, these are {ids.dtype}")
    return ids.astype(np.int64, copy=False)


def beyond(ids: Array, dim: int, shape: tuple[int, ...]) -> ShapeError:
    """What to raise where an id is none of the slices along `dim`."""
    return ShapeError(f"take: ids reach from {ids.min()} to {ids.max()}, dim {dim} of {shape} does not")


def gather_along(x: Tensor, ids: Any, dim: int = -1) -> Tensor:
    """y[.., i, ..] = x[.., ids[.., i, ..], ..] along `dim`: one element for each number.

    Args:
        x: (..., n, ...).
        ids: integer array with x's other lengths.

    Raises:
        ShapeError: the shapes do not go together, or a number is not in [-n, n).
    """
    (dim,) = dims_of(x, dim, "gather_along")
    ids = ids.data if isinstance(ids, Tensor) else ids
    same = (*x.shape[:dim], *x.shape[dim + 1 :]) == (*ids.shape[:dim], *ids.shape[dim + 1 :])
    if not same or ids.ndim != x.ndim or ids.dtype.kind not in "iu":
        raise ShapeError(f"gather_along dim {dim}: x {x.shape} and ids {ids.shape} {ids.dtype}")
    ids = ids.astype(np.int64, copy=False)
    try:
        return GatherAlong.apply(x, ids, dim=dim)
    except IndexError:
        raise ShapeError(f"gather_along: ids reach from {ids.min()} to {ids.max()}, x is {x.shape}") from None
