"""What is known of a row before it runs, and what is alive while it does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mpitrain.autograd.carry import Carry
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array
from mpitrain.comm.request import Request
from mpitrain.errors import ScheduleError
from mpitrain.pipeline.action import PER_STEP, Action, Row
from mpitrain.pipeline.check import Checked
from mpitrain.pipeline.flight import Flight, Key, key_of
from mpitrain.pipeline.update import Measured, StepReport


class RowPlan:
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
        steps = sum(action.kind == "STEP" for action in row)
        if steps != batches:
            raise ScheduleError(
                f"the rows go over {steps} batch{'es' * (steps != 1)}, but are to run {batches}.\n"
                "Rows of several batches are given as a function of their number, with a rule for the weights:"
                ' Executor(..., lambda n: complete("pipedream", ranks=..., microbatches=1, batches=n),'
                ' versions="newest")'
            )
        self.per_batch = len(micros) // batches
        if self.per_batch * batches != len(micros):
            raise ScheduleError(f"{len(micros)} micro-batches of the schedule are not those of {batches} batches")
        self._split = {key_of(action) for action in row if action.kind == "W"}
        walks = [
            (place, action)
            for place, action in enumerate(row)
            if action.kind == "W" or (action.kind == "B" and key_of(action) not in self._split)
        ]
        self.last_walks = set({(self.batch_of(action), action.stage): place for place, action in walks}.values())
        receives = [place for place, action in enumerate(row) if action.kind in ("RECV_F", "RECV_B")]
        self.next_receive = {here: row[after] for here, after in pairwise(receives)}

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
        return key_of(action) in self._split


class Running:
    """What is alive while a row runs.

    Attributes:
        numbers: of the step of each batch, counted from 1 over all starts of the run, where batches know it.
        micros: batch -> its micro-batches; parts: (micro-batch, slice) -> its tokens.
        targets, rows: batch -> targets and sequences that are no padding, over all ranks, or those of a worker if it
            learns by its own; of_all: batch -> both, over all workers then; losses: batch -> sums of the micro-batches
            of this rank, each an array () that nobody has waited for; counts: batch -> what forward passes counted
            here, by name.
        arrived: what came for an F; inputs: the same as leaves; gradients: what came for a B, or is to be sent from the
            stage after; flying: between F and the end of backward; carries: between the slices of a micro-batch.
        posted: receives that were posted ahead.
        at_end: whether it is at its last action, before which every message has been received.
    """

    def __init__(self, batches: Sequence[Any], plan: RowPlan, done: int) -> None:
        """`done`: steps that were made before, which number the batches that have no number of their own."""
        self.batches = batches
        self.plan = plan
        self.numbers = [
            (known if isinstance(known := getattr(batch, "step", None), int) else done + place) + 1
            for place, batch in enumerate(batches)
        ]
        self.micros: dict[int, list[Any]] = {}
        self.parts: dict[tuple[int | None, int], Any] = {}
        self.targets: dict[int, int] = {}
        self.rows: dict[int, int] = {}
        self.of_all: dict[int, tuple[int, int]] = {}
        self.losses: list[list[Array]] = [[] for _ in batches]
        self.counts: list[dict[str, np.ndarray]] = [{} for _ in batches]
        self.reports: list[StepReport] = []
        self.arrived: dict[Key, list[Array]] = {}
        self.inputs: dict[Key, tuple[Tensor, ...]] = {}
        self.gradients: dict[Key, list[Array]] = {}
        self.flying: dict[Key, Flight] = {}
        self.carries: dict[tuple[int | None, int], Carry] = {}
        self.posted: dict[Action, list[Request]] = {}
        self.at_end = False

    def number(self, action: Action) -> int:
        """The number of the step that an action belongs to."""
        once = action.kind in PER_STEP
        return self.numbers[(action.micro or 0) if once else self.plan.batch_of(action)]

    def part(self, action: Action) -> Any:
        """The micro-batch of an action, or its slice; None where it has none, or it is not loaded yet."""
        return self.parts.get((action.micro, action.part or 0)) if action.kind not in PER_STEP else None

    def measured(self, number: int) -> Measured:
        """What a batch of the row has measured so far."""
        targets, rows = self.of_all.get(number, (self.targets[number], self.rows[number]))
        return Measured(self.losses[number], targets, rows, self.counts[number])

    def made(self, action: Action) -> dict[str, Any]:
        """What an action made, for listeners.

        An F: `output` is the loss, None before the last stage; `outputs` what goes on; `auxiliary` its losses besides.
        A STEP: `reports` of the steps of its row that are known by now, which where steps overlap may be none until the
        last.
        """
        if action.kind == "STEP":
            return {"reports": tuple(self.reports)}
        flight = self.flying.get(key_of(action)) if action.kind == "F" else None
        if flight is None:
            return {"output": None, "outputs": (), "auxiliary": ()}
        is_loss = action.stage == len(self.plan.checked.placement) - 1
        return {"output": flight.outputs[0] if is_loss else None, "outputs": flight.outputs, "auxiliary": flight.losses}

    @property
    def between_stages(self) -> list[Array]:
        """What has arrived, or waits for a neighbouring stage, and was not used yet."""
        held = [arrays for of_stage in (self.arrived, self.gradients) for arrays in of_stage.values()]
        return [array for arrays in held for array in arrays]

    @property
    def nbytes(self) -> int:
        """Bytes of tapes, and of what has arrived and was not used yet."""
        held = [arrays for held in (self.arrived, self.gradients) for arrays in held.values()]
        leaves = [[t.data for t in inputs] for inputs in self.inputs.values()]
        return sum(flight.tape.nbytes for flight in self.flying.values()) + sum(
            array.nbytes for arrays in (*held, *leaves) for array in arrays
        )
