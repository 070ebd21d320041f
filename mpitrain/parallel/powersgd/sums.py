"""The messages of PowerSGD over one set of axes.

    message 1   what is not compressed, and behind it every D_w Q        that of halves as halves, in one of its own
    message 2   every D_w^T P^

What both ends of a pipeline use is one matrix, to whose gradient either end adds: its factors are then summed over the
two ends, by a message of their own after each of these.

Factors are in at least float32, also of a model of halves.  A half has 11 bits: to round to them what is left of a
matrix would lose what no error remembers, and save half of the few bytes that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from mpitrain import kernels
from mpitrain.backend import Array, array_module, is_half
from mpitrain.comm.communicator import Communicator
from mpitrain.nn.parameter import Flat, Parameter
from mpitrain.parallel.data import settle
from mpitrain.parallel.powersgd.compressed import Compressed
from mpitrain.parallel.powersgd.matrices import Choice
from mpitrain.parallel.powersgd.products import orthonormal

Inverse = Callable[[Parameter], float]
"""One over the scale that the gradient of a parameter carries."""


class Sums:
    """All parameters of this rank whose gradients are summed over the same axes.

    Args:
        flats: their buffers: one of halves, one of what is in full precision, or both.
        axis: over which they are summed.
        ends: of the pipeline, over which what is tied is summed as well.
        choice: what is compressed, and how far.
        sizes: axis -> ranks.
        feedback: whether what is left out is kept.
        seed: of the first Q.

    Attributes:
        compressed: by rows and rank, as they lie in the messages; tied: of these, what both ends of a pipeline use.
        exact: what is not compressed.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        axis: Communicator,
        ends: Communicator,
        choice: Choice,
        sizes: Mapping[str, int],
        feedback: bool,
        seed: int,
    ) -> None:
        self._axis, self._ends = axis, ends
        self._parameters = [p for flat in flats for p in flat.parameters]
        self._exact: list[Parameter] = []
        self._halves: list[Parameter] = []
        found: list[Compressed] = []
        for flat in flats:
            for p in flat.parameters:
                matrices = choice.of_parameter(p, sizes)
                if matrices is not None:
                    found.append(Compressed(p, matrices, feedback, seed))
                else:
                    (self._halves if is_half(flat.weights.dtype) else self._exact).append(p)
        self.compressed = sorted(found, key=_alike)
        self.tied = [c for c in self.compressed if c.parameter.spec.tied]
        self.exact = (*self._exact, *self._halves)
        like = flats[0].grads
        new = array_module(like).empty
        exact = sum(p.grad.size for p in self._exact)
        self._first = new(exact + sum(c.matrices.left for c in found), like.dtype)
        self._second, self._totals = (new(sum(c.matrices.right for c in found), like.dtype) for _ in range(2))
        dtypes = [flat.weights.dtype for flat in flats if is_half(flat.weights.dtype)]
        self._sent = new(sum(p.grad.size for p in self._halves), *dtypes)
        self._arrived = new(self._sent.size, like.dtype)
        self._groups = self._lay_out(exact)

    def _lay_out(self, start: int) -> list[Array]:
        """Give each parameter its place in the messages; of those with as many rows and columns, all P as one array."""
        groups, second = [], 0
        for (n, rank), members in groupby(self.compressed, key=_alike):
            first, stacks = start, 0
            for c in members:
                stack, _, m, _ = c.matrices
                c.left = self._first[start : start + c.matrices.left].reshape(stack, n, rank)
                ends = slice(second, second + c.matrices.right)
                c.right, c.total = (part[ends].reshape(stack, m, rank) for part in (self._second, self._totals))
                start, second, stacks = start + c.matrices.left, ends.stop, stacks + stack
            groups.append(self._first[first:start].reshape(stacks, n, rank))
        return groups

    @property
    def arrays(self) -> list[Array]:
        """All that is held here."""
        kept = [array for c in self.compressed for array in c.arrays]
        return [self._sent, self._arrived, self._first, self._second, self._totals, *kept]

    def run(self, inverse: Inverse) -> None:
        """The gradients are sums when this returns, those of matrices as far as two factors hold them."""
        settle(self._parameters)
        if self._halves:
            for p, part in _places(self._halves, self._sent):
                kernels.narrow(p.grad, part.dtype, out=part)
            self._axis.all_reduce(self._sent, out=self._arrived)
            for p, part in _places(self._halves, self._arrived):
                p.grad[...] = part
        if not (self._exact or self.compressed):
            return
        for p, part in _places(self._exact, self._first):
            part[...] = p.grad
        for c in self.compressed:
            c.begin(inverse(c.parameter))
        self._axis.all_reduce(self._first, out=self._first)
        for p, part in _places(self._exact, self._first):
            p.grad[...] = part
        if not self.compressed:
            return
        for c in self.tied:
            self._ends.all_reduce(c.left, out=c.left)
        for group in self._groups:
            group[...] = orthonormal(group)
        for c in self.compressed:
            c.project()
        self._axis.all_reduce(self._second, out=self._totals)
        for c in self.tied:
            self._ends.all_reduce(c.total, out=c.total)
        for c in self.compressed:
            c.restore(inverse(c.parameter))


def _alike(c: Compressed) -> tuple[int, int]:
    """Rows and columns of P: those that are the same are made orthonormal together."""
    return c.matrices.n, c.matrices.rank


def _places(parameters: Sequence[Parameter], message: Array) -> list[tuple[Parameter, Array]]:
    """Each parameter and its part of a message, in its shape."""
    found, start = [], 0
    for p in parameters:
        stop = start + p.grad.size
        found.append((p, message[start:stop].reshape(p.grad.shape)))
        start = stop
    return found
