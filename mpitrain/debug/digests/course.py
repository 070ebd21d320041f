"""One executor's run, as digests are taken of it: its passes op by op, and what its steps end with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpitrain.autograd.function import Function
from mpitrain.autograd.recompute import Recompute, recomputing
from mpitrain.autograd.tape import Tape
from mpitrain.comm.world import World
from mpitrain.debug.digests import held, sums
from mpitrain.debug.digests.batches import FIRST, LAST, hashes
from mpitrain.debug.digests.entries import Entry, Noted, Record, as_json, told
from mpitrain.debug.digests.following import REPLICAS, SUMMANDS, Following
from mpitrain.debug.digests.passes import Pass, Which
from mpitrain.debug.digests.rows import Rows, uneven
from mpitrain.debug.digests.sums import Sums
from mpitrain.debug.states.known import Known
from mpitrain.debug.states.table import VIEWS
from mpitrain.errors import StateError
from mpitrain.events import Event
from mpitrain.nn.parameter import Parameter
from mpitrain.pipeline.action import Action
from mpitrain.pipeline.executor import Executor

FORWARD, BACKWARD = "F", "B"


class Course:
    """One executor's run."""

    def __init__(self, executor: Executor, number: int) -> None:
        mesh, model = executor.mesh, executor.model
        self.number = number
        self._executor = executor
        self._mesh = mesh
        self._following = Following(model.parameters(), mesh, executor.reducer.apart)
        self._pass = Pass()
        self._uneven = uneven(model.parameters(), mesh.sizes)
        self._rows: Rows | None = None
        self._shares = model.shares()
        self._steps: dict[int, Noted] = {}
        self._now: Noted | None = None
        self._at: tuple[int, int, int] = 0, 0, 0  # micro-batch, slice, stage
        self._untold: list[tuple[int, int]] = []  # place in its row and number of steps whose report is not known yet

    # -- what a run is ------------------------------------------------------------------------------------------------

    def begin(self, world: World, facts: Mapping[str, Any]) -> Record:
        """Who this rank is."""
        executor, mesh = self._executor, self._mesh
        return {
            "is": "begin",
            "executor": self.number,
            "rank": world.rank,
            "sizes": dict(mesh.sizes),
            "coords": dict(mesh.coords),
            "dtype": np.dtype(executor.model.like.dtype).name,
            "stages": executor.model.num_stages,
            "apart": list(executor.reducer.apart),
            "another_run": executor.reducer.another_run,
            "late": executor.versions is not None,
            "saved_digits": _saved_digits(executor.policy),
            **held.places(self._shares, executor.optimizer),
            **facts,
        }

    def before(self, done: int) -> Record:
        """The weights before the first step."""
        return {"is": "weights", "executor": self.number, "step": done, "weights": held.weights(self._shares)}

    # -- passes -------------------------------------------------------------------------------------------------------

    def action(self, event: Event) -> None:
        """F, B or W of a step that has digests."""
        phase, info = event.phase, event.info
        action: Action = info["action"]
        stage, batch = action.stage or 0, info["batch"]
        self._now = self._steps.setdefault(info["step"], Noted())
        self._at = action.micro or 0, action.part or 0, stage
        if phase == "begin":
            self._rows = Rows(batch, self._mesh, self._uneven)
            if action.kind == "F":
                self._pass.begin(stage)
                self._data(batch, stage)
                self._boundary(f"into {stage}", info["inputs"])
        elif action.kind == "F" and stage < self._executor.model.num_stages - 1:
            self._boundary(f"into {stage + 1}", info["outputs"], "from")
        self._follow(event)

    def _data(self, batch: Any, stage: int) -> None:
        """Inputs are used by the first stage, targets by the last, whatever else there is by all."""
        first, last = stage == 0, stage == self._executor.model.num_stages - 1
        assert self._now is not None
        for name, number in hashes(batch).items():
            if first if name == FIRST else last if name == LAST else first:
                self._now.data[name] = (self._now.data.get(name, 0) + number) % (1 << 64)

    def _boundary(self, name: str, values: Any, side: str = "to") -> None:
        """What passes between two stages: the same bytes on both sides, in whichever order micro-batches come."""
        if not values:
            return
        assert self._now is not None
        total = 0
        for value in values:
            total = sums.crc(value.data, total)
        micro, part, _ = self._at
        key = f"{side} {name}"
        mixed = (total + 1) * (2654435761 * (micro * 4096 + part + 1) | 1)
        self._now.boundaries[key] = (self._now.boundaries.get(key, 0) + mixed) % (1 << 64)

    def _follow(self, event: Event) -> None:
        """Have the rules of states follow; where they are broken, say so once."""
        following = self._following
        known_before = following.trouble
        try:
            following(event)
        except StateError as error:  # what leaves an action
            following.trouble = following.trouble or str(error)
        if following.trouble and not known_before and self._now is not None:
            self._now.trouble = [self._at[2], event.phase, event.name, following.trouble]

    # -- ops ----------------------------------------------------------------------------------------------------------

    def op(self, event: Event) -> None:
        """Of a pass of a step that has digests."""
        phase, info = event.phase, event.info
        self._follow(event)
        if self._following.trouble:  # from here on nobody knows how values lie
            return
        function: type[Function] = info["function"]
        if function is Recompute:
            self._part(phase, info)
        elif phase == "end":
            if "node" in info:
                self._went_back(info)
            else:
                self._made(function, info)

    def _part(self, phase: str, info: Mapping[str, Any]) -> None:
        """A part that is made again in backward."""
        if "node" not in info:
            if phase == "begin":
                self._pass.part_begins()
            else:
                self._pass.part_ends(info["outputs"])
        elif phase == "begin":
            self._pass.part_begins_again(info["node"], self._at[2])
        else:
            self._pass.part_ended_again()

    def _made(self, function: type[Function], info: Mapping[str, Any]) -> None:
        """An op of a forward pass has ended."""
        again, outputs = recomputing(), info["outputs"]
        known = self._following.known(outputs[0]) if outputs else None
        site = known.made.site if known is not None and known.made is not None else ""
        which = self._pass.made(function, info["path"], outputs, site, again)
        if again or function in VIEWS or known is None or (outputs[0].weight_side and outputs[0].requires_grad):
            return
        lies = self._following.lies(known)
        for index, y in enumerate(outputs):
            if getattr(y.data, "dtype", None) is not None and y.data.dtype.kind in "fV":
                r, c = self._factors(y.data.shape, known)
                self._add(which, FORWARD, index, lies, sums.of_array(y.data, r, c), sums.crc(y.data))

    def _went_back(self, info: Mapping[str, Any]) -> None:
        """The backward of an op has ended."""
        node, tape = info["node"], info["tape"]
        which = self._pass.walked(tape, node)
        if which is None:
            return
        for index, (slot, grad) in enumerate(zip(node.inputs, info["grads"], strict=True)):
            if grad is None or slot < 0:
                continue
            if which.title == "slice_attention":
                continue  # what belongs to one slice's keys is in the backward of all later slices
            known = self._following.known_at(tape, slot)
            lies = self._following.gradient_lies(known)
            if node.weight_side[index]:
                self._of_weight(which, index, lies, grad, tape, slot)
                continue
            if hasattr(grad, "unrounded"):
                continue  # a recipe of a value's gradient is on its way still
            r, c = self._factors(grad.shape, known)
            self._add(which, BACKWARD, index, lies, sums.of_array(grad, r, c), sums.crc(grad))

    def _of_weight(self, which: Which, index: int, lies: Mapping[str, str], grad: Any, tape: Tape, slot: int) -> None:
        """The gradient of a weight: a summand of each pass."""
        leaf = tape.leaf(slot)
        r = c = None
        inner = None
        if isinstance(leaf, Parameter):
            r, c = sums.factors_of_slab(leaf.rectangle)
            if len(leaf.rectangle) == 3:
                inner = sums.inner_factors(leaf.rectangle)
        of = sums.of_gradient(grad, r, c, inner)
        if of is not None:
            self._add(which, BACKWARD, index, lies, of, sums.crc(grad))

    def _factors(self, shape: tuple[int, ...], known: Known | None) -> tuple[Any, Any]:
        return (None, None) if self._rows is None else self._rows.factors(shape, known)

    def _add(self, which: Which, kind: str, index: int, lies: Mapping[str, str], of: Sums, crc: int) -> None:
        assert self._now is not None
        key = kind, which.stage, which.path, which.name, which.nth, index
        entry = self._now.entries.get(key)
        if entry is None:
            if lies.get(REPLICAS) == SUMMANDS:
                of = of._replace(size=None)
            self._now.entries[key] = Entry(which, kind, index, lies, of, crc)
        else:
            entry.add(of, crc)

    # -- the end of a step --------------------------------------------------------------------------------------------

    def step_begins(self, number: int) -> None:
        """Gradients are final, and not clipped yet."""
        step = self._steps.setdefault(number, Noted())
        step.more |= held.gradients(self._shares, self._executor.scaler)

    def step_ends(self, number: int) -> None:
        """Weights and the optimizer's state are new."""
        step = self._steps.setdefault(number, Noted())
        optimizer = self._executor.optimizer
        step.more["weights"] = held.weights(self._shares)
        step.more["moments"] = held.state(optimizer)
        step.more["updates"] = optimizer.updates

    def reported(self, reports: Any, place: int, step: int | None) -> list[Record]:
        """Records of the steps of which everything is known by now.

        Args:
            reports: of the steps of the row so far.
            place: of the step that has ended in its row.
            step: its number, if it has digests.
        """
        if place == 0:
            self._untold = []
        if step is not None:
            self._untold.append((place, step))
        records = []
        while self._untold and self._untold[0][0] < len(reports):
            at, number = self._untold.pop(0)
            records.append(self._record(number, reports[at]))
        return records

    def rest(self) -> list[Record]:
        """Records of steps that did not come to their end, or whose numbers nobody was told."""
        return [self._record(number, None) for number in sorted(self._steps)]

    def _record(self, number: int, report: Any) -> Record:
        step = self._steps.pop(number, Noted())
        values = []
        for entry in step.entries.values():
            if not entry.spoiled:
                w = entry.which
                key = [entry.kind, w.stage, w.path, w.name, w.nth, entry.index]
                about = [w.title, w.site, w.place, dict(entry.lies)]
                values.append([key, about, [*told(entry.of), entry.crc, entry.passes]])
        record: Record = {"is": "step", "executor": self.number, "step": number, "data": step.data, "values": values}
        record["boundaries"] = step.boundaries
        record["trouble"] = step.trouble
        record |= step.more
        if report is not None:
            numbers = {"targets": report.targets, "loss": report.loss, "norm": report.grad_norm}
            numbers |= {"learning rate": report.lr, "scale": report.scale, "skipped": int(report.skipped)}
            record["numbers"] = {name: as_json(value) for name, value in numbers.items()}
        return record


def _saved_digits(policy: Any) -> int | None:
    """Binary digits with which what is saved waits for backward; None: all of them."""
    while policy is not None:
        narrow = getattr(policy, "narrow", None)
        if narrow is not None:
            return int(narrow.mantissa)
        policy = getattr(policy, "inner", None)
    return None
