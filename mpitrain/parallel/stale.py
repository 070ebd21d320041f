"""Stale gradients: what an update applies was computed some steps ago.  For comparison: it harms learning.

In asynchronous training workers do not wait for each other.  Each fetches the weights, computes a gradient, and by the
time that this reaches the weights the others have changed them: it is the gradient of weights that are no more.  How
late it comes depends on who was how fast.  Here it is simulated, so that a run can be repeated to the last bit:

    step              0    1    2    3    4    5
    Stale, K = 2      -    -    g0   g1   g2   g3        gt: the gradient at the weights of step t, of all ranks
    StaleWorkers      a0   a1   a2   a3   a4   a5        worker a is not late,
                      -    b0   b1   b2   b3   b4        b by one step,
                      -    -    c0   c1   c2   c3        c by two: the update is their sum

`Stale` makes no update in its first K steps: nothing has arrived.  (An update by zeros would be one: AdamW's weights
decay in it.)  It may begin after some updates that are on time; with K = 1 it then is what offload knows as the
delayed update, for which the optimizer works on one step's gradients while the next step computes.  `StaleWorkers`
lets worker i be late by i mod (K+1) steps, and counts as zero what has not arrived.  In both, a gradient is measured,
unscaled, clipped or refused in the step that computed it.  A step that is skipped, since its gradients overflowed,
hands in nothing and takes nothing out.  The gradients of the last steps of a run are never applied.

Source: Dean et al. 2012, "Large scale distributed deep networks" (Downpour); bounded delay: Ho et al. 2013, "More
effective distributed ML via a stale synchronous parallel parameter server"; Chen et al. 2016, arXiv:1604.00981, section
2.1 (what staleness costs, measured by a simulation of this kind); delayed update: Ren et al. 2021, ZeRO-Offload,
arXiv:2101.06840, section 5.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpitrain.backend import Array, array_module
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.nn.parameter import Flat, Parameter
from mpitrain.optim.clip import scale
from mpitrain.optim.optimizer import StateTensor
from mpitrain.parallel.data import FlatReducer
from mpitrain.parallel.workers import WorkerReducer, of_worker

KIND = "pending_gradient"
"""Of tensors in a checkpoint, with their age in steps behind it: pending_gradient_1/NAME."""

States = dict[str, dict[str, StateTensor]]


class Stale(FlatReducer):
    """Gradients of all ranks together, applied so many steps late.

    Args:
        flats: the model's flat buffers.
        mesh: where the axes to sum over come from.
        staleness: K, steps between computing a gradient and applying it; 0 is `FlatReducer`, to the last bit.
        start: updates that are made with gradients on time, before the first one that is late.

    Raises:
        ConfigError: K or the start is negative.

    Cost: messages as of `FlatReducer`.
    Memory: K gradient vectors, each from the step on that first hands it in.
    """

    def __init__(self, flats: Sequence[Flat], mesh: Mesh, staleness: int, start: int = 0) -> None:
        super().__init__(flats, mesh)
        self.staleness = _checked(staleness)
        if start < 0:
            raise ConfigError(f"Stale: start {start} (in updates) must be 0 or more.")
        self.start = start
        self.pending = Pending(flats, staleness)
        self._on_time = 0  # updates so far, up to the start

    @property
    def made_of(self) -> Mapping[str, int]:
        return {"staleness": self.staleness, "start": self.start}

    @property
    def pending_gradients(self) -> Sequence[Array]:
        return self.pending.vectors

    def arrive(self) -> bool:
        if self._on_time < self.start:
            self._on_time += 1
            return True
        return self.pending.exchange()

    def state_tensors(self) -> States:
        """Of each step whose gradients are on their way: they lie as the parameters do, so any layout can go on."""
        return {
            _kind(age): {
                p.name: StateTensor(array, p.full_shape, p.rectangle, p.spec) for p, array in self.pending.of_age(age)
            }
            for age in range(1, self.pending.steps + 1)
        }

    def state_to_fill(self, saved: Mapping[str, tuple[int, ...]]) -> States:
        """All that is saved.

        Raises:
            CheckpointError: it is of a run with more staleness.
        """
        self.pending.forget()
        self.pending.steps = len({name.partition("/")[0] for name in saved if name.startswith(KIND)})
        if self.pending.steps > self.staleness:
            raise CheckpointError(self._odd())
        return self.state_tensors()

    def resumed(self, updates: int) -> str:
        """The checkpoint was read.

        Raises:
            CheckpointError: it is of a run with an earlier start.
        """
        self._on_time = min(updates, self.start)
        waiting = self.pending.steps
        if updates < self.start and waiting:
            raise CheckpointError(self._odd())
        missing = self.staleness - waiting
        if updates <= self.start or not missing:
            return ""
        return (
            f"the next {f'{missing} steps make' if missing > 1 else 'step makes'} no update: staleness is"
            f" {self.staleness}, and gradients of {waiting} step{'s' * (waiting != 1)} are on their way"
        )

    def _odd(self) -> str:
        return (
            f"The checkpoint holds gradients of {self.pending.steps} steps on their way to the weights, staleness"
            f" {self.staleness} {f'after {self.start} updates ' if self.start else ''}means {self.staleness}.\n"
            "A run goes on with the start that it began with, and with its staleness or more."
        )


class StaleWorkers(WorkerReducer):
    """Gradients of each worker, applied as many steps late as it is slow: worker i by i mod (K+1).

    A worker clips by the norm of its own gradient, since it knows no other.  What arrives is weighted with the worker's
    share of the targets of the step in which it was computed.

    Args:
        flats: the model's flat buffers.
        mesh: where the axes come from.
        staleness: K, the most steps that a worker may be late; at least 1.

    Attributes:
        delay: of this worker, in steps.

    Raises:
        ConfigError: K is below 1: all workers would be on time.

    Cost: as `FlatReducer`, with the sum over workers in float32 also for halves.
    Memory: as many gradient vectors as the worker is late.
    """

    def __init__(self, flats: Sequence[Flat], mesh: Mesh, staleness: int) -> None:
        super().__init__(flats, mesh)
        if staleness < 1:
            raise ConfigError(
                f"staleness {staleness} of StaleWorkers: no worker would be late.  Give 1 or more, or take FlatReducer."
            )
        self.staleness = staleness
        self.delay = self.axis.rank % (staleness + 1)
        self.another_run = f"gradients of StaleWorkers come up to {staleness} step{'s' * (staleness > 1)} late"
        self.pending = Pending(self.shared, self.delay)
        self._begins = False  # from a checkpoint of a run in which nobody was late

    @property
    def made_of(self) -> Mapping[str, int]:
        return {"staleness": self.staleness}

    @property
    def pending_gradients(self) -> Sequence[Array]:
        return self.pending.vectors

    def arrive(self) -> bool:
        scale([flat.grads for flat in self.shared], self.share(self.targets, self.of_all))
        self.pending.exchange()
        for flat in self.shared:
            self.sum_over_workers(flat.grads, "gradients")  # in full: without a scale halves would lose small ones
        return True  # worker 0 is never late

    def state_tensors(self) -> States:
        """Of each age the gradients of the workers that are late by as much or more."""
        states: States = {}
        for age, late in self._late().items():
            mine = self.pending.of_age(age) if self.axis.rank in late else []
            states[_kind(age)] = {
                p.name: of_worker(p, array, late.index(self.axis.rank), len(late)) for p, array in mine
            }
        return states

    def state_to_fill(self, saved: Mapping[str, tuple[int, ...]]) -> States:
        """All that is saved.

        Raises:
            CheckpointError: it is of a run with other workers, or another staleness.
        """
        self.pending.forget()
        found = {(name.partition("/")[0], shape[0]) for name, shape in saved.items() if name.startswith(KIND)}
        wanted = {(_kind(age), len(late)) for age, late in self._late().items()}
        self._begins = not found and bool(wanted)
        if self._begins:
            return {}
        if found != wanted:
            raise CheckpointError(
                f"The checkpoint holds other gradients on their way to the weights than those of {self.axis.size}"
                f" workers that are up to {self.staleness} steps late.\n"
                "A run goes on with as many workers, and the staleness, that it began with."
            )
        return self.state_tensors()

    def resumed(self, updates: int) -> str:
        if not (self._begins and updates):
            return ""
        return "no worker was late up to here: what late ones hand in counts as zero until it has arrived"

    def _late(self) -> dict[int, list[int]]:
        """Age -> the workers whose gradients get so old."""
        delays = [worker % (self.staleness + 1) for worker in range(self.axis.size)]
        return {
            age: [worker for worker, delay in enumerate(delays) if delay >= age] for age in range(1, max(delays) + 1)
        }


class Pending:
    """Gradients on their way to the weights: those of the last `delay` steps.

    Args:
        flats: the buffers whose gradients they are.
        delay: steps that each of them takes.

    Attributes:
        steps: how many handed in gradients, up to `delay`.
        vectors: that hold them, as long as the buffers' own; each is made when it is first needed.
    """

    def __init__(self, flats: Sequence[Flat], delay: int) -> None:
        self.delay = delay
        self.steps = 0
        self.vectors: list[Array] = []
        self._flats = flats
        self._parameters = [p for flat in flats for p in flat.parameters]
        self._places: list[list[Array]] = []  # by age: the newest first

    def of_age(self, age: int) -> list[tuple[Parameter, Array]]:
        """What was handed in so many steps ago, from 1 to `delay`; zeros where nothing was."""
        while len(self._places) < age:
            self._places.append(self._room())
        return [*zip(self._parameters, self._places[age - 1], strict=True)]

    def forget(self) -> None:
        """Nothing was handed in; what was read before of a checkpoint that is damaged is not there."""
        self.steps = 0
        for vector in self.vectors:
            vector[...] = 0

    def exchange(self) -> bool:
        """Hand in the gradients of this step, and put those of `delay` steps ago in their place.

        Returns:
            Whether there are any; where not, zeros are there.
        """
        if not self.delay:
            return True
        oldest = self._places.pop() if len(self._places) == self.delay else self._room()
        for p, kept in zip(self._parameters, oldest, strict=True):  # one by one: only that much is held twice
            fresh = p.grad.copy()
            p.grad[...] = kept
            kept[...] = fresh
        self._places.insert(0, oldest)
        arrived = self.steps == self.delay
        self.steps = min(self.steps + 1, self.delay)
        return arrived

    def _room(self) -> list[Array]:
        """Zeros for the gradients of one more step."""
        vectors = [array_module(flat.grads).zeros_like(flat.grads) for flat in self._flats]
        self.vectors += vectors
        return [view for flat, vector in zip(self._flats, vectors, strict=True) for view in flat.views(vector)]


def _kind(age: int) -> str:
    return f"{KIND}_{age}"


def _checked(staleness: int) -> int:
    if staleness < 0:
        raise ConfigError(f"staleness {staleness}: gradients cannot come before they are computed; give 0 or more.")
    return staleness
