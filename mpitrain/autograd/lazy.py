"""Gradients that are not computed yet, so that whoever owns the destination can have them written straight into it.

The gradient of a weight is a matrix product, or a sum of rows.  Returned as an array it would be a temporary as large
as the weight, copied into the gradient buffer and thrown away.  Returned as a recipe, the first one of a step is
written into the buffer with `out=`; only the later ones of an accumulated step need the temporary.

A recipe also keeps the digits that a half precision would lose.  The gradient buffer of a half-precision parameter is
float32: what is a sum reaches it as it was formed, and is rounded only where a gradient must have its tensor's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mpitrain import kernels
from mpitrain.backend import Array, array_module, is_half, wide


class Lazy:
    """A gradient as a recipe.

    Attributes:
        dtype: of the tensor whose gradient it is.
    """

    __slots__ = ()

    dtype: Any

    def unrounded(self) -> Array:
        """The gradient as an array, of a half-precision tensor in float32; not to be written."""
        raise TypeError(f"{type(self).__name__} must say how its array is made")

    def array(self) -> Array:
        """The gradient as an array of its tensor's dtype; not to be written."""
        return rounded(self.unrounded(), self.dtype)

    def write(self, out: Array, add: bool) -> None:
        """Write the gradient into `out`, or add it to what is there; unrounded where that is float32."""
        if add:
            out += self.unrounded()
        else:
            out[...] = self.unrounded()


@dataclass(frozen=True)
class Total(Lazy):
    """A gradient that was summed already, in float32, for a tensor of half precision."""

    total: Array
    dtype: Any

    def unrounded(self) -> Array:
        return self.total


@dataclass(frozen=True)
class Product(Lazy):
    """`a @ b` of two matrices: the gradient of a weight."""

    a: Array  # (n, k)
    b: Array  # (k, m)
    dtype: Any  # of the weight

    def unrounded(self) -> Array:
        return kernels.matmul(self.a, self.b, dtype=wide(self.dtype))

    def write(self, out: Array, add: bool) -> None:
        kernels.matmul(self.a, self.b, out=out, add=add)


@dataclass(frozen=True)
class GroupedProduct(Lazy):
    """A product for each group of rows, `a[rows].T @ b[rows]`: the gradient of the weights of all experts.

    Written group by group, so that even what is added to a gradient needs room for one group only.
    """

    a: Array  # (n, k), sorted by group
    b: Array  # (n, m)
    counts: tuple[int, ...]  # rows of each group; 0: its gradient is 0
    dtype: Any  # of the weights

    def unrounded(self) -> Array:
        shape = (len(self.counts), self.a.shape[1], self.b.shape[1])
        out = array_module(self.a).empty(shape, wide(self.dtype))
        self.write(out, add=False)
        return out

    def write(self, out: Array, add: bool) -> None:
        for group, rows in enumerate(groups(self.counts)):
            a, b = self.a[rows].T, self.b[rows]
            if self.counts[group]:
                kernels.matmul(a, b, out=out[group], add=add)
            elif not add:
                out[group] = 0


def groups(counts: Sequence[int]) -> Iterator[slice]:
    """The rows of each group, which lie one behind the other."""
    stop = 0
    for count in counts:
        start, stop = stop, stop + count
        yield slice(start, stop)


@dataclass(frozen=True)
class RowSum(Lazy):
    """Row `ids[i]` of the gradient is the sum of the `rows[i]` with that id: the gradient of an embedding table.

    Repeated ids add up, in the order in which they stand, so the result is the same on every run.
    """

    ids: Array  # (n,) int64; a negative one is nobody's
    rows: Array  # (n, m), of the table's dtype or wider
    shape: tuple[int, int]  # of the table
    of: Any = None  # the table's dtype; None: that of the rows

    @property
    def dtype(self) -> Any:
        return self.rows.dtype if self.of is None else self.of

    def unrounded(self) -> Array:
        out = array_module(self.rows).zeros(self.shape, wide(self.dtype))
        kernels.row_sum(self.ids, self.rows, out)
        return out

    def write(self, out: Array, add: bool) -> None:
        if not add:
            out[...] = 0
        kernels.row_sum(self.ids, self.rows, out)


@dataclass(frozen=True)
class Arriving(Lazy):
    """A gradient that is on its way to this rank: whoever wants its array waits for the message."""

    wait: Callable[[], Array]  # blocks until it is here; the same again when it is called again
    dtype: Any

    def unrounded(self) -> Array:
        array: Array = widened(self.wait())
        return array

    def array(self) -> Array:
        return self.wait()


def summed(total: Array, dtype: Any) -> Any:
    """What a backward returns for a tensor of `dtype` whose gradient it has as a sum in at least float32."""
    if total.dtype == dtype:
        return total
    return Total(total, dtype) if is_half(dtype) else total.astype(dtype)


def added(x: Array, y: Array) -> Array:
    """The sum of two gradients of one tensor, new; of halves rounded once, a hundred times as fast as by NumPy."""
    if x.dtype == y.dtype and is_half(x.dtype):
        return kernels.residual(x, y, None, None, 0.0)
    return x + y


def rounded(x: Array, dtype: Any) -> Array:
    """x in another dtype, x itself where it has that; beyond the range of a half infinity, without a word."""
    if x.dtype == dtype:
        return x
    return kernels.narrow(x, dtype) if is_half(dtype) else x.astype(dtype)


def unrounded(grad: Any) -> Array:
    """A gradient, be it an array or a recipe, in at least float32."""
    return widened(grad.unrounded() if isinstance(grad, Lazy) else grad)


def widened(x: Any) -> Any:
    """x, in float32 if it is an array of halves."""
    dtype = getattr(x, "dtype", None)
    return kernels.widen(x) if dtype is not None and dtype.itemsize == 2 and is_half(dtype) else x
