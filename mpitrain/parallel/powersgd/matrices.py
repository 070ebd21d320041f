"""Which parameters are compressed, and as which matrices: from shapes and specs alone, so the same on all ranks.

    a matrix (a, b)                     n = a, m = b
    a kernel (a, b, c, ...)             n = a, m = b c ...
    experts (E, a, b), cut over ep      E matrices n = a, m = b: what experts learn has nothing in common

What a rank holds of a parameter is compressed by itself: a slab of a tensor-parallel weight is a matrix of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from mpitrain.nn.parameter import Parameter
from mpitrain.spec import Spec, slab, slab_shape

TABLES = ("table.*", "positions.*", "head.*")
"""Names of what is summed exactly unless asked for otherwise: tables of words and positions, and the head.

Most rows of their gradients are zero, or of rare words, and no few directions hold them (Ramesh et al. 2021, section
2.5).
"""

WORTH = 2.0
"""A matrix is compressed if its factors have less than 1 / WORTH of its elements."""


class Matrices(NamedTuple):
    """What is compressed of a parameter: `stack` matrices of n rows and m columns, by `rank` columns each."""

    stack: int
    n: int
    m: int
    rank: int

    @property
    def left(self) -> int:
        """Elements of the left factors, P."""
        return self.stack * self.n * self.rank

    @property
    def right(self) -> int:
        """Elements of the right factors, Q."""
        return self.stack * self.m * self.rank


class Choice(NamedTuple):
    """What is to be compressed, and how far.

    rank: columns of the factors; exact: patterns of the names of parameters that are not compressed; worth: least
    number of elements of a matrix, as a multiple of its factors'.
    """

    rank: int
    exact: tuple[str, ...] = TABLES
    worth: float = WORTH

    def of(self, name: str, shape: Sequence[int], largest: Sequence[int], stacked: bool) -> Matrices | None:
        """How a slab is compressed; None: it is summed as it is.

        Args:
            name: of the parameter.
            shape: of the slab.
            largest: shape of the largest slab of the parameter, on any rank: all ranks decide by that one.
            stacked: whether dim 0 numbers matrices.
        """
        if any(fnmatchcase(name, pattern) for pattern in self.exact) or len(shape) - stacked < 2:
            return None
        _, n, m = view(largest, stacked)
        rank = min(self.rank, n, m)
        if n * m <= self.worth * rank * (n + m):
            return None
        return Matrices(*view(shape, stacked), rank)

    def of_parameter(self, p: Parameter, sizes: Mapping[str, int]) -> Matrices | None:
        """How this rank's slab of a parameter is compressed; `sizes`: axis -> ranks."""
        largest = slab_shape(slab(p.full_shape, p.spec, {}, sizes))
        return self.of(p.name, slab_shape(p.rectangle), largest, is_stack(p.spec, p.full_shape))


def view(shape: Sequence[int], stacked: bool) -> tuple[int, int, int]:
    """(how many matrices, rows, columns) of a tensor."""
    stack, rest = (shape[0], shape[1:]) if stacked else (1, shape)
    return stack, rest[0], math.prod(rest[1:])


def rows_dim(p: Parameter) -> int:
    """Which dim of a parameter is the rows of its matrices; that before numbers matrices, those after are columns."""
    return int(is_stack(p.spec, p.full_shape))


def is_stack(spec: Spec, shape: Sequence[int]) -> bool:
    """Whether dim 0 of a tensor numbers matrices: where axis ep may deal it out, as that of experts."""
    return len(shape) >= 3 and spec.state("ep").dim == 0
