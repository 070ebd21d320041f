"""Elements picked by their place.  Gradients of places that are picked twice add up, in a fixed order."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from mpitrain.autograd.function import Function
from mpitrain.autograd.lazy import Lazy, RowSum, summed
from mpitrain.autograd.ops.reduce import dims_of
from mpitrain.autograd.ops.shape import Reshape, Transpose
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, at_hand
from mpitrain.errors import ShapeError, UserError


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


def getitem(x: Tensor, index: Any) -> Tensor:
    """x[index], as NumPy has it.

    Args:
        index: numbers, slices, None and ...; among them arrays of integers, which broadcast to each other, and masks,
            arrays of bools with the lengths of the dims for which they stand.  Arrays may be Tensors or lists.

    Raises:
        ShapeError: an index that x does not have.

    Cost: without arrays none, a view.  A mask on a device waits for it: how many elements there are decides a shape.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    try:
        if not any(map(_is_array, items)):
            return Getitem.apply(x, index=index)
        return _picked(x, _spelled(x, items))
    except (IndexError, ValueError) as error:  # a slice with a step of 0 is the latter
        if isinstance(error, UserError):
            raise
        raise ShapeError(f"x[...] of a tensor of shape {x.shape}: {error}") from None


def _is_array(item: Any) -> bool:
    return isinstance(item, (list, Tensor)) or (hasattr(item, "ndim") and item.ndim > 0)


def _spelled(x: Tensor, items: list[Any]) -> list[Any]:
    """An index with an item for each dim (and None), without dots, and with places in the stead of masks."""
    xp = array_module(x.data)
    found: list[Any] = []
    for item in items:
        if isinstance(item, Tensor):
            item = item.data
        elif isinstance(item, list):
            item = xp.asarray(item) if item else xp.zeros(0, np.int64)
        found.append(item)
    dots = [i for i, item in enumerate(found) if item is Ellipsis]
    taken = sum([item.ndim if _is_mask(item) else item is not None and item is not Ellipsis for item in found])
    if len(dots) > 1 or taken > x.ndim:
        raise IndexError(f"there are {taken} items for {x.ndim} dims" if taken > x.ndim else "... stands there twice")
    rest = [slice(None)] * (x.ndim - taken)
    at = dots[0] if dots else len(found)
    found = [*found[:at], *rest, *found[at + 1 :]]
    spelled: list[Any] = []
    dim = 0
    for item in found:
        if not _is_mask(item):
            spelled.append(item)
            dim += item is not None
            continue
        meant = x.shape[dim : dim + item.ndim]
        if item.shape != meant:
            raise IndexError(f"a mask of shape {item.shape} stands for dims of lengths {meant}")
        spelled += xp.nonzero(item)
        dim += item.ndim
    return spelled


def _is_mask(item: Any) -> bool:
    return hasattr(item, "ndim") and item.ndim > 0 and item.dtype == bool


def _picked(x: Tensor, items: list[Any]) -> Tensor:
    """x[items], with at least one array of places among them.

    The dims that have one become one dim, and the places in it are numbers of its slices.
    """
    basic = tuple([item if item is None or isinstance(item, slice) else slice(None) for item in items])
    if any(item != slice(None) for item in basic):
        x = Getitem.apply(x, index=basic)
    at = [i for i, item in enumerate(items) if basic[i] is not item and not isinstance(item, slice)]
    lengths = [x.shape[i] for i in at]
    places = _places([items[i] for i in at], lengths, x)
    if len(at) == 1:
        return take(x, places[0], at[0])
    if at[-1] - at[0] >= len(at):  # others stand between them: then NumPy has their dims in front
        x = Transpose.apply(x, dims=(*at, *[i for i in range(x.ndim) if i not in at]))
        at = list(range(len(at)))
    before, after = x.shape[: at[0]], x.shape[at[-1] + 1 :]
    flat = places[0]
    for ids, n in zip(places[1:], lengths[1:], strict=True):
        flat = flat * n + ids
    return take(Reshape.apply(x, shape=(*before, math.prod(lengths), *after)), flat, len(before))


def _places(arrays: list[Any], lengths: list[int], x: Tensor) -> list[Array]:
    """Arrays of places, checked where they lie on the host; several of them counted from the start."""
    xp = array_module(x.data)
    found = []
    for ids, n in zip(arrays, lengths, strict=True):
        if getattr(ids, "ndim", 0) == 0:
            ids = xp.asarray(_place(ids))
        ids = integers(ids)
        if at_hand(ids) and ids.size and not (-n <= ids.min() and ids.max() < n):
            raise IndexError(f"places from {ids.min()} to {ids.max()} along a dim of length {n}")
        found.append(ids if len(arrays) == 1 else xp.where(ids < 0, ids + n, ids))
    return found


def _place(number: Any) -> int:
    if not hasattr(number, "__index__") or isinstance(number, bool):
        raise IndexError(f"{number!r} is no place")
    return operator.index(number)


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
