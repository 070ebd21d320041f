"""What a checkpoint keeps of PowerSGD: Q of each matrix, and what each rank has left out.

    powersgd_q/NAME        (parts, columns ..., rank)      parts: slabs into which the rows of the matrix are cut
    powersgd_error/NAME    (ranks, full shape ...)         ranks: all that add to the gradient, one error each

Before the first compressed step there is nothing to keep.
On as many ranks each gets its own again, to the bit.  On another number only the sum of the errors means anything, and
each rank takes an equal share of it: what is still to come is the same then (Ramesh et al. 2021, arXiv:2102.12092,
appendix E).  Errors are those of the full tensor, so they go along with any other cut of it.  A Q is of the matrix that
a rank holds: where rows are cut otherwise, or the rank of compression is another, it begins anew, and needs some steps
until it knows the directions again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.comm.mesh import Mesh
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.optimizer import StateTensor
from mpitrain.parallel.powersgd.compressed import Compressed
from mpitrain.parallel.powersgd.matrices import rows_dim
from mpitrain.spec import REPLICATE, Shard, Spec, State, slab, slab_shape

Q, ERROR = "powersgd_q", "powersgd_error"
"""Kinds of tensors in a checkpoint."""

States = dict[str, dict[str, StateTensor]]
Shapes = Mapping[str, tuple[int, ...]]


class Memory:
    """The state of all compressed parameters of a rank, as a checkpoint sees it.

    Args:
        compressed: on this rank.
        exact: names of the other parameters of this rank.
        mesh: the layout.
        warm: whether Q is kept between steps; else it is that of the start and needs no place.
    """

    def __init__(self, compressed: Iterable[Compressed], exact: Iterable[str], mesh: Mesh, warm: bool) -> None:
        self._compressed = list(compressed)
        self._exact = list(exact)
        self._mesh = mesh
        self._warm = warm
        self._of_others: list[tuple[Compressed, Array]] = []  # errors of a run on another number of ranks
        self._told: list[str] = []
        self._new = ""  # whose errors begin at zero

    def tensors(self) -> States:
        """All of it; views."""
        states: States = {Q: {}, ERROR: {}}
        for c in self._compressed:
            if self._warm:
                states[Q][c.parameter.name] = self._q(c)
            if c.error is not None:
                states[ERROR][c.parameter.name] = self._error(c)
        return states

    def to_fill(self, saved: Shapes) -> States:
        """What of it is read from a checkpoint: where to.  All else begins anew.

        Another checkpoint may have been read in part before, which turned out to be damaged.

        Args:
            saved: KIND/NAME -> full shape, of all tensors in it.
        """
        for c in self._compressed:
            c.begin_anew()
        mine = self.tensors()
        kept = any(name.startswith(f"{ERROR}/") for name in saved)
        errors = {name: saved[f"{ERROR}/{name}"] for name in mine[ERROR] if f"{ERROR}/{name}" in saved}
        qs = {name: q for name, q in mine[Q].items() if saved.get(f"{Q}/{name}") == q.full_shape}
        self._of_others = []
        states: States = {Q: qs, ERROR: {}}
        for c in self._compressed:
            name = c.parameter.name
            if name in errors:
                same = errors[name][0] == mine[ERROR][name].full_shape[0]
                states[ERROR][name] = mine[ERROR][name] if same else self._of_all(c, errors[name])
        lost = [*self._exact, *(c.parameter.name for c in self._compressed if c.error is None)]
        self._new = ""
        if len(errors) < len(mine[ERROR]):
            self._new = f"errors {'of what was not compressed before ' * kept}begin at zero"
        self._told = [
            text
            for text, holds in (
                (
                    "what was left out of gradients is lost where they keep no errors any more",
                    any(_in(ERROR, lost, saved)),
                ),
                ("errors are shared out over another number of ranks", self._of_others),
                (
                    "Q begins anew: those that were saved are of another rank or cut",
                    len(qs) < sum(_in(Q, mine[Q], saved)),
                ),
            )
            if holds
        ]
        return states

    def filled(self, compressing: bool) -> str:
        """What was read on another number of ranks is shared out.

        Args:
            compressing: whether steps before this one should have been compressed.

        Returns:
            What could not go on as it was, for people, a line each.
        """
        for c, errors in self._of_others:
            assert c.error is not None
            total = errors[0].astype(np.float64)
            for error in errors[1:]:
                total += error
            c.error[...] = (total / self._adding(c.parameter)[1]).reshape(c.error.shape)
        self._of_others = []
        told = [*self._told, *([self._new] if compressing and self._new else [])]
        return "\n".join(f"PowerSGD: {text}" for text in told)

    def _q(self, c: Compressed) -> StateTensor:
        """Q as a part of a tensor that has, in the place of the rows, the slabs into which they are cut.

        The two ends of a pipeline that share a table have the same Q of it.
        """
        p, rows, sizes = c.parameter, rows_dim(c.parameter), self._mesh.sizes
        cuts = p.spec.shard_dims()
        parts = prod(sizes[axis] for axis, dim in cuts.items() if dim == rows)
        rest = (*p.full_shape[:rows], *p.full_shape[rows + 1 :], c.matrices.rank)
        new_dims = {axis: 0 if dim == rows else dim + (dim < rows) for axis, dim in cuts.items()}
        spec = Spec({axis: Shard(dim) for axis, dim in new_dims.items()} | _uncut(p))
        rectangle = slab((parts, *rest), spec, self._mesh.coords, sizes)
        return StateTensor(c.q.reshape(slab_shape(rectangle)), (parts, *rest), rectangle, spec)

    def _error(self, c: Compressed) -> StateTensor:
        """An error as a part of the tensor of all ranks' errors."""
        assert c.error is not None
        p, (place, ranks) = c.parameter, self._adding(c.parameter)
        rectangle = (slice(place, place + 1), *p.rectangle)
        return StateTensor(c.error.reshape(slab_shape(rectangle)), (ranks, *p.full_shape), rectangle, _of_ranks(p))

    def _of_all(self, c: Compressed, saved: tuple[int, ...]) -> StateTensor:
        """Room for the errors of all ranks of another run, of the part of the tensor that is here."""
        assert c.error is not None
        p, ranks = c.parameter, saved[0]
        errors = array_module(c.error).empty((ranks, *p.grad.shape), c.error.dtype)
        self._of_others.append((c, errors))
        return StateTensor(errors, (ranks, *p.full_shape), (slice(0, ranks), *p.rectangle), _of_ranks(p))

    def _adding(self, p: Parameter) -> tuple[int, int]:
        """This rank's place among those that add to the gradient of a parameter, and how many they are."""
        axis, (end, ends) = self._mesh.merged(p.spec.replicate_axes()), self._end(p)
        return end * axis.size + axis.rank, ends * axis.size

    def _end(self, p: Parameter) -> tuple[int, int]:
        """Which end of the pipeline this is, and of how many that hold the parameter."""
        return (self._mesh.ends.rank, self._mesh.ends.size) if p.spec.tied else (0, 1)


def is_in(saved: Shapes) -> bool:
    """Whether a checkpoint is of a run that has compressed something."""
    return any(name.startswith((f"{Q}/", f"{ERROR}/")) for name in saved)


def _in(kind: str, names: Iterable[str], saved: Shapes) -> list[bool]:
    return [f"{kind}/{name}" in saved for name in names]


def _uncut(p: Parameter) -> dict[str, State]:
    """How a parameter lies over the axes that do not cut it."""
    cuts = p.spec.shard_dims()
    tied = {"ends": REPLICATE} if p.spec.tied else {}
    return {axis: p.spec.state(axis) for axis in ("edp", "ep", "cp", "tp") if axis not in cuts} | tied


def _of_ranks(p: Parameter) -> Spec:
    """How the errors of a parameter lie: in their first dim the ranks that add to its gradient."""
    ranks = {axis: Shard(0) for axis in p.spec.replicate_axes()}
    return Spec({**ranks, **{axis: Shard(dim + 1) for axis, dim in p.spec.shard_dims().items()}})
