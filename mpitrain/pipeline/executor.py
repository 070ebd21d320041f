"""The executor: runs one rank's list of actions, step after step.

It is the only train loop there is.  Gradient accumulation is the row of one stage with several micro-batches; every
other way to train is another list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import array_module, collection_paused, keep_freed_memory, to_host
from mpitrain.comm.mesh import Mesh
from mpitrain.data.tokens import Batch
from mpitrain.errors import NumericsError, ScheduleError
from mpitrain.events import LISTENERS, Event, tell
from mpitrain.nn.module import Module
from mpitrain.optim.clip import clip, first_not_finite
from mpitrain.optim.optimizer import Optimizer
from mpitrain.parallel.data import FlatReducer, Reducer
from mpitrain.parallel.replicas import agree_on_arithmetic, check_batch
from mpitrain.pipeline.action import Action, Schedule
from mpitrain.pipeline.simulate import check

DATA_AXES = ("edp", "ep", "cp")
"""The axes whose ranks see different tokens: what is counted per token is summed over their merge."""

CHECKED_STEPS = 2
"""The first steps, in which ranks compare every call before data moves: what fits twice fits ever after."""


@dataclass(frozen=True)
class StepReport:
    """What one step did; the same on every rank.

    loss: mean over all valid targets of the step, in nats; grad_norm: global, before clipping; lr: used in this step;
    targets: how many counted.
    """

    loss: float
    grad_norm: float
    lr: float
    targets: int


class Executor:
    """Runs steps.

    Args:
        model: `model(batch) -> Tensor`, the sum over the batch's valid targets of the loss.
        optimizer: over the model's parameters.
        mesh: the layout.
        rows: the schedule, one row a pipeline rank; checked here, before the first step.
        reducer: how gradients are summed; one flat all-reduce unless given.
        clip: largest global gradient norm; 0 leaves gradients alone.
        lr: learning rate by number of updates done; the optimizer's own constant unless given.

    Raises:
        ScheduleError: the rows cannot run, or their number is not that of the pipeline's ranks.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        mesh: Mesh,
        rows: Schedule,
        *,
        reducer: Reducer | None = None,
        clip: float = 0.0,
        lr: Callable[[int], float] | None = None,
    ) -> None:
        if len(rows) != mesh.pp.size:
            raise ScheduleError(f"the schedule has {len(rows)} rows for {mesh.pp.size} pipeline ranks")
        self.peaks = check(rows)
        agree_on_arithmetic(mesh.world)
        mesh.world.hold_checks()  # until the first steps are over: of what comes before them, too
        keep_freed_memory()  # page faults cost up to three quarters of an array operation
        self.model = model
        self.optimizer = optimizer
        self.mesh = mesh
        self.row = rows[mesh.pp.rank]
        self.reducer = reducer if reducer is not None else FlatReducer(model.flats, mesh)
        self.clip = clip
        self.lr = lr
        self.report: StepReport | None = None
        self.empty_steps = 0  # steps in which no rank had a valid target
        self._steps = 0
        self._axis = mesh.merged(DATA_AXES)
        self._counted = [p for p in model.parameters() if self._counts(p)]
        self._last_backward = max(place for place, action in enumerate(self.row) if action.kind == "B")
        self._num_micro = sum(action.kind == "F" for action in self.row)

    def step(self, batch: Any) -> float:
        """One step on this rank's part of the global batch.

        Args:
            batch: has `.split(m)` into m micro-batches, each with `.count` valid targets.

        Returns:
            The loss: mean over all valid targets of all ranks, the same number on every rank.

        Raises:
            DataError: in the first steps: ranks that work on the same rows were given other ones; on every rank.
            NumericsError: the loss or the gradient norm is not finite; on every rank, and no weight was changed.
        """
        self.model.start_step()
        step = _Step(batch)
        if self._steps < CHECKED_STEPS and isinstance(batch, Batch):
            check_batch(batch, self.mesh)
        # What overflows is found by the norm, on all ranks at once; NumPy would warn of one op on one rank.
        with (
            np.errstate(over="ignore", invalid="ignore", divide="ignore"),
            collection_paused(),
        ):
            self._run_all(step)
        self._steps += 1
        if self._steps == CHECKED_STEPS:
            self.mesh.world.release_checks()
        assert self.report is not None
        return self.report.loss

    def _run_all(self, step: _Step) -> None:
        listeners = LISTENERS.get()
        for place, action in enumerate(self.row):
            if not listeners:
                self._run(action, step, place)
                continue
            info = {"action": action, "executor": self, "batch": step.micro(action)}
            tell(listeners, Event("action", "begin", str(action), info))
            self._run(action, step, place)
            tell(listeners, Event("action", "end", str(action), {**info, "output": step.output(action)}))

    def _run(self, action: Action, step: _Step, place: int) -> None:
        micro = -1 if action.micro is None else action.micro
        match action.kind:
            case "LOAD":
                if not step.micros:
                    step.micros = step.batch.split(self._num_micro)
            case "COUNT":
                mine = np.array([sum(micro.count for micro in step.micros)], np.int64)
                step.targets = int(self._axis.all_reduce(mine)[0])
                self.empty_steps += step.targets == 0
            case "F":
                with Tape() as tape:
                    loss = self.model(step.micros[micro])
                step.flying[micro] = (loss, tape)
                step.loss += float(to_host(loss.data))
            case "B":
                loss, tape = step.flying.pop(micro)
                # The one place where the mean is taken: d(mean loss)/d(sum of losses) = 1 / targets of the whole step.
                seed = array_module(loss.data).full_like(loss.data, 1.0 / step.targets if step.targets else 0.0)
                for final in tape.backward([(loss, seed)]):
                    if place == self._last_backward:
                        for p in final:
                            self.reducer.add(p)
            case "REDUCE":
                self.reducer.finish()
            case "STEP":
                self._update(step)

    def _update(self, step: _Step) -> None:
        """Norm over all ranks, clipping, optimizer.  One small all-reduce; every rank gets the same bits."""
        mine = step.loss if self.mesh.coords["tp"] == 0 else 0.0  # ranks of a tp group hold the same loss

        def sum_over_ranks(squares: float) -> float:
            step.loss, total = map(float, self.mesh.world.all_reduce(np.array([mine, squares])))
            return total

        grads = [flat.grads for flat in self.model.flats]
        norm = clip((p.grad for p in self._counted), grads, self.clip or None, sum_over_ranks).norm
        loss = step.loss / step.targets if step.targets else 0.0
        updates = self.optimizer.updates
        lr = self.lr(updates) if self.lr is not None else self.optimizer.lr
        self.report = StepReport(loss, norm, lr, step.targets)
        if not (math.isfinite(norm) and math.isfinite(loss)):
            bad = self.mesh.world.exchange(first_not_finite(self.model.parameters()))
            where = next((f"; the first gradient that is not: {name}" for name in bad if name), "")
            raise NumericsError(
                f"after {updates} updates the loss is {loss} and the gradient norm {norm}: not finite{where}.\n"
                "No weight was changed by this step.  Way out: a lower --lr, a longer --warmup, or --clip 1."
            )
        self.optimizer.step(lr)

    def _counts(self, p: Any) -> bool:
        """Whether this rank counts a parameter in the norm: where it is neither cut nor local, the first rank does."""
        counted_everywhere = p.spec.norm_axes()
        return all(index == 0 or axis in counted_everywhere for axis, index in self.mesh.coords.items())

    def evaluate(self, batches: Iterable[Any]) -> float:
        """Mean loss over the valid targets of all ranks' batches, without tape and dropout; the same on every rank.

        Ranks of the data axis may have different numbers of batches, or none.
        """
        sums = np.zeros(2, np.float64)
        for batch in batches:
            loss: Tensor = self.model(batch)
            sums += (float(to_host(loss.data)), batch.count)
        total, targets = self._axis.all_reduce(sums)
        return float(total / targets) if targets else 0.0


class _Step:
    """What is alive during one step."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.micros: list[Any] = []
        self.flying: dict[int, tuple[Tensor, Tape]] = {}
        self.targets = 0
        self.loss = 0.0

    def micro(self, action: Action) -> Any:
        """The micro-batch of an action, for listeners; None where it has none."""
        return None if action.micro is None or not self.micros else self.micros[action.micro]

    def output(self, action: Action) -> Tensor | None:
        """What an F made, for listeners."""
        return self.flying[action.micro][0] if action.kind == "F" and action.micro in self.flying else None
