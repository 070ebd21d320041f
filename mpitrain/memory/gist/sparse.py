"""Sparse storage, dense compute: of an array with many zeros the others, and where they were.

The array is cut into rows of 256 elements, whatever its shape, so that a column takes one byte:

    values      the elements that are not zero, in order         4 nnz bytes in single precision
    columns     the place of each in its row, uint8              nnz
    pointers    how many came before each row, int32             4 (ceil(n / 256) + 1)

which is less than 4 n from about 20 % of zeros on, where columns of four bytes would need 50 %.  A zero is an element
whose bits are all 0: minus zero is kept, so what comes back is what was there to the last bit.

Source: Jain et al. 2018, "Gist: Efficient Data Encoding for Deep Neural Network Training", ISCA, section IV-A (SSDC).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpitrain.autograd.needs import SIGN, Need
from mpitrain.backend import Array, array_module
from mpitrain.memory.gist.narrow import Narrow

ROW = 256
"""Elements of a row: as many as a byte can count."""

BLOCK = 1 << 16
"""Elements that are looked at together on the CPU, where scratch stays in cache; whole rows."""


def filled_in(flat: Array) -> Array:
    """Which elements are not zero, by their bits."""
    filled: Array = flat.view(np.dtype(f"u{flat.dtype.itemsize}")) != 0
    return filled


def sparse_bytes(size: int, filled: int, values: int) -> int:
    """Bytes of the sparse form.

    Args:
        size: elements.
        filled: those that are not zero.
        values: bytes that their values take.
    """
    return values + filled + 4 * (-(-size // ROW) + 1)


class Sparse:
    """Elements that are not zero, and their places.

    Args:
        narrow: how the values are rounded; None: they are exact.
    """

    def __init__(self, narrow: Narrow | None = None) -> None:
        self.narrow = narrow

    def encode(self, flat: Array, filled: Array, count: int) -> tuple[Array, ...]:
        """(values or their words, columns, pointers).

        Args:
            flat: the array, as one dim.
            filled: which elements are not zero.
            count: how many.
        """
        assert count < 2**31, "pointers have 31 bits"
        xp = array_module(flat)
        values, columns = xp.empty(count, flat.dtype), xp.empty(count, np.uint8)
        pointers = xp.empty(-(-flat.size // ROW) + 1, np.int32)
        done = 0
        for block, rows in _blocks(xp, flat.size):
            at = xp.flatnonzero(filled[block])
            here = slice(done, done + at.size)
            values[here] = flat[block][at]
            columns[here] = at & (ROW - 1)
            starts = xp.arange(rows.stop - rows.start, dtype=at.dtype) * ROW
            pointers[rows] = xp.searchsorted(at, starts) + done
            done = here.stop
        pointers[-1] = count
        return (values if self.narrow is None else self.narrow.encode(values), columns, pointers)

    def decode(self, parts: tuple[Array, ...], need: Need, shape: tuple[int, ...], dtype: Any) -> Array:
        """The array again; for `SIGN` which of its elements are above 0, also those that were rounded to 0."""
        values, columns, pointers = parts
        xp = array_module(columns)
        if self.narrow is not None:
            values = self.narrow.decode(values, columns.shape, dtype)
        if need == SIGN:
            values, dtype = ~(xp.signbit(values) | xp.isnan(values)), np.dtype(bool)
        dense = xp.zeros(math.prod(shape), dtype)
        at = _rows_of(xp, pointers, columns.size)
        at *= ROW
        at += columns
        dense[at] = values
        return dense.reshape(shape)

    def __repr__(self) -> str:
        return "sparse" if self.narrow is None else f"sparse, values in {self.narrow!r}"


def _rows_of(xp: Any, pointers: Array, count: int) -> Array:
    """The row of each value, int64: as many as have begun before it or with it, less one."""
    begun = xp.bincount(pointers[1:-1], minlength=count + 1)[:count]
    return begun.astype(np.int64, copy=False).cumsum()


def _blocks(xp: Any, size: int) -> Iterator[tuple[slice, slice]]:
    """(elements, rows)."""
    most = BLOCK if xp is np else max(size, 1)
    for start in range(0, size, most):
        stop = min(start + most, size)
        yield slice(start, stop), slice(start // ROW, -(-stop // ROW))
