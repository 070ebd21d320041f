"""Arrays that live in a store.

Whoever works through them takes a few elements at a time, and has the next ones fetched meanwhile:

    a.prefetch(1000, 2000)
    for start, stop in ...:
        part = a.take(start, stop)          a vector of its own
        ...
        a.put(start, part)

Whoever wants one tensor at a time, as a checkpoint does, uses it as an array: `np.asarray(a)`, `a[...] = values`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpitrain import kernels
from mpitrain.backend import Array, array_module, to_device
from mpitrain.memory.store import Store


class Factor:
    """A number by which what is taken is multiplied: gradients are scaled when they are used, not before."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class StoredArray:
    """Neighbouring elements of a region, in a shape.

    Args:
        store: which.
        region: of it.
        start: the first element there.
        shape: of the array.
        dtype: of the region.
        factor: that all arrays of the region share; None: they have none.
        changed: called when elements were written one tensor at a time.
    """

    flags = SimpleNamespace(c_contiguous=False)  # it has no memory that others could write into
    base = None

    def __init__(
        self,
        store: Store,
        region: str,
        start: int,
        shape: tuple[int, ...],
        dtype: Any,
        factor: Factor | None = None,
        changed: Callable[[], None] | None = None,
    ) -> None:
        self._store, self._region, self._start = store, region, start
        self._factor, self._changed = factor, changed
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self.ndim = len(self.shape)
        self.size = math.prod(self.shape)
        self.nbytes = 0
        """Bytes here: none."""
        self.squares: Any = 0.0
        """Sum of the squares, of whoever keeps it up to date."""

    def part(self, start: int, shape: tuple[int, ...]) -> StoredArray:
        """Some of it: from an element on, in another shape."""
        at = self._start + start
        return StoredArray(self._store, self._region, at, shape, self.dtype, self._factor, self._changed)

    def watch(self, changed: Callable[[], None]) -> None:
        """Have parts that are made from now on tell of it when they are written one tensor at a time."""
        self._changed = changed

    def adjoins(self, before: Any) -> bool:
        """Whether it goes on where another one ends."""
        return (
            isinstance(before, StoredArray)
            and (self._store, self._region) == (before._store, before._region)
            and self._start == before._start + before.size
        )

    # -- some elements at a time --------------------------------------------------------------------------------------

    def prefetch(self, start: int, stop: int) -> None:
        """Begin to fetch elements for a `take`."""
        self._store.prefetch(self._region, self._start + start, self._start + stop)

    def take(self, start: int, stop: int) -> Array:
        """Elements as a vector, times the factor."""
        found = self._store.get(self._region, self._start + start, self._start + stop)
        if self._factor is not None and self._factor.value != 1.0:
            array_module(found).multiply(found, self._factor.value, out=found)
        return found

    def room(self, size: int) -> Array:
        """An array for so many elements, to be put."""
        return self._store.room(size, self.dtype)

    def put(self, start: int, values: Array) -> None:
        """Write elements; the vector must not be changed any more."""
        self._store.put(self._region, self._start + start, values)

    def scale_by(self, factor: float) -> None:
        """Have all that is taken from now on multiplied by a number too."""
        assert self._factor is not None
        self._factor.value *= factor

    # -- one tensor at a time -----------------------------------------------------------------------------------------

    def here(self) -> Array:
        """A copy in the memory where one computes."""
        return self.take(0, self.size).reshape(self.shape).copy()

    def copy(self) -> Array:
        """As `here`."""
        return self.here()

    def get(self) -> Any:
        """A copy as a NumPy array."""
        found = self.here()
        return found if isinstance(found, np.ndarray) else found.get()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        found = self.get()
        return found if dtype is None else found.astype(dtype, copy=False)

    def __getitem__(self, index: Any) -> Array:
        return self.here()[index]

    def __setitem__(self, index: Any, values: Any) -> None:
        whole = self.here()  # also where all of it is written: this is the array that is put
        whole[index] = to_device(values, whole) if hasattr(values, "shape") else values
        self.squares = kernels.sum_of_squares(whole)
        self.put(0, whole.reshape(-1))
        if self._changed is not None:
            self._changed()

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"StoredArray({self._region}[{self._start}:], {self.shape}, {self.dtype})"
