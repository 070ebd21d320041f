"""Workers: replicas of the model that learn apart from each other, for the length of a message or for some steps.

A worker is one place on the axis edp: the ranks of pp, ep, cp and tp there, which hold one model together.  (Where no
experts are spread over ranks, edp is dp.)  Inside of a worker nothing is new: gradients are summed over its ranks, at
every step.  Between workers a scheme of its own takes the place of the sum.

    gradient    the mean over the worker's own targets, not over those of the step
    norm        of that gradient; each worker clips by its own, and what is reported is the root of the mean of squares
    share       of a worker in what all of them make together: its targets over those of all
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mpitrain.autograd.tape import PATH
from mpitrain.backend import Array
from mpitrain.comm.mesh import Mesh
from mpitrain.nn.parameter import Flat
from mpitrain.optim.optimizer import StateTensor
from mpitrain.parallel.data import Reducer, as_sent, settle
from mpitrain.spec import ATOMIC_AXES, REPLICATE, Shard, Spec


class WorkerReducer(Reducer):
    """Sums gradients over the ranks of this worker, and leaves the rest to a scheme.

    Args:
        flats: the model's flat buffers.
        mesh: where the axes come from.

    Attributes:
        axis: the workers.
        shared: the buffers of parameters that all workers have.
        targets, of_all: how many the last step had here, and on all workers together.

    Cost: as `FlatReducer` over the axes that are left without edp; nothing where those have one rank.
    """

    local = True

    def __init__(self, flats: Sequence[Flat], mesh: Mesh) -> None:
        self.axis = mesh.edp
        self.shared = [flat for flat in flats if "edp" in flat.axes]
        self.targets = self.of_all = 0
        inside = [tuple(axis for axis in flat.axes if axis != "edp") for flat in flats]
        self._inside = [(flat, mesh.merged(axes), bool(axes)) for flat, axes in zip(flats, inside, strict=True)]

    def counted(self, targets: int, of_all: int) -> None:
        self.targets, self.of_all = targets, of_all

    def finish(self) -> None:
        for flat, axis, is_summed in self._inside:
            settle(flat.parameters)
            if is_summed:
                axis.all_reduce(as_sent(flat.grads, flat.weights, axis), out=flat.grads)

    def sum_over_workers(self, vector: Array, cause: str) -> None:
        """In place; a ledger names the message after its cause."""
        path = PATH.set(cause)
        self.axis.all_reduce(vector, out=vector)
        PATH.reset(path)

    def share(self, targets: int, of_all: int) -> float:
        """Of this worker in a sum over all; an even one where nobody has targets."""
        return targets / of_all if of_all else 1.0 / self.axis.size


class _Lies(Protocol):
    """How a tensor lies across the ranks of a worker."""

    @property
    def full_shape(self) -> tuple[int, ...]: ...
    @property
    def rectangle(self) -> tuple[slice, ...]: ...
    @property
    def spec(self) -> Spec: ...


def of_worker(lies: _Lies, array: Array, place: int, workers: int) -> StateTensor:
    """What one worker holds of its own, as a part of a tensor of all workers, for a checkpoint.

    Args:
        lies: how it lies across the worker's ranks.
        array: this rank's part of it.
        place: of this worker among those that have such a tensor.
        workers: how many have one.

    Returns:
        `array` as slice `place` of dim 0; a view.
    """
    states = {axis: lies.spec.state(axis) for axis in ATOMIC_AXES}
    moved = {axis: state if state.dim is None else Shard(state.dim + 1) for axis, state in states.items()}
    tied = {"ends": REPLICATE} if lies.spec.tied else {}
    full_shape, rectangle = (workers, *lies.full_shape), (slice(place, place + 1), *lies.rectangle)
    return StateTensor(array[None], full_shape, rectangle, Spec({**moved, **tied, "edp": Shard(0)}))
