"""A mesh with one axis of two ranks, of which this process is one: what programs look like to the state checker."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from mpitrain.autograd import Tape, Tensor
from mpitrain.comm.transport import Mode
from mpitrain.debug.states import StateChecker
from mpitrain.events import listen

N = 2


class Arrived(NamedTuple):
    """A request that is complete."""

    array: np.ndarray

    def wait(self):
        return self.array


class Axis:
    """What an op needs of an axis of two ranks whose other rank does what this one does."""

    name, size, rank, ranks = "tp", N, 0, (0, 1)

    def all_reduce(self, x, op="sum", out=None):
        return N * x if op == "sum" else x

    def all_gather(self, x, dim=0):
        return np.concatenate([x] * N, dim)

    def iall_gather(self, x, dim=0):
        return Arrived(self.all_gather(x, dim))

    def reduce_scatter(self, x, dim=0):
        return N * np.split(x, N, dim)[0]

    def ireduce_scatter(self, x, dim=0):
        return Arrived(self.reduce_scatter(x, dim))

    def all_to_all(self, x, i, j, counts=None):
        return np.concatenate([np.split(x, N, j)[0]] * N, i)

    def iall_to_all(self, x, i=0, j=0, counts=None):
        return Arrived(self.all_to_all(x, i, j, counts))

    def shift(self, x, k):
        return x


class Grid:
    """A mesh as the checker sees it."""

    def __init__(self, *axes):
        self.sizes = {axis: N if axis in axes else 1 for axis in ("pp", "edp", "ep", "cp", "tp")}
        self.coords = dict.fromkeys(self.sizes, 0)
        self.edp = self.ep = self.cp = self.tp = Axis()
        self.world = SimpleNamespace(mode=Mode())


def states_of(program, *inputs, axis="tp"):
    """The state of what a program makes of inputs, each (shape, its state or None)."""
    checker = StateChecker([], Grid(axis))
    checker.start()
    tensors = []
    for shape, state in inputs:
        x = Tensor(np.arange(1, 1 + math.prod(shape), dtype=np.float64).reshape(shape), requires_grad=True)
        if state is not None:
            checker.declare(x, {axis: state})
        tensors.append(x)
    with listen(checker), Tape():
        y = program(*tensors)
    found = [checker.states(each).get(axis) for each in (y if isinstance(y, tuple) else (y,))]
    assert len(set(found)) == 1, "all outputs of an op lie alike"
    return found[0]
