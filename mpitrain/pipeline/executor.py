"""The executor: runs one rank's list of actions, step after step.

It is the only train loop there is.  Gradient accumulation is the row of one stage with several micro-batches, a pipeline
is other rows, and every other way to train is one more list.

    LOAD COUNT           batches become micro-batches, their targets are counted
    RECV_F F SEND_F      a stage's forward, on a tape of its own
    RECV_B B W SEND_B    the tape back; B and W are its two halves where a schedule parts them
    REDUCE STEP          gradients are summed over ranks, weights are updated

Messages are posted and waited for here and nowhere else; what they carry is the model's business (`forward_stage`,
`boundary`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from mpitrain.autograd.carry import Carry
from mpitrain.autograd.tape import Seed, Slot, Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, collection_paused, keep_freed_memory, to_device, to_host
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.request import Request
from mpitrain.data.tokens import Batch
from mpitrain.errors import NumericsError, ScheduleError
from mpitrain.events import LISTENERS, Event, tell
from mpitrain.nn.module import Module
from mpitrain.optim.clip import clip, first_not_finite, sum_of_squares
from mpitrain.optim.optimizer import Optimizer
from mpitrain.optim.versions import Versions
from mpitrain.parallel.data import FlatReducer, Reducer, sum_over_ends
from mpitrain.parallel.replicas import agree_on_arithmetic, check_batch
from mpitrain.parallel.stages import Links, pass_through
from mpitrain.pipeline.action import Action, Row, Schedule
from mpitrain.pipeline.check import Checked, check

DATA_AXES = ("edp", "ep", "cp")
"""The axes whose ranks see different tokens: what is counted per token is summed over their merge."""

CHECKED_STEPS = 2
"""The first steps, in which ranks compare every call before data moves: what fits twice fits ever after."""

KEPT_ROWS = 8
"""Checked rows of different lengths that an asynchronous pipeline keeps."""


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
        model: `model(batch) -> Tensor`, the sum over the batch's valid targets of the loss; or one that is cut into
            stages (`mpitrain.nn.Module`).
        optimizer: over the model's parameters.
        mesh: the layout.
        rows: the schedule, one row a pipeline rank; checked here, before the first step.  Where steps overlap
            (`versions`): a function that gives the schedule of so many batches.
        reducer: how gradients are summed; one flat all-reduce unless given.
        clip: largest global gradient norm; 0 leaves gradients alone.
        lr: learning rate by number of updates done; the optimizer's own constant unless given.
        versions: None: every micro-batch of a step sees the same weights.  "newest" or "previous": steps overlap, and
            forward takes the newest version of its stage's weights, or the one before that of its batch
            (mpitrain.optim.versions).
        slices: lengths into which the sequences of a micro-batch are cut; None: they stay whole.

    Attributes:
        checked: what the checker found out about the rows.
        report: of the last step.

    Raises:
        ScheduleError: the rows cannot run, or are not those of this mesh and model.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        mesh: Mesh,
        rows: Schedule | Callable[[int], Schedule],
        *,
        reducer: Reducer | None = None,
        clip: float = 0.0,
        lr: Callable[[int], float] | None = None,
        versions: str | None = None,
        slices: Sequence[int] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.mesh = mesh
        self.slices = None if slices is None else tuple(slices)
        self._rows_of: Callable[[int], Schedule] = rows if callable(rows) else lambda _: rows
        self._plans: dict[int, _Plan] = {}
        self.checked = self._plan(1).checked
        agree_on_arithmetic(mesh.world)
        mesh.world.hold_checks()  # until the first steps are over: of what comes before them, too
        keep_freed_memory()  # page faults cost up to three quarters of an array operation
        self.reducer = reducer if reducer is not None else FlatReducer(model.flats, mesh)
        if versions == "newest" and (clip or any(p.spec.tied for p in model.parameters())):
            raise ScheduleError(
                "stages that update with their newest weights do so at different times: no global norm is known, and tied"
                " weights cannot be kept equal.\nLeave out clip and tie no weights, or take versions='previous'."
            )
        self.versions = None if versions is None else Versions(model.flats, optimizer, versions)
        self.clip = clip
        self.lr = lr
        self.report: StepReport | None = None
        self.empty_steps = 0  # steps in which no rank had a valid target
        self.links = Links(mesh.pp, self.checked.placement)
        self._steps = 0
        self._axis = mesh.merged(DATA_AXES)
        self._counted = [p for p in model.parameters() if self._counts(p)]
        self._running: _Run | None = None

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> float:
        """One step on this rank's part of the global batch.

        Args:
            batch: has `.split(m)` into m micro-batches, each with `.count` valid targets; the same on all ranks of a
                pipeline.

        Returns:
            The loss: mean over all valid targets of all ranks, the same number on every rank.

        Raises:
            DataError: in the first steps: ranks that work on the same rows were given other ones; on every rank.
            NumericsError: the loss or the gradient norm is not finite; on every rank, and no weight was changed.
        """
        return self.run([batch])[0].loss

    def run(self, batches: Sequence[Any]) -> list[StepReport]:
        """One step for each batch; where steps overlap, all in one row, at whose end nothing is in flight any more.

        Args:
            batches: as for `step`.

        Returns:
            One report a step.

        Raises:
            DataError: as for `step`.
            NumericsError: as for `step`; where steps overlap without an agreement on each, it is found at the end of
                the row, when weights were changed already.
        """
        if self.versions is not None:
            return self._run_row(batches)
        return [report for batch in batches for report in self._run_row([batch])]

    def _run_row(self, batches: Sequence[Any]) -> list[StepReport]:
        self.model.start_step()
        if self._steps < CHECKED_STEPS:
            for batch in batches[: CHECKED_STEPS - self._steps]:
                if isinstance(batch, Batch):
                    check_batch(batch, self.mesh)
        run = self._running = _Run(batches, self._plan(len(batches)))
        # What overflows is found by the norm, on all ranks at once; NumPy would warn of one op on one rank.
        with (
            np.errstate(over="ignore", invalid="ignore", divide="ignore"),
            collection_paused(),
        ):
            try:
                self._run_all(run)
            finally:
                self._running = None
                if self.versions is not None:
                    self.versions.settle()  # after an error, too: who looks at a weight sees the newest
        before, self._steps = self._steps, self._steps + len(batches)
        if before < CHECKED_STEPS <= self._steps:
            self.mesh.world.release_checks()
        self.report = run.reports[-1]
        return run.reports

    @property
    def row(self) -> Row:
        """The actions of this rank: of the row that runs, else of a row of one batch."""
        return (self._plan(1) if self._running is None else self._running.plan).row

    @property
    def bytes_in_flight(self) -> int:
        """What this rank holds for micro-batches at this moment: tapes, inputs and gradients that have arrived and were
        not used yet, outputs that have not been received yet.
        """
        return self.links.unsent + (0 if self._running is None else self._running.nbytes)

    def _plan(self, batches: int) -> _Plan:
        """The checked rows for so many batches."""
        plan = self._plans.get(batches)
        if plan is None:
            rows = self._rows_of(batches)
            if len(rows) != self.mesh.pp.size:
                raise ScheduleError(f"the schedule has {len(rows)} rows for {self.mesh.pp.size} pipeline ranks")
            checked = check(rows)
            here = tuple(q for q, rank in enumerate(checked.placement) if rank == self.mesh.pp.rank)
            if (len(checked.placement), here) != (self.model.num_stages, self.model.stages):
                raise ScheduleError(
                    f"the schedule has {len(checked.placement)} stages, of which row {self.mesh.pp.rank} runs"
                    f" {_numbers(here)}; the model has {self.model.num_stages}, and {_numbers(self.model.stages)} are"
                    " on this rank"
                )
            plan = _Plan(rows[self.mesh.pp.rank], checked, batches)
            if plan.parts != len(self.slices or (0,)):
                raise ScheduleError(
                    f"the schedule cuts sequences into {plan.parts} slices, but {len(self.slices or (0,))} lengths are"
                    " given"
                )
            if len(self._plans) >= KEPT_ROWS:
                self._plans.pop(next(iter(self._plans)))
            self._plans[batches] = plan
        return plan

    # -- actions ------------------------------------------------------------------------------------------------------

    def _run_all(self, run: _Run) -> None:
        listeners = LISTENERS.get()
        for place, action in enumerate(run.plan.row):
            if not listeners:
                self._run(action, run, place)
                continue
            info = {"action": action, "executor": self, "batch": run.part(action)}
            if action.kind == "F":
                info["inputs"] = self._inputs(action, run)
                info["boundary"] = self.model.boundary(action.stage, run.part(action))
            tell(listeners, Event("action", "begin", str(action), info))
            self._run(action, run, place)
            tell(listeners, Event("action", "end", str(action), {**info, **run.made(action)}))

    def _run(self, action: Action, run: _Run, place: int) -> None:
        match action.kind:
            case "LOAD":
                self._load(action, run)
            case "COUNT":
                self._count(action.micro or 0, run)
            case "RECV_F" | "RECV_B":
                self._receive(action, run, place)
            case "F":
                self._forward(action, run)
            case "SEND_F":
                self._send_forward(action, run)
            case "B":
                self._backward(action, run, place)
            case "W":
                self._announce(run.flying.pop(_key(action)).tape.backward_weights(), run, place)
                self._leave(action, run)
            case "SEND_B":
                gradients = run.gradients.pop(_beside(_key(action), action.stage - 1))
                self.links.send("B", action.stage, run.plan.unit(action), gradients)
            case "REDUCE":
                self.reducer.finish()
                sum_over_ends(self.model.parameters(), self.mesh)
            case "STEP":
                self._update(action.micro or 0, run)
        if place == len(run.plan.row) - 1:  # with the last action, so that who listens sees these messages in a step
            self.links.finish()
            if self.versions is not None:
                self._report_all(run)

    def _load(self, action: Action, run: _Run) -> None:
        assert action.micro is not None
        per = run.plan.per_batch
        number, place = divmod(action.micro, per)
        if place == 0:
            run.micros[number] = run.batches[number].split(per)
        micro = run.micros[number][place]
        parts = [micro] if self.slices is None else micro.slices(self.slices)
        run.parts.update(((action.micro, part), piece) for part, piece in enumerate(parts))

    def _count(self, number: int, run: _Run) -> None:
        mine = np.array([sum(micro.count for micro in run.micros[number])], np.int64)
        run.targets[number] = int(self._axis.all_reduce(mine)[0])
        self.empty_steps += run.targets[number] == 0

    # -- messages -----------------------------------------------------------------------------------------------------

    def _expect(self, action: Action, run: _Run) -> list[Request]:
        """Post the receives of a RECV."""
        kind = action.kind[-1]
        into = action.stage if kind == "F" else action.stage + 1
        return self.links.expect(kind, action.stage, run.plan.unit(action), self.model.boundary(into, run.part(action)))

    def _receive(self, action: Action, run: _Run, place: int) -> None:
        requests = run.posted.pop(action, None) or self._expect(action, run)
        follower = run.plan.next_receive.get(place)
        if follower is not None and run.part(follower) is not None:
            run.posted[follower] = self._expect(follower, run)
        arrays = [to_device(request.wait(), self.model.like) for request in requests]
        into = run.arrived if action.kind == "RECV_F" else run.gradients
        into[_key(action)] = arrays
        self.links.reap()

    def _send_forward(self, action: Action, run: _Run) -> None:
        flight = run.flying[_key(action)]
        self.links.send("F", action.stage, run.plan.unit(action), [t.data for t in flight.outputs])
        flight.forget_arrays()

    # -- forward and backward -----------------------------------------------------------------------------------------

    def _inputs(self, action: Action, run: _Run) -> tuple[Tensor, ...]:
        """The inputs of an F as leaves, made once."""
        key = _key(action)
        if key not in run.inputs:
            run.inputs[key] = tuple([Tensor(array, requires_grad=True) for array in run.arrived.pop(key, ())])
        return run.inputs[key]

    def _forward(self, action: Action, run: _Run) -> None:
        key, stage = _key(action), action.stage
        inputs = self._inputs(action, run)
        del run.inputs[key]
        carry = self._carry(action, run)
        if self.versions is not None:
            self.versions.enter(key, run.plan.batch_of(action))
        with Tape() as tape:
            outputs = self.model.run_stage(stage, run.part(action), *inputs, carry=carry)
        flight = run.flying[key] = _Flight(tape, inputs, outputs, carry)
        if stage == self.model.num_stages - 1:
            run.losses[run.plan.batch_of(action)] += float(to_host(outputs[0].data))
        elif self.links.is_here(stage + 1):
            run.arrived[_beside(key, stage + 1)] = [t.data for t in outputs]
            flight.forget_arrays()

    def _carry(self, action: Action, run: _Run) -> Carry | None:
        """What the slices of a micro-batch hand on to each other on this stage; None for whole sequences."""
        if self.slices is None:
            return None
        carry = run.carries.setdefault((action.micro, action.stage), Carry())
        carry.begin(action.part or 0)
        return carry

    def _backward(self, action: Action, run: _Run, place: int) -> None:
        key, stage = _key(action), action.stage
        flight = run.flying[key]
        tape, part = flight.tape, action.part or 0
        if stage == self.model.num_stages - 1:
            (loss,) = flight.outputs
            targets = run.targets[run.plan.batch_of(action)]
            # The one place where the mean is taken: d(mean loss)/d(sum of losses) = 1 / targets of the whole step.
            gradients = [array_module(loss.data).full_like(loss.data, 1.0 / targets if targets else 0.0)]
        else:
            gradients = run.gradients.pop(key)
        seeds, untouched = flight.seeds(gradients)
        if flight.carry is not None:
            seeds += flight.carry.seeds(part)
        if run.plan.is_split(action):
            tape.backward_inputs(seeds)
        else:
            self._announce(tape.backward(seeds), run, place)
        if flight.carry is not None:
            flight.carry.pass_back(part, tape)
        if stage:
            run.gradients[_beside(key, stage - 1)] = flight.input_gradients(untouched)
        flight.done()
        if not run.plan.is_split(action):
            del run.flying[key]
            self._leave(action, run)

    def _announce(self, finals: Iterable[tuple[Any, ...]], run: _Run, place: int) -> None:
        """Walk, and tell the reducer which gradients are final."""
        last = place in run.plan.last_walks
        for final in finals:
            if last:
                for p in final:
                    # A tied weight that has both its uses here is final after the other one; it leaves at REDUCE.
                    if len(self.model.stages) == 1 or not p.spec.tied:
                        self.reducer.add(p)

    def _leave(self, action: Action, run: _Run) -> None:
        """Nothing of a micro-batch needs its version of the weights any more."""
        if self.versions is not None:
            self.versions.leave(_key(action))

    # -- updates ------------------------------------------------------------------------------------------------------

    def _update(self, number: int, run: _Run) -> None:
        """Norm, clipping, optimizer."""
        lr = self.lr(self.optimizer.updates) if self.lr is not None else self.optimizer.lr
        if self.versions is None or self.clip:
            self._agree(number, run, lr)
        else:
            run.squares[number] = sum_of_squares(p.grad for p in self._counted)
            run.rates[number] = lr
        if self.versions is None:
            self.optimizer.step(lr)
            return
        self.versions.renew()
        self.optimizer.step(lr)
        self.model.start_step()

    def _agree(self, number: int, run: _Run, lr: float) -> None:
        """Norm over all ranks and clipping.  One small all-reduce; every rank gets the same bits."""
        mine = run.losses[number] if self.mesh.coords["tp"] == 0 else 0.0  # ranks of a tp group hold the same loss
        found = np.zeros(2)

        def sum_over_ranks(squares: float) -> float:
            found[:] = self.mesh.world.all_reduce(np.array([mine, squares]))
            return float(found[1])

        grads = [flat.grads for flat in self.model.flats]
        norm = clip((p.grad for p in self._counted), grads, self.clip or None, sum_over_ranks).norm
        self._tell(StepReport(_mean(found[0], run.targets[number]), norm, lr, run.targets[number]), run)
        self._refuse_if_not_finite(run.reports[-1], "No weight was changed by this step.")

    def _report_all(self, run: _Run) -> None:
        """What each of the steps of a row did that overlap, unless its ranks agreed on each already."""
        if run.reports:
            return
        losses = run.losses if self.mesh.coords["tp"] == 0 else np.zeros_like(run.losses)
        sums, squares = self.mesh.world.all_reduce(np.stack([losses, run.squares]))
        for number, targets in run.targets.items():
            norm = math.sqrt(squares[number]) if squares[number] >= 0 else math.nan
            self._tell(StepReport(_mean(sums[number], targets), norm, float(run.rates[number]), targets), run)
        for report in run.reports:
            self._refuse_if_not_finite(report, "Steps overlap: weights were changed before this was known.")

    def _tell(self, report: StepReport, run: _Run) -> None:
        run.reports.append(report)
        self.report = report

    def _refuse_if_not_finite(self, report: StepReport, consequence: str) -> None:
        loss, norm = report.loss, report.grad_norm
        if math.isfinite(norm) and math.isfinite(loss):
            return
        bad = self.mesh.world.exchange(first_not_finite(self.model.parameters()))
        where = next((f"; the first gradient that is not: {name}" for name in bad if name), "")
        raise NumericsError(
            f"after {self.optimizer.updates} updates the loss is {loss} and the gradient norm {norm}: not"
            f" finite{where}.\n{consequence}  Way out: a lower --lr, a longer --warmup, or --clip 1."
        )

    def _counts(self, p: Any) -> bool:
        """Whether this rank counts a parameter in the norm: where it is neither cut nor local, the first rank does."""
        counted_everywhere = [axis for axis in p.spec.norm_axes() if axis != "pp" or not p.spec.tied]
        return all(index == 0 or axis in counted_everywhere for axis, index in self.mesh.coords.items())

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, batches: Iterable[Any]) -> float:
        """Mean loss over the valid targets of all ranks' batches, without tape and dropout; the same on every rank.

        Ranks of the data axis may have different numbers of batches, or none; those of one pipeline the same.
        """
        sums = np.zeros(2, np.float64)
        last = self.model.num_stages - 1
        waiting = iter(batches)
        while group := list(islice(waiting, self.mesh.pp.size)):  # as many as keep all stages at work
            made: list[dict[int, Sequence[Tensor]]] = [{} for _ in group]
            for stage in self.model.stages:
                for unit, batch in enumerate(group):
                    self._pass(stage, batch, unit, made[unit])
            for batch, outputs in zip(group, made, strict=True):
                if last in outputs:
                    sums += (float(to_host(outputs[last][0].data)), batch.count)
        self.links.finish()
        if self.mesh.coords["tp"]:
            sums[:] = 0.0
        total, targets = self.mesh.world.all_reduce(sums)
        return float(total / targets) if targets else 0.0

    def _pass(self, stage: int, batch: Any, unit: int, made: dict[int, Sequence[Tensor]]) -> None:
        """One stage of one batch forward, without a tape."""
        pass_through(
            self.links,
            [stage],
            self.model.num_stages - 1,
            unit,
            lambda stage, *inputs: self.model.run_stage(stage, batch, *inputs),
            lambda stage: self.model.boundary(stage, batch),
            made,
        )


Key = tuple[int | None, int, int]
"""(micro-batch, slice, stage)."""


def _key(action: Action) -> Key:
    return action.micro, action.part or 0, action.stage


def _beside(key: Key, stage: int) -> Key:
    """The same micro-batch on another stage."""
    return key[0], key[1], stage


def _numbers(stages: Sequence[int]) -> str:
    return " ".join(map(str, stages)) or "none"


def _mean(total: float, targets: int) -> float:
    return float(total) / targets if targets else 0.0


class _Plan:
    """A row, and what can be known of it before it runs.

    Attributes:
        row: the actions.
        checked: what the checker found.
        per_batch: micro-batches of a batch.
        parts: slices of a micro-batch.
        last_walks: places of the last walk back through each stage for each batch: what is final there is final.
        next_receive: place of a RECV -> the RECV after it.
    """

    def __init__(self, row: Row, checked: Checked, batches: int) -> None:
        self.row = row
        self.checked = checked
        self.parts = 1 + max((action.part or 0 for action in row), default=0)
        micros = {action.micro for action in row if action.kind == "LOAD"}
        self.per_batch = len(micros) // batches
        if self.per_batch * batches != len(micros):
            raise ScheduleError(f"{len(micros)} micro-batches of the schedule are not those of {batches} batches")
        self._split = {_key(action) for action in row if action.kind == "W"}
        walks = [
            (place, action)
            for place, action in enumerate(row)
            if action.kind == "W" or (action.kind == "B" and _key(action) not in self._split)
        ]
        self.last_walks = set({(self.batch_of(action), action.stage): place for place, action in walks}.values())
        receives = [place for place, action in enumerate(row) if action.kind in ("RECV_F", "RECV_B")]
        self.next_receive = {here: row[after] for here, after in zip(receives, receives[1:], strict=False)}

    def batch_of(self, action: Action) -> int:
        """The batch of a micro-batch."""
        assert action.micro is not None
        return action.micro // self.per_batch

    def unit(self, action: Action) -> int:
        """The number of a micro-batch, or of its slice, among all."""
        assert action.micro is not None
        return action.micro * self.parts + (action.part or 0)

    def is_split(self, action: Action) -> bool:
        """Whether the weights' half of this backward is an action of its own."""
        return _key(action) in self._split


class _Flight:
    """A micro-batch between its forward and the end of its backward, on one stage."""

    def __init__(self, tape: Tape, inputs: Sequence[Tensor], outputs: Sequence[Tensor], carry: Carry | None) -> None:
        self.tape = tape
        self.inputs = tuple(inputs)
        self.outputs: tuple[Tensor, ...] = tuple(outputs)
        self.carry = carry
        self._slots: tuple[Slot | int | None, ...] = ()

    def forget_arrays(self) -> None:
        """Outputs were passed on: their places on the tape are all that backward needs."""
        self._slots = self._places()
        self.outputs = ()

    def _places(self) -> tuple[Slot | int | None, ...]:
        """For each output its place on the tape, or which input it is where the stage did nothing to it.

        None for what depends on neither weights nor inputs, numbers of the batch itself: nobody wants its gradient.
        """
        places: list[Slot | int | None] = []
        for t in self.outputs:
            same = next((i for i, x in enumerate(self.inputs) if x is t), None)
            place = self.tape.slot(t) if same is None else same
            assert place is not None or not t.requires_grad, "an output that comes from nowhere"
            places.append(place)
        return tuple(places)

    def seeds(self, gradients: Sequence[Array]) -> tuple[list[Seed], list[tuple[int, Array]]]:
        """Where the gradients of the outputs go: onto the tape, or past it to an input."""
        places = self._slots or self._places()
        seeds: list[Seed] = []
        untouched: list[tuple[int, Array]] = []
        for place, gradient in zip(places, gradients, strict=True):
            if isinstance(place, int):
                untouched.append((place, gradient))
            elif place is not None:
                seeds.append((place, gradient))
        return seeds, untouched

    def input_gradients(self, untouched: Sequence[tuple[int, Array]]) -> list[Array]:
        """What goes back to the stage before; zeros for what this one did not use."""
        gradients = []
        for number, t in enumerate(self.inputs):
            parts = [g for place, g in untouched if place == number]
            if t in self.tape.grads:
                parts.append(self.tape.grads[t])
            gradients.append(sum(parts[1:], start=parts[0]) if parts else array_module(t.data).zeros_like(t.data))
        return gradients

    def done(self) -> None:
        """The first half of backward is over: inputs and outputs are not needed any more."""
        self.inputs = self.outputs = ()
        self.tape.grads.clear()


class _Run:
    """What is alive while a row runs.

    Attributes:
        micros: batch -> its micro-batches; parts: (micro-batch, slice) -> its tokens.
        targets: batch -> targets over all ranks; losses: sums of this rank; squares, rates: of steps that overlap.
        arrived: what came for an F; inputs: the same as leaves; gradients: what came for a B, or is to be sent from the
            stage after; flying: between F and the end of backward; carries: between the slices of a micro-batch.
        posted: receives that were posted ahead.
    """

    def __init__(self, batches: Sequence[Any], plan: _Plan) -> None:
        self.batches = batches
        self.plan = plan
        self.micros: dict[int, list[Any]] = {}
        self.parts: dict[tuple[int | None, int], Any] = {}
        self.targets: dict[int, int] = {}
        self.losses, self.squares, self.rates = (np.zeros(len(batches)) for _ in range(3))
        self.reports: list[StepReport] = []
        self.arrived: dict[Key, list[Array]] = {}
        self.inputs: dict[Key, tuple[Tensor, ...]] = {}
        self.gradients: dict[Key, list[Array]] = {}
        self.flying: dict[Key, _Flight] = {}
        self.carries: dict[tuple[int | None, int], Carry] = {}
        self.posted: dict[Action, list[Request]] = {}

    def part(self, action: Action) -> Any:
        """The micro-batch of an action, or its slice; None where it has none, or it is not loaded yet."""
        return (
            self.parts.get((action.micro, action.part or 0)) if action.kind not in ("COUNT", "REDUCE", "STEP") else None
        )

    def made(self, action: Action) -> dict[str, Any]:
        """What an F made, for listeners: `output` is the loss, None before the last stage; `outputs` what goes on."""
        flight = self.flying.get(_key(action)) if action.kind == "F" else None
        if flight is None:
            return {"output": None, "outputs": ()}
        is_loss = action.stage == len(self.plan.checked.placement) - 1
        return {"output": flight.outputs[0] if is_loss else None, "outputs": flight.outputs}

    @property
    def nbytes(self) -> int:
        """Bytes of tapes, and of what has arrived and was not used yet."""
        held = [arrays for held in (self.arrived, self.gradients) for arrays in held.values()]
        leaves = [[t.data for t in inputs] for inputs in self.inputs.values()]
        return sum(flight.tape.nbytes for flight in self.flying.values()) + sum(
            array.nbytes for arrays in (*held, *leaves) for array in arrays
        )
