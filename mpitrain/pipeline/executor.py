"""The executor: runs one rank's list of actions, step after step.

It is the only train loop there is.  Gradient accumulation is the row of one stage with several micro-batches, a
pipeline is other rows, and every other way to train is one more list.

    LOAD COUNT           batches become micro-batches, their targets are counted
    RECV_F F SEND_F      a stage's forward, on a tape of its own
    RECV_B B W SEND_B    the tape back; B and W are its two halves where a schedule parts them
    REDUCE STEP          gradients are summed over ranks, weights are updated

Messages are posted and waited for here and nowhere else; what they carry is the model's business (`forward_stage`,
`boundary`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from time import perf_counter_ns
from typing import Any

import numpy as np

from mpitrain.autograd.auxiliary import collect, seeds_of
from mpitrain.autograd.carry import Carry
from mpitrain.autograd.node import SavePolicy
from mpitrain.autograd.recompute import CHECKS_PURITY, RECOMPUTING
from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, collection_paused, keep_freed_memory, to_host
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.request import Request
from mpitrain.data.tokens import Batch
from mpitrain.errors import ScheduleError
from mpitrain.events import STEP_LISTENERS, WITNESSES, Event, Listener, alone, tell
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.nn.stage_output import check_said, check_takes_slices, checked_boundary
from mpitrain.optim.optimizer import Optimizer
from mpitrain.optim.scaler import Scaler
from mpitrain.parallel.data import Reducer, sum_over_ends
from mpitrain.parallel.replicas import agree_on_arithmetic, check_batch, other_number
from mpitrain.parallel.stages import Links, pass_through
from mpitrain.parallel.zero import gather_units
from mpitrain.pipeline.action import Action, Row, Schedule, row_text
from mpitrain.pipeline.alike import check_updates, compare_what_is_given, reducer_of, scaler_of
from mpitrain.pipeline.autopsy import autopsy
from mpitrain.pipeline.check import check
from mpitrain.pipeline.ends import compare_stages
from mpitrain.pipeline.flight import Flight, beside, key_of
from mpitrain.pipeline.passes import without_backward
from mpitrain.pipeline.running import RowPlan, Running
from mpitrain.pipeline.stand_in import STAND_IN
from mpitrain.pipeline.update import NotFinite, StepReport, Update
from mpitrain.spec import DATA_AXES

CHECKED_STEPS = 2
"""The first steps, in which ranks compare every call before data moves: what fits twice fits ever after."""

KEPT_ROWS = 8
"""Checked rows of different lengths that an asynchronous pipeline keeps."""


class Executor:
    """Runs steps.

    Args:
        model: `model(batch) -> Tensor`, the sum over the batch's valid targets of the loss; or one that is cut into
            stages (`mpitrain.nn.Module`).
        optimizer: over the model's parameters.
        mesh: the layout.
        rows: the schedule, one row a pipeline rank; checked here, before the first step.  Where steps overlap
            (`versions`): a function that gives the schedule of so many batches.
        reducer: how gradients are summed; unless given one flat all-reduce, or of a model of ZeRO its own.
        clip: largest global gradient norm; 0 leaves gradients alone.
        lr: learning rate by number of updates done; the optimizer's own constant unless given.
        versions: None: every micro-batch of a step sees the same weights.  "newest" or "previous": steps overlap, and
            forward takes the newest version of its stage's weights, or the one before that of its batch
            (mpitrain.optim.versions).
        slices: lengths into which the sequences of a micro-batch are cut; None: they stay whole.
        scaler: of the gradients; None: for a float16 model a `LossScaler`, for any other none.
        policy: how what ops save waits for backward (mpitrain.memory.policy), also in second forwards; None: as it is.
        ask: numbers of this rank at the end of a step, always as many; reports tell their sums over all ranks.

    Attributes:
        scaler: the one in force.
        checked: what the checker found out about the rows.
        versions: of the weights; None where steps do not overlap.

    Raises:
        ConfigError: the sequences are cut, but the model's `forward_stage` takes no `carry`; the optimizer updates
            something else than the model's shares, or the reducer is not one of its stage of ZeRO; weights were frozen
            too late, all of them, or others on other ranks, or stages share one that cannot.
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
        scaler: Scaler | None = None,
        policy: SavePolicy | None = None,
        ask: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.mesh = mesh
        self.slices = None if slices is None else tuple(slices)
        if slices is not None:
            check_takes_slices(model)
        self.policy = policy
        self._rows_of: Callable[[int], Schedule] = rows if callable(rows) else lambda _: rows
        self._plans: dict[int, RowPlan] = {}
        self.scaler = scaler_of(model, scaler)
        check_updates(model, optimizer, versions)
        compare_stages(model, mesh)
        model.in_use = True
        self.checked = self._plan(1).checked
        some = (1,) if versions is None else (1, 3)  # where steps overlap, the rows of a few batches tell
        text = "\n".join(row_text(row) for batches in some for row in self._rows_of(batches))
        said = [text, versions, self.slices]
        parts = self._plan(1).per_batch * self._plan(1).parts
        compare_what_is_given(mesh, model, optimizer, self.scaler, said, reducer, parts)
        agree_on_arithmetic(mesh.world)
        mesh.world.hold_checks()  # until the first steps are over: of what comes before them, too
        keep_freed_memory()  # page faults cost up to three quarters of an array operation
        gather_units(model, mesh)
        self.reducer = reducer_of(model, mesh, reducer)
        self.reducer.scaler = self.scaler
        self._update = Update(model, optimizer, mesh, clip, lr, versions, self.scaler, self.reducer, ask)
        self.versions = self._update.versions
        self.empty_steps = 0  # steps in which no rank had a valid target
        self.links = Links(mesh.pp, self.checked.placement)
        self._steps = 0
        self._broken = False
        self._axis = mesh.merged(DATA_AXES)
        self._shared = _in_several(model)
        self._running: Running | None = None

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
            ScheduleError: an error has ended the step before in the middle of a pipeline.
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
        if self._broken:
            raise ScheduleError(
                "an error ended the step before in the middle, with messages between stages under way: this one would"
                " take them for its own.\nGo on from a checkpoint, in a new start."
            )
        stand_in = STAND_IN.get()
        answered = None if stand_in is None else stand_in.run(self, batches)
        if answered is not None:
            self._update.report = answered[-1]
            self._done(answered)
            return answered
        self.model.start_step()
        self.reducer.begin()
        if self._steps < CHECKED_STEPS:
            for batch in batches[: CHECKED_STEPS - self._steps]:
                if isinstance(batch, Batch):
                    check_batch(batch, self.mesh)
        run = self._running = Running(batches, self._plan(len(batches)), self._steps)
        self.mesh.world.board.step = run.numbers[0]
        purity = CHECKS_PURITY.set(self.mesh.world.mode.checked)  # in the first steps, and where all is checked
        # What overflows is found by the norm, on all ranks at once; NumPy would warn of one op on one rank.
        with (
            np.errstate(over="ignore", invalid="ignore", divide="ignore"),
            collection_paused(),
        ):
            try:
                self._run_all(run)
            except NotFinite as error:
                raise error.told(autopsy(self, batches)) from None
            finally:
                CHECKS_PURITY.reset(purity)
                self._running = None
                self._broken = self.mesh.pp.size > 1 and not run.at_end
                if self._broken:
                    self.mesh.world.mode.requests.clear()  # nobody waits for them any more
                self._update.settle()  # after an error, too: who looks at a weight sees the newest
        self._done(run.reports)
        return run.reports

    def _done(self, reports: Sequence[StepReport]) -> None:
        """So many more steps are over."""
        before, self._steps = self._steps, self._steps + len(reports)
        if before < CHECKED_STEPS <= self._steps:
            self.mesh.world.release_checks()

    def run_again(self, batches: Sequence[Any], listener: Listener) -> None:
        """Run the row of a step that was refused once more, up to its update, with one listener alone.

        Collective over the world.  Nothing that counts steps, or passes through the model, takes notice.
        """
        empty_steps = self.empty_steps
        self.model.start_step()
        self.reducer.begin()
        run = self._running = Running(batches, self._plan(len(batches)), self._steps)
        second = RECOMPUTING.set(True)
        try:
            with alone(listener):
                for place, action in enumerate(run.plan.row):
                    if action.kind == "STEP":
                        break
                    self._act(action, run, place)
                self.links.finish()
        finally:
            RECOMPUTING.reset(second)
            self.empty_steps = empty_steps

    @property
    def steps(self) -> int:
        """Steps made so far, by this executor."""
        return self._steps

    @property
    def report(self) -> StepReport | None:
        """What the last step did."""
        return self._update.report

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

    @property
    def arrived(self) -> list[Array]:
        """What neighbouring stages made, also those of this rank, and nobody has used yet."""
        return [] if self._running is None else self._running.between_stages

    def _plan(self, batches: int) -> RowPlan:
        """The checked rows for so many batches."""
        plan = self._plans.get(batches)
        if plan is None:
            rows = without_backward(self._rows_of(batches), self.model.trains_from)
            if len(rows) != self.mesh.pp.size:
                raise ScheduleError(f"the schedule has {len(rows)} rows for {self.mesh.pp.size} pipeline ranks")
            checked = check(rows, self.model.trains_from)
            here = tuple(q for q, rank in enumerate(checked.placement) if rank == self.mesh.pp.rank)
            if (len(checked.placement), here) != (self.model.num_stages, tuple(self.model.stages)):
                raise ScheduleError(
                    f"the schedule has {len(checked.placement)} stages, of which row {self.mesh.pp.rank} runs"
                    f" {_numbers(here)}; the model has {self.model.num_stages}, and {_numbers(self.model.stages)} are"
                    " on this rank"
                )
            plan = RowPlan(rows[self.mesh.pp.rank], checked, batches)
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

    def _run_all(self, run: Running) -> None:
        witnesses = WITNESSES.get()
        for witness in witnesses:
            witness.row_begins(self)
        for place, action in enumerate(run.plan.row):
            began = perf_counter_ns() if witnesses else 0
            self._act(action, run, place)
            for witness in witnesses:
                witness.action(action, run.number(action), began)
        for witness in witnesses:
            witness.row_ended(run.reports)

    def _act(self, action: Action, run: Running, place: int) -> None:
        listeners = STEP_LISTENERS.get()
        if not listeners:
            self._run(action, run, place)
            return
        info = {"action": action, "executor": self, "batch": run.part(action), "step": run.number(action)}
        if action.kind == "F":
            info["inputs"] = self._inputs(action, run)
            info["boundary"] = self.model.boundary(action.stage, run.part(action))
        tell(listeners, Event("action", "begin", str(action), info))
        self._run(action, run, place)
        tell(listeners, Event("action", "end", str(action), {**info, **run.made(action)}))

    def _run(self, action: Action, run: Running, place: int) -> None:
        run.at_end = place == len(run.plan.row) - 1
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
                self._announce(run.flying.pop(key_of(action)).tape.backward_weights(), run, place)
                self._leave(action, run)
            case "EVICT":
                run.flying[key_of(action)].tape.policy.evict()  # type: ignore[union-attr]
            case "FETCH":
                run.flying[key_of(action)].tape.policy.fetch()  # type: ignore[union-attr]
            case "SEND_B":
                gradients = run.gradients.pop(beside(key_of(action), action.stage - 1))
                self.links.send("B", action.stage, run.plan.unit(action), gradients)
            case "REDUCE":
                self.reducer.finish()
                sum_over_ends(self.model.shares(), self.mesh, self.reducer.over_ends)
            case "STEP":
                number = action.micro or 0
                report = self._update.make(number, run.measured(number))
                if report is None or not report.skipped:
                    self.reducer.updated()
                run.reports += [report] if report is not None else []
        if run.at_end:  # with the last action, so that who listens sees these messages in a step
            self.links.finish()
            run.reports += self._update.close([run.measured(number) for number in range(len(run.batches))])

    def _load(self, action: Action, run: Running) -> None:
        assert action.micro is not None
        per = run.plan.per_batch
        number, place = divmod(action.micro, per)
        if place == 0:
            run.micros[number] = run.batches[number].split(per)
        micro = run.micros[number][place]
        parts = [micro] if self.slices is None else micro.slices(self.slices)
        run.parts.update(((action.micro, part), piece) for part, piece in enumerate(parts))

    def _count(self, number: int, run: Running) -> None:
        mine = [sum(micro.count for micro in run.micros[number])]
        if self.model.adds_losses:  # means over rows
            mine.append(sum(micro.rows for micro in run.micros[number]))
        worker, workers = (self.mesh.edp.rank, self.mesh.edp.size) if self.reducer.local else (0, 1)
        counts = np.zeros((workers, len(mine)), np.int64)
        counts[worker] = mine
        counts = self._axis.all_reduce(counts)
        cp = self.mesh.cp.size  # whose ranks hold parts of the same rows
        (targets, rows), of_all = [(int(c[0]), int(c[1:].sum()) // cp) for c in (counts[worker], counts.sum(axis=0))]
        run.targets[number], run.rows[number], run.of_all[number] = targets, rows, of_all
        self.reducer.counted(targets, of_all[0])
        self.empty_steps += of_all[0] == 0

    # -- messages -----------------------------------------------------------------------------------------------------

    def _expect(self, action: Action, run: Running) -> list[Request]:
        """Post the receives of a RECV."""
        kind = action.kind[-1]
        into = action.stage if kind == "F" else action.stage + 1
        what = checked_boundary(self.model, into, run.part(action))
        return self.links.expect(kind, action.stage, run.plan.unit(action), what, self.model.like)

    def _receive(self, action: Action, run: Running, place: int) -> None:
        requests = run.posted.pop(action, None) or self._expect(action, run)
        follower = run.plan.next_receive.get(place)
        if follower is not None and run.part(follower) is not None:
            run.posted[follower] = self._expect(follower, run)
        arrays = [request.wait() for request in requests]
        into = run.arrived if action.kind == "RECV_F" else run.gradients
        into[key_of(action)] = arrays
        self.links.reap()

    def _send_forward(self, action: Action, run: Running) -> None:
        key = key_of(action)
        flight = run.flying[key] if self._trains(action.stage) else run.flying.pop(key)
        self.links.send("F", action.stage, run.plan.unit(action), [t.data for t in flight.outputs])
        flight.forget_arrays()

    # -- forward and backward -----------------------------------------------------------------------------------------

    def _inputs(self, action: Action, run: Running) -> tuple[Tensor, ...]:
        """The inputs of an F as leaves, made once."""
        key = key_of(action)
        if key not in run.inputs:
            wanted = action.stage > self.model.trains_from
            run.inputs[key] = tuple([Tensor(array, requires_grad=wanted) for array in run.arrived.pop(key, ())])
        return run.inputs[key]

    def _forward(self, action: Action, run: Running) -> None:
        key, stage = key_of(action), action.stage
        inputs = self._inputs(action, run)
        del run.inputs[key]
        carry = self._carry(action, run)
        if self.versions is not None:
            self.versions.enter(key, run.plan.batch_of(action))
        with collect() as said, Tape(self._policy_of_tape()) as tape:
            outputs = self.model.run_stage(stage, run.part(action), *inputs, carry=carry)
        check_said(self.model, said)
        flight = run.flying[key] = Flight(tape, inputs, outputs, carry, said.losses)
        if self.policy is not None:
            flight.forget_inputs()
        said.add_to(run.counts[run.plan.batch_of(action)])
        if stage == self.model.num_stages - 1:
            run.losses[run.plan.batch_of(action)].append(outputs[0].data)
        elif self.links.is_here(stage + 1):
            run.arrived[beside(key, stage + 1)] = [t.data for t in outputs]
            flight.forget_arrays()
            if not self._trains(stage):
                del run.flying[key]
        if not self._trains(stage):
            self._leave(action, run)
            if carry is not None and (action.part or 0) == run.plan.parts - 1:
                del run.carries[action.micro, stage]

    def _trains(self, stage: int) -> bool:
        """Whether backward goes to a stage."""
        return stage >= self.model.trains_from

    def _policy_of_tape(self) -> SavePolicy | None:
        """The policy for the tape of one pass: one that keeps books has another one for each."""
        return self.policy.begin() if self.policy is not None else None

    def _carry(self, action: Action, run: Running) -> Carry | None:
        """What the slices of a micro-batch hand on to each other on this stage; None for whole sequences."""
        if self.slices is None:
            return None
        carry = run.carries.setdefault((action.micro, action.stage), Carry())
        carry.begin(action.part or 0)
        return carry

    def _backward(self, action: Action, run: Running, place: int) -> None:
        key, stage = key_of(action), action.stage
        flight = run.flying[key]
        tape, part = flight.tape, action.part or 0
        if stage == self.model.num_stages - 1:
            (loss,) = flight.outputs
            targets = run.targets[run.plan.batch_of(action)]
            # The one place where the mean is taken: d(mean loss)/d(sum of losses) = 1 / targets of the whole step.
            seed = 1.0 if self.scaler is None else self.scaler.seed
            gradients = [array_module(loss.data).full_like(loss.data, seed / targets if targets else 0.0)]
        else:
            gradients = run.gradients.pop(key)
        seeds, untouched = flight.seeds(gradients)
        if flight.losses:
            rows = run.rows[run.plan.batch_of(action)]
            seeds += seeds_of(flight.losses, (1.0 if self.scaler is None else self.scaler.seed) / max(rows, 1))
        if flight.carry is not None:
            seeds += flight.carry.seeds(part)
        if run.plan.is_split(action):
            tape.backward_inputs(seeds)
        else:
            self._announce(tape.backward(seeds), run, place)
        if flight.carry is not None:
            flight.carry.pass_back(part, tape)
        if stage > self.model.trains_from:
            run.gradients[beside(key, stage - 1)] = flight.input_gradients(untouched)
        flight.done()
        if not run.plan.is_split(action):
            del run.flying[key]
            self._leave(action, run)

    def _announce(self, finals: Iterable[tuple[Any, ...]], run: Running, place: int) -> None:
        """Walk, and tell the reducer which gradients are final."""
        last = place in run.plan.last_walks
        for final in finals:
            if last or self.reducer.every_walk:
                for p in final:
                    # A weight that several stages here use is final after the last of them; it leaves at REDUCE.
                    if p not in self._shared:
                        self.reducer.add(p)
        if self.reducer.every_walk:
            self.reducer.walked(run.plan.row[place].stage)

    def _leave(self, action: Action, run: Running) -> None:
        """Nothing of a micro-batch needs its version of the weights any more."""
        if self.versions is not None:
            self.versions.leave(key_of(action))

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, batches: Iterable[Any]) -> float:
        """Mean loss over the valid targets of all ranks' batches, without tape and dropout; the same on every rank.

        Ranks of the data axis may have different numbers of batches, or none; those of one pipeline the same, and so
        those that work together on every batch, of ep and with zero 3 of all data axes: whoever has none left gives one
        of padding.

        Raises:
            DataError: ranks that work together were given different numbers of batches; on every rank.
        """
        stand_in = STAND_IN.get()
        answered = None if stand_in is None else stand_in.evaluate(self, batches)
        if answered is not None:
            return answered
        with self.reducer.whole():
            return self._evaluate(batches)

    def _evaluate(self, batches: Iterable[Any]) -> float:
        sums = np.zeros(2, np.float64)
        last = self.model.num_stages - 1
        waiting, given = iter(batches), 0
        whole = self.model.zero < 3
        others, why = (
            (self.mesh.ep, "hold experts for each other") if whole else (self._axis, "hold rows of all weights")
        )
        while True:
            group = list(islice(waiting, self.mesh.pp.size))  # as many as keep all stages at work
            given += len(group)
            mistake = other_number(given, others, why)
            if not group or mistake is not None:
                break
            made: list[dict[int, Sequence[Tensor]]] = [{} for _ in group]
            for stage in self.model.stages:
                for unit, batch in enumerate(group):
                    self._pass(stage, batch, unit, made[unit])
            for batch, outputs in zip(group, made, strict=True):
                if last in outputs:
                    sums += (float(to_host(outputs[last][0].data)), batch.count)
        self.links.finish()
        if others.size > 1:  # the ranks of another group may have gone through all of theirs
            self.mesh.world.agree(mistake)
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
            lambda stage: checked_boundary(self.model, stage, batch),
            made,
            self.model.like,
        )


def _in_several(model: Module) -> set[Parameter]:
    """The parameters that more than one stage of this rank uses, or of which it must be taken that they do."""
    if len(model.stages) == 1:
        return set()
    users = Counter(p for stage in model.stages for p in {p for part in model.parts(stage) for p in part.parameters()})
    return {p for p, stages in users.items() if stages > 1 or p.spec.tied}


def _numbers(stages: Sequence[int]) -> str:
    return " ".join(map(str, stages)) or "none"
