"""An array that waits for backward, and the shapes that such arrays have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import is_half, wide
from mpitrain.memory.gist import Narrow
from mpitrain.plan.traffic.step import Step

B, W, B_BEFORE = "B", "W", "B of the slice before"
"""What frees an array: the half of backward for the inputs, that for the weights, or the B of an earlier slice."""

HASH, NUMBER = np.dtype(np.uint64), np.dtype(np.int64)


class Saved(NamedTuple):
    """An array that waits for backward.

    path: of the module whose node keeps it; name: what it is; shape, dtype; why: who wants it; until: what frees it,
    the halves of backward being one where a schedule does not part them; bits: of an element, where it waits rounded.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: Any
    why: str
    until: str = B
    bits: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes."""
        if self.bits is not None:
            return Narrow(self.bits).nbytes(math.prod(self.shape))
        return math.prod(self.shape) * int(self.dtype.itemsize)


class Sizes:
    """The shapes of one micro-batch, or of a slice of it, on this rank."""

    def __init__(self, step: Step, part: int) -> None:
        length = step.lengths[part]
        self.dtype = np.dtype(step.dtype)
        self.wide = np.dtype(wide(step.dtype))
        self.of_stream = self.wide if step.scaled else self.dtype
        self.tokens = (step.b, length)
        self.stream = (step.b, length // step.tp if step.is_cut else length)
        self.rows = math.prod(self.stream)  # of the stream as a matrix
        self.width = step.sizes.width
        self.drops = step.sizes.dropout > 0
        self._numbers_of_norm = ("center", "rstd") if step.sizes.has_biases else ("rstd",)
        self._bits = step.gist

    def rounds(self, dtype: Any) -> bool:
        """Whether what need not be exact waits in fewer bits than it has."""
        return self._bits is not None and not (self._bits == 16 and is_half(dtype))

    def near(self, saved: Saved) -> Saved:
        """What need not be exact (mpitrain.autograd.needs.NEAR), as it waits."""
        return saved._replace(bits=self._bits) if self.rounds(saved.dtype) else saved

    def norm(self, path: str, what: str) -> Iterator[Saved]:
        """A norm: its input, and two numbers a row, or one where it only scales."""
        shape = (*self.stream, self.width)
        yield self.near(Saved(path, f"input of {what}", shape, self.of_stream, f"{what}: gradient of its input"))
        for number in self._numbers_of_norm:
            yield Saved(path, f"{number} of {what}", (self.rows, 1), self.wide, f"{what}: a number a row")

    def product(self, path: str, what: str, width: int) -> Saved:
        """The input of a linear layer."""
        shape = (*self.tokens, width)
        return self.near(Saved(path, f"input of {what}", shape, self.dtype, f"{what}: gradient of its weight", W))

    def dropout(self, path: str, what: str) -> Iterator[Saved]:
        """Instead of a mask the hash of each row, of which it is made again."""
        if self.drops:
            yield Saved(path, f"mask of {what}", self.stream, HASH, "dropout: the mask is made again of a hash a row")

    def again(self, path: str, what: str, dtype: Any) -> Saved:
        """What a part that runs twice keeps of the stream."""
        return Saved(path, f"input of {what}", (*self.stream, self.width), dtype, f"{path} is made again from it")
