"""Elements in another order, or several times: made of the views and copies of shape.py and index.py."""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.autograd.ops.index import Getitem
from mpitrain.autograd.ops.reduce import dims_of
from mpitrain.autograd.ops.shape import broadcast_to, concat, reshape
from mpitrain.autograd.tensor import Tensor
from mpitrain.errors import ShapeError


def flip(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """The elements from last to first along a dim, several, or all; a view."""
    dims = dims_of(x, dim, "flip")
    return Getitem.apply(x, index=tuple([slice(None, None, -1 if i in dims else None) for i in range(x.ndim)]))


def roll(x: Tensor, shift: int, dim: int = -1) -> Tensor:
    """The elements moved by `shift` places along `dim`; what goes beyond the end comes back at the start."""
    (dim,) = dims_of(x, dim, "roll")
    n = x.shape[dim]
    cut = -shift % n if n else 0
    front = (slice(None),) * dim
    parts = [Getitem.apply(x, index=(*front, part)) for part in (slice(cut, None), slice(None, cut))]
    return concat(parts, dim)


def tile(x: Tensor, counts: int | Sequence[int]) -> Tensor:
    """The whole tensor again and again: so many times along each dim.

    Args:
        x: of any shape.
        counts: for the last dims of x; where there are more than x has dims, x gets dims in front.

    Raises:
        ShapeError: a count is negative.
    """
    wanted = (counts,) if isinstance(counts, int) else tuple(counts)
    if any(n < 0 for n in wanted):
        raise ShapeError(f"tile: counts {wanted}, but how often cannot be negative")
    ndim = max(x.ndim, len(wanted))
    times = (1,) * (ndim - len(wanted)) + wanted
    shape = (1,) * (ndim - x.ndim) + x.shape
    apart = reshape(x, tuple([k for n in shape for k in (1, n)]))
    again = broadcast_to(apart, [k for pair in zip(times, shape, strict=True) for k in pair])
    return reshape(again, tuple([k * n for k, n in zip(times, shape, strict=True)]))


def repeat(x: Tensor, count: int, dim: int) -> Tensor:
    """Each slice along `dim` so many times, one copy behind the other.

    Raises:
        ShapeError: the count is negative.
    """
    (dim,) = dims_of(x, dim, "repeat")
    if count < 0:
        raise ShapeError(f"repeat: count {count}, but how often cannot be negative")
    before, n, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    again = broadcast_to(reshape(x, (*before, n, 1, *after)), (*before, n, count, *after))
    return reshape(again, (*before, n * count, *after))
