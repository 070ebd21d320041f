"""Bugs that compressed gradients are known for: the part of `mutations.py` about PowerSGD.

A compressed run is the same on any number of data-parallel ranks, so what one of them does wrong shows beside one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from mutations import bug, put

from mpitrain import rng
from mpitrain.comm.world import world
from mpitrain.nn.parameter import Parameter
from mpitrain.parallel.powersgd import compressed, sums
from mpitrain.parallel.powersgd.compressed import Compressed

HOW: dict[str, Any] = {"reducer": "powersgd", "powersgd_rank": 1, "powersgd_tables": True}


@bug("what compression leaves out is lost on one rank", "dp2", "C58", **HOW)
def _() -> Iterator[None]:
    keep = Compressed.keep

    def forgetful(self: Compressed, warm: bool) -> None:
        keep(self, warm)
        if self.error is not None and world().rank == 1:
            self.error[...] = 0

    with put(Compressed, "keep", forgetful):
        yield


@bug("the memory of one parameter is given to another", "dp2", "C58", **HOW)
def _() -> Iterator[None]:
    run = sums.Sums.run

    def mixed_up(self: sums.Sums, inverse: Any) -> None:
        one, other = (c for c in self.compressed if c.parameter.name.endswith("mlp.up.weight"))
        if world().rank == 1:
            one.error, other.error = other.error, one.error
        run(self, inverse)

    with put(sums.Sums, "run", mixed_up):
        yield


@bug("the first Q is drawn by each rank for itself", "dp2", "C58", **HOW)
def _() -> Iterator[None]:
    with put(compressed, "first_q", _of_this_rank):
        yield


def _of_this_rank(p: Parameter, rank: int, seed: int) -> np.ndarray:
    shape = (*p.grad.shape[1:], rank)
    return rng.normal(seed + world().rank, p.name, shape, tuple(slice(0, length) for length in shape))


@bug("errors are taken from the sum of all ranks", "dp2", "T26.2", **HOW)
def _() -> Iterator[None]:
    restore = Compressed.restore

    def from_the_sum(self: Compressed, inverse: float) -> None:
        restore(self, inverse)
        self._delta -= self._grad - self.left @ self.right.swapaxes(1, 2)

    with put(Compressed, "restore", from_the_sum):
        yield


@bug("factors are averaged, everything else is summed", "dp2", "T26.2", **HOW)
def _() -> Iterator[None]:
    restore = Compressed.restore

    def of_the_mean(self: Compressed, inverse: float) -> None:
        self.total /= world().size
        restore(self, inverse)

    with put(Compressed, "restore", of_the_mean):
        yield


@bug("each rank makes its own P orthonormal before the sum", "dp2", "T26.4", **HOW)
def _() -> Iterator[None]:
    begin = Compressed.begin

    def too_early(self: Compressed, inverse: float) -> None:
        begin(self, inverse)
        self.left[...] = sums.orthonormal(self.left)

    with put(Compressed, "begin", too_early):
        yield


@bug("experts are compressed as one matrix on two ranks", "dp2,ep2", "T26.2", experts=4, **HOW)
def _() -> Iterator[None]:
    from mpitrain.parallel.powersgd import matrices

    with put(matrices, "is_stack", lambda spec, shape: False):
        yield
