"""The sums of one array, or of the recipe of one.

    elements   how many
    plain      sum of x              linear: those of summands add up to those of their sum
    rows       sum of r x            r the factors of rows, None where nobody knows which rows these are
    columns    sum of c x            c those of columns
    both       sum of r c x
    size       sum of |x|            not linear
    squares    sum of x^2            not linear; of summands it is only a measure of how large rounding may be

All in float64, whatever the array is.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np

from mpitrain.autograd.lazy import Arriving, GroupedProduct, Lazy, Product, RowSum, groups
from mpitrain.backend import Array, to_host
from mpitrain.debug.digests.weights import COLUMNS, PLACES, block_of, run_of
from mpitrain.rng import splitmix64

Vector = np.ndarray | None
AT_ONCE = 1 << 15
"""Elements that are summed at once: as many as a core keeps near it."""


class Sums(NamedTuple):
    """The numbers; None: not known."""

    elements: int
    plain: float
    size: float | None
    squares: float
    rows: float | None
    columns: float | None
    both: float | None


def of_array(x: Any, r: Vector = None, c: Vector = None) -> Sums:
    """The sums of an array.

    Args:
        x: of any shape and dtype.
        r: factors of its rows, which are its leading elements: all of x is (len(r), rest).
        c: factors of its columns, the trailing elements.

    Cost: some nanoseconds an element.
    """
    host = np.asarray(to_host(x))
    if c is not None:
        columns = len(c)
    elif r is not None:
        columns = host.size // max(len(r), 1)
    else:
        columns = host.shape[-1] if host.ndim else 1
    rows = host.size // columns if columns else 0
    matrix = np.ascontiguousarray(host).reshape(rows, columns)
    of_columns, table = np.stack(_both(c, columns), 1), np.zeros((2, 2))
    size = squares = 0.0
    step = max(1, AT_ONCE // max(columns, 1))
    scratch = np.empty((2, min(step, rows), columns))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        block, absolute = scratch[:, : stop - start]
        block[...] = matrix[start:stop]
        table += np.stack(_both(None if r is None else r[start:stop], stop - start)) @ (block @ of_columns)
        squares += float(np.vdot(block, block))
        size += float(np.abs(block, out=absolute).sum())
    found = _sums(table, r, c)
    return Sums(host.size, found[0], size, squares, *found[1:])


def of_gradient(
    grad: Any, r: Vector = None, c: Vector = None, inner: tuple[Vector, Vector] | None = None
) -> Sums | None:
    """The linear sums of a gradient of weights, which may be a recipe; None for what is still on its way.

    Args:
        grad: an array or a recipe.
        r: factors of the weight's first dim.
        c: those of the other dims, all in one.
        inner: of three dims those of the second and the third.

    Returns:
        Sums without a size; `squares` is about that of the gradient.
    """
    if isinstance(grad, Arriving):
        return None
    if isinstance(grad, Product):
        a, b = _wide(grad.a), _wide(grad.b)
        table = (np.stack(_both(r, a.shape[0])) @ a) @ (b @ np.stack(_both(c, b.shape[1]), 1))
        squares = _square(a) * _square(b) / max(a.shape[1], 1)
        found = _sums(table, r, c)
        return Sums(a.shape[0] * b.shape[1], found[0], None, squares, *found[1:])
    if isinstance(grad, RowSum):
        ids = to_host(grad.ids)
        rows, ids = _wide(grad.rows)[ids >= 0], ids[ids >= 0]
        each = None if r is None else r[ids]
        found = _sums(np.stack(_both(each, len(rows))) @ (rows @ np.stack(_both(c, rows.shape[1]), 1)), r, c)
        return Sums(grad.shape[0] * grad.shape[1], found[0], None, _square(rows), *found[1:])
    if isinstance(grad, GroupedProduct):
        return _of_groups(grad, r, inner)
    of = of_array(grad.unrounded() if isinstance(grad, Lazy) else grad, r, c)
    return of._replace(size=None)


def _of_groups(grad: GroupedProduct, r: Vector, inner: tuple[Vector, Vector] | None) -> Sums:
    """A product for each expert: those of its rows."""
    a, b = _wide(grad.a), _wide(grad.b)
    left, right = (None, None) if inner is None else inner
    known = left is not None and right is not None
    plain, columns, squares = np.zeros(len(grad.counts)), np.zeros(len(grad.counts)), 0.0
    for group, rows in enumerate(groups(grad.counts)):
        u, v = a[rows], b[rows]
        plain[group] = u.sum(1) @ v.sum(1)
        columns[group] = (u @ left) @ (v @ right) if known else 0.0
        squares += _square(u) * _square(v) / max(len(u), 1)
    count = len(grad.counts) * a.shape[1] * b.shape[1]
    weighted = [float(r @ of) if r is not None else None for of in (plain, columns)]
    of_columns = (float(columns.sum()), weighted[1]) if known else (None, None)
    return Sums(count, float(plain.sum()), None, squares, weighted[0], *of_columns)


def _both(factors: Vector, length: int) -> list[np.ndarray]:
    """Ones, and the factors or once more ones."""
    ones = np.ones(length)
    return [ones, ones if factors is None else factors]


def _sums(table: np.ndarray, r: Vector, c: Vector) -> tuple[float, float | None, float | None, float | None]:
    """Plain, rows, columns, both of a table ((1, c), (r, r c))."""
    (plain, columns), (rows, both) = table.tolist()
    return (
        plain,
        rows if r is not None else None,
        columns if c is not None else None,
        (both if r is not None and c is not None else None),
    )


def _wide(x: Array) -> np.ndarray:
    return np.asarray(to_host(x)).astype(np.float64, copy=False)


def _square(x: np.ndarray) -> float:
    flat = x.reshape(-1)
    return float(flat @ flat)


# ----------------------------------------------------------------------------------------------------- of a parameter


def of_slab(x: Any, rectangle: tuple[slice, ...]) -> Sums:
    """The sums of a rank's part of a tensor, weighted by where its elements are in the whole."""
    r, c = factors_of_slab(rectangle)
    return of_array(x, r, c)


def factors_of_slab(rectangle: tuple[slice, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Factors of the first dim of a slab, and of all others in one."""
    starts = tuple(part.start for part in rectangle)
    lengths = tuple(part.stop - part.start for part in rectangle)
    first = run_of(PLACES, starts[0], lengths[0]) if rectangle else np.ones(1)
    return first, block_of(COLUMNS, starts[1:], lengths[1:])


def inner_factors(rectangle: tuple[slice, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Of a slab of three dims the factors of the second and of the third."""
    second, third = (run_of(COLUMNS, part.start, part.stop - part.start) for part in rectangle[1:])
    return second, third


def exact(x: Any, full_shape: tuple[int, ...], rectangle: tuple[slice, ...]) -> int:
    """A sum over the elements of a hash of their bits and their place in the whole, modulo 2^64.

    Slabs add up to the number of the whole, however it is cut, and it changes with any bit of any element.

    Cost: about 20 ns an element.
    """
    array = np.ascontiguousarray(to_host(x))
    if not array.size:
        return 0
    bits = array.reshape(-1).view(f"u{array.dtype.itemsize}").astype(np.uint64)
    place = np.zeros((), np.int64)
    for part, length in zip(rectangle, full_shape, strict=True):
        place = np.add.outer(place * length, np.arange(part.start, part.stop))
    return int(splitmix64(bits ^ splitmix64(place.reshape(-1))).sum(dtype=np.uint64))


def crc(x: Any, start: int = 0) -> int:
    """CRC-32 of the bytes of an array, or of what a recipe is made from."""
    if isinstance(x, Product):
        return crc(x.b, crc(x.a, start))
    if isinstance(x, GroupedProduct):
        return crc(x.b, crc(x.a, start))
    if isinstance(x, RowSum):
        return crc(x.rows, crc(x.ids, start))
    array = np.ascontiguousarray(to_host(x.array() if isinstance(x, Lazy) else x))
    return zlib.crc32(array.reshape(-1).view(np.uint8).data, start)
