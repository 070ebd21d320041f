"""Local SGD: every worker learns by its own gradients, and after some steps the weights of all are averaged.

    step           0        1        2        3        4        5      ...
    worker a     own g    own g    own g    own g    own g    own g
    worker b     own g    own g    own g    own g    own g    own g
    H = 3                        average                    average

What travels is a weight vector every H steps in place of a gradient vector every step.  In between workers drift apart,
each towards what its own samples say; H = 1 with plain gradient descent is synchronous training, but for rounding:

    sum_w s_w (x - lr g_w)  =  x - lr sum_w s_w g_w        s_w: share of worker w, its targets over those of all

Momentum and other moments stay with the worker, or are averaged with the weights.  With them H = 1 is synchronous
training if the method is linear in its gradient, as momentum is and Adam is not.

Source: Stich 2018, arXiv:1805.09767; weights by samples: McMahan et al. 2016, arXiv:1602.05629, algorithm 1; averaged
momentum: Yu et al. 2019, arXiv:1905.03817, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from mpitrain.backend import Array, array_module
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import ConfigError
from mpitrain.nn.parameter import Flat
from mpitrain.optim.clip import scale
from mpitrain.optim.optimizer import Optimizer, StateTensor
from mpitrain.parallel.workers import WorkerReducer, of_worker
from mpitrain.spec import REPLICATE

OWN = "worker_"
"""Begins the kinds of tensors in a checkpoint of which each worker has its own: worker_first_moment/NAME."""

States = dict[str, dict[str, StateTensor]]


class LocalSgd(WorkerReducer):
    """Averages weights after every H updates, with as many targets as each worker has learned from as its weight.

    Args:
        flats: the model's flat buffers.
        mesh: where the axes come from.
        optimizer: what updates the weights.
        steps: H, updates between two averages.
        average_moments: whether its state is averaged with the weights; else each worker keeps its own.

    Attributes:
        since: updates since the last average; 0: all workers have the same weights.

    Raises:
        ConfigError: H is below 1.

    Cost: wire bytes a rank 2 (n-1)/n x bytes of the masters every H updates, n workers; with moments those of the
        optimizer's state too, in one message.
    Memory: none; while somebody looks at the average between two of them (`whole`), a copy of the masters.
    """

    apart = ("edp",)

    def __init__(
        self, flats: Sequence[Flat], mesh: Mesh, optimizer: Optimizer, steps: int, average_moments: bool = False
    ) -> None:
        super().__init__(flats, mesh)
        if steps < 1:
            raise ConfigError(f"{steps} local steps: workers average their weights after 1 or more.")
        self.steps = steps
        self.average_moments = average_moments
        self.another_run = f"workers of LocalSgd learn apart for {steps} step{'s' * (steps > 1)}"
        self.since = 0
        self._optimizer = optimizer
        self._learned = self._learned_by_all = 0  # targets since the last average
        self._read: list[tuple[Array, Array]] = []  # moments of this worker from a checkpoint, and where they belong
        self._lost = False  # that checkpoint has moments of workers, of which only the first's are read

    @property
    def made_of(self) -> Mapping[str, int]:
        return {"local_steps": self.steps, "average_moments": int(self.average_moments)}

    @property
    def at_rest(self) -> bool:  # type: ignore[override]
        return not self.since

    def arrive(self) -> bool:
        self.since += 1
        self._learned += self.targets
        self._learned_by_all += self.of_all
        return True

    def updated(self) -> None:
        if self.since == self.steps:
            self.join()

    def join(self) -> None:
        """Average now, if workers have parted; the next average comes H updates later."""
        if not self.since:
            return
        self._average_weights()
        if self.average_moments:
            self._average_moments()
        self.since = self._learned = self._learned_by_all = 0

    @contextmanager
    def whole(self) -> Iterator[None]:
        """The weights of the model are the average in the block; afterwards each worker has its own again."""
        if not self.since:
            yield
            return
        own = [flat.masters.copy() for flat in self.shared]
        self._average_weights()
        try:
            yield
        finally:
            for flat, masters in zip(self.shared, own, strict=True):
                flat.masters[...] = masters
                _written(flat)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_tensors(self) -> States:
        """The moments of each worker, where they are its own; the optimizer's are those of the first one."""
        if self.average_moments:
            return {}
        return self._of_worker({name: t.array for name, t in self._moments().items()})

    def state_to_fill(self, saved: Mapping[str, tuple[int, ...]]) -> States:
        """Those of this worker, on as many workers; else the first one's, which the optimizer reads, are for all."""
        here = self._moments()
        self._lost, self._read = False, []  # another checkpoint, a damaged one, may have been read before
        if self.average_moments or any(
            saved.get(f"{OWN}{name}") != (self.axis.size, *t.full_shape) for name, t in here.items()
        ):
            self._lost = parted(saved)
            return {}
        arrays = {name: array_module(t.array).empty_like(t.array) for name, t in here.items()}
        self._read = [(arrays[name], t.array) for name, t in here.items()]
        return self._of_worker(arrays)

    def resumed(self, updates: int) -> str:
        for array, place in self._read:
            place[...] = array
        self._read = []
        return "all workers go on with the moments of the first: those of the others are lost" if self._lost else ""

    def _moments(self) -> dict[str, StateTensor]:
        """KIND/NAME -> tensor, of the optimizer's tensors that all workers have."""
        states = self._optimizer.state_tensors()
        found = {f"{kind}/{name}": t for kind, of in states.items() for name, t in of.items()}
        return {name: t for name, t in found.items() if t.spec.state("edp") == REPLICATE}

    def _of_worker(self, arrays: Mapping[str, Array]) -> States:
        states: States = {f"{OWN}{kind}": {} for kind in self._optimizer.state_tensors()}
        for key, t in self._moments().items():
            kind, _, name = key.partition("/")
            states[f"{OWN}{kind}"][name] = of_worker(t, arrays[key], self.axis.rank, self.axis.size)
        return states

    # -- averages -----------------------------------------------------------------------------------------------------

    def _average_weights(self) -> None:
        for flat in self.shared:
            self._average(flat.masters, "weights")
            _written(flat)

    def _average_moments(self) -> None:
        """All of them in one message."""
        arrays = [t.array for t in self._moments().values()]
        if not arrays:
            return
        vector = array_module(*arrays).concatenate([array.reshape(-1) for array in arrays])
        self._average(vector, "moments")
        start = 0
        for array in arrays:
            array[...] = vector[start : start + array.size].reshape(array.shape)
            start += array.size

    def _average(self, vector: Array, cause: str) -> None:
        scale([vector], self.share(self._learned, self._learned_by_all))
        self.sum_over_workers(vector, cause)


def parted(saved: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a checkpoint holds moments of several workers; `saved`: KIND/NAME -> full shape, of its tensors."""
    return any(name.startswith(OWN) and shape[0] > 1 for name, shape in saved.items())


def _written(flat: Flat) -> None:
    """Masters were written: halves follow, and whoever counts writes hears of it."""
    flat.refresh()
    for p in flat.parameters:
        p.version += 1
