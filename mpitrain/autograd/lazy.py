"""Gradients that are not computed yet, so that whoever owns the destination can have them written straight into it.

The gradient of a weight is a matrix product, or a sum of rows.  Returned as an array it would be a temporary as large
as the weight, copied into the gradient buffer and thrown away.  Returned as a recipe, the first one of a step is
written into the buffer with `out=`; only the later ones of an accumulated step need the temporary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpitrain import kernels
from mpitrain.backend import Array, array_module


class Lazy:
    """A gradient as a recipe."""

    __slots__ = ()

    def array(self) -> Array:
        """The gradient as a new array."""
        raise TypeError(f"{type(self).__name__} must say how its array is made")

    def write(self, out: Array, add: bool) -> None:
        """Write the gradient into `out`, or add it to what is there."""
        if add:
            out += self.array()
        else:
            out[...] = self.array()


@dataclass(frozen=True)
class Product(Lazy):
    """`a @ b` of two matrices: the gradient of a weight."""

    a: Array  # (n, k)
    b: Array  # (k, m)
    dtype: Any  # of the weight

    def array(self) -> Array:
        return kernels.matmul(self.a, self.b).astype(self.dtype, copy=False)

    def write(self, out: Array, add: bool) -> None:
        if add:
            out += kernels.matmul(self.a, self.b)
        else:
            kernels.matmul(self.a, self.b, out=out)


@dataclass(frozen=True)
class RowSum(Lazy):
    """Row `ids[i]` of the gradient is the sum of the `rows[i]` with that id: the gradient of an embedding table.

    Repeated ids add up, in the order in which they stand, so the result is the same on every run.
    """

    ids: Array  # (n,) int64
    rows: Array  # (n, m)
    shape: tuple[int, int]  # of the table

    def array(self) -> Array:
        out = array_module(self.rows).zeros(self.shape, self.rows.dtype)
        kernels.row_sum(self.ids, self.rows, out)
        return out

    def write(self, out: Array, add: bool) -> None:
        if not add:
            out[...] = 0
        kernels.row_sum(self.ids, self.rows, out)
