"""One compressed parameter on one rank: its matrices, what was left out of them, and its Q."""

from __future__ import annotations

import numpy as np

from mpitrain import rng
from mpitrain.backend import Array, array_module
from mpitrain.nn.parameter import Parameter
from mpitrain.parallel.powersgd.matrices import Matrices, rows_dim
from mpitrain.parallel.powersgd.products import outer_sum, unit_columns


class Compressed:
    """What a rank keeps of a parameter, and its part in the two messages of a step.

    Args:
        p: the parameter.
        matrices: as which it is compressed.
        feedback: whether what is left out is kept.
        seed: of the first Q.

    Attributes:
        error: (stack, n, m) what was left out up to now.
        q: (stack, m, rank) with which the next step begins.
        left: (stack, n, rank) P, then its basis.
        right: (stack, m, rank) Q of this rank alone; total: that of all.  These three lie in the messages.
    """

    def __init__(self, p: Parameter, matrices: Matrices, feedback: bool, seed: int) -> None:
        self.parameter, self.matrices, self.feedback = p, matrices, feedback
        stack, n, m, rank = matrices
        xp, dtype = array_module(p.grad), p.grad.dtype
        self._delta = xp.zeros((stack, n, m), dtype)  # gradient and error of a step, then what the step leaves out
        self.error = xp.zeros((stack, n, m), dtype) if feedback else None
        self.q = xp.empty((stack, m, rank), dtype)
        self._seed = seed
        self.begin_anew()
        self.left: Array
        self.right: Array
        self.total: Array

    @property
    def arrays(self) -> list[Array]:
        """What is kept besides the messages."""
        return [self._delta, self.q, *([] if self.error is None else [self.error])]

    def begin_anew(self) -> None:
        """Nothing was left out up to now, and Q is that of the start."""
        xp, q = array_module(self.q), first_q(self.parameter, self.matrices.rank, self._seed)
        self.q[...] = xp.asarray(q.astype(self.q.dtype)).reshape(self.q.shape)
        if self.error is not None:
            self.error[...] = 0

    def begin(self, inverse: float) -> None:
        """D_w Q; `inverse`: of the scale that the gradient carries."""
        xp = array_module(self._delta)
        xp.multiply(self._grad, inverse, out=self._delta)
        if self.error is not None:
            self._delta += self.error
        self.left[...] = xp.matmul(self._delta, unit_columns(self.q))

    def project(self) -> None:
        """D_w^T P^, and what that leaves out; the gradient is used up."""
        xp = array_module(self._delta)
        self.right[...] = xp.matmul(self._delta.swapaxes(1, 2), self.left)
        if self.feedback:
            xp.matmul(self.left, self.right.swapaxes(1, 2), out=self._grad)
            self._delta -= self._grad

    def restore(self, inverse: float) -> None:
        """The gradient is P^ Q^T, with the scale that it had."""
        outer_sum(self.left, self.total if inverse == 1.0 else self.total / inverse, out=self._grad)

    def keep(self, warm: bool) -> None:
        """The step counts: what it left out is the error from now on, and its Q that of the next step if `warm`."""
        if self.error is not None:
            self.error, self._delta = self._delta, self.error
        if warm:
            self.q[...] = self.total

    @property
    def _grad(self) -> Array:
        return self.parameter.grad.reshape(self._delta.shape)


def first_q(p: Parameter, rank: int, seed: int) -> np.ndarray:
    """The random Q of the start, from the stream of the parameter's name.

    Ranks that hold other rows of a matrix begin with the same Q, those of other columns with their own part of it.

    Returns:
        float64 of the shape of the slab without its rows, and `rank`.
    """
    rows = rows_dim(p)
    full_shape = (*p.full_shape[:rows], *p.full_shape[rows + 1 :], rank)
    part = (*p.rectangle[:rows], *p.rectangle[rows + 1 :], slice(0, rank))
    return rng.normal(seed, f"powersgd {p.name}", full_shape, part)
