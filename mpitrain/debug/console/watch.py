"""Where a rank is and what it holds, for whoever looks at it while it stands.

    watch = Watch(world())
    with listen(watch):
        ...

A listener in the rank's own thread that notes references, never copies.  It sends nothing, waits for nothing and
changes nothing; while the rank stands still others may ask it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mpitrain.autograd.inner import Sketch
from mpitrain.autograd.tape import TAPE, Tape
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.debug.console.course import Course
from mpitrain.debug.console.gradients import Gradients
from mpitrain.debug.console.kept import Kept
from mpitrain.debug.console.slots import Slots
from mpitrain.debug.memory import MemoryLedger
from mpitrain.debug.states.onlooker import Onlooker
from mpitrain.events import Event
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.optimizer import StateTensor
from mpitrain.pipeline.action import Action


class Op(NamedTuple):
    """An op that runs, or ran last.

    name: `gelu`, `gelu.backward`; number: among the ops of its action, from 1; info: of its newest event; ended:
    whether it is over; step, action: in which it ran, 0 and "" outside.
    """

    name: str
    number: int
    info: Mapping[str, Any]
    ended: bool
    step: int
    action: str

    @property
    def is_backward(self) -> bool:
        """Whether it is a step on the way back."""
        return "node" in self.info

    @property
    def moment(self) -> tuple[Any, ...]:
        """The same on ranks that stand in the same op of the same program."""
        return self.step, self.action, self.number, self.name, self.info["path"]


class Watch:
    """What is known of one rank.  Made in the rank's own thread; events of other threads do not count.

    Args:
        world: of the rank.

    Attributes:
        rank: its number in the world.
        event: the newest; None before the first.
        executor, mesh: those of the newest action; None before the first.
        parameters: by name, the model's, or without an executor those that ops have used.
        shares: by name, what this rank updates: its parameters, or its rows of them.
        action: the executor's that runs, or ran last; acts: whether it runs.
        step: of that action, counted from 1; 0 before the first.
        batch: the micro-batch of it; None where it has none.
        op: that runs, or ran last in the action that does; None: none.
        tape: that records, or is walked, or was last.
        slots: what of the values on tapes can still be seen.
        gradients: how far they have come.
        onlooker: the states of values; None before the first action.
        ledger: the bytes that are alive here.
        course: what was done in this step so far.
        kept: what lives on from step to step.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.rank = world.rank
        self.event: Event | None = None
        self.executor: Any = None
        self.parameters: dict[str, Parameter] = {}
        self.shares: dict[str, Parameter] = {}
        self.mesh: Mesh | None = None
        self.action: Action | None = None
        self.acts = False
        self.step = 0
        self.batch: Any = None
        self.op: Op | None = None
        self.tape: Tape | None = None
        self.slots = Slots()
        self.gradients = Gradients()
        self.onlooker: Onlooker | None = None
        self.ledger = MemoryLedger()
        self.course = Course()
        self.kept = Kept()
        self._thread = threading.get_ident()
        self._begun: list[tuple[int, str]] = []  # number and name of ops that have begun and not ended
        self._ops = 0  # of this action
        self._updates_before = -1  # made when this action began

    def __call__(self, event: Event) -> None:
        """See events.py."""
        if threading.get_ident() != self._thread:
            return  # a save in the background, or a world of its own within the script
        self.event = event
        if event.kind == "action":
            self._act(event.phase, event.info)
        if event.kind == "op":
            self._operate(event.phase, event.name, event.info)
        self.course(event)
        self.gradients(event, self.parameters.values())
        self.ledger(event)
        if self.onlooker is not None:
            self.onlooker(event)

    def _act(self, phase: str, info: Mapping[str, Any]) -> None:
        executor = info["executor"]
        if executor is not self.executor:
            self.executor, self.mesh = executor, executor.mesh
            self.parameters = {p.name: p for p in executor.model.parameters()}
            self.shares = {p.name: p for p in executor.model.kept()}
            self.onlooker = Onlooker(executor.model.parameters(), executor.mesh, executor.reducer.apart)
        self.action, self.batch, self.acts = info["action"], info["batch"], phase == "begin"
        self.step = info["step"]
        self.kept.give(self.batch)
        self._updates_before = self.updates
        self.op = None  # its arrays should not live on because of this; nor the tape in the next step
        if phase == "begin":
            self._begun.clear()  # what raised has no end
            self._ops = 0
            if self.action is executor.row[0]:
                self.tape = None
                self.kept.mark(self.step, self.ledger)

    def _operate(self, phase: str, name: str, info: Mapping[str, Any]) -> None:
        if phase == "begin":
            self._ops += 1
            self._begun.append((self._ops, name))
            number = self._ops
            if "tensors" in info:
                self._see(info["tensors"])
        else:
            number = self._ops
            while self._begun:
                number, begun = self._begun.pop()
                if begun == name:
                    break
        action = str(self.action) if self.acts else ""
        self.op = Op(name, number, info, phase == "end", self.step if self.acts else 0, action)
        tape = info.get("tape") or TAPE.get()
        if tape is not None and not isinstance(tape, Sketch):
            self.tape = tape
            self.slots.enter(tape, self.step, action)
            if "node" in info:
                self.slots.walk(tape, info["node"], phase == "end", (self.step, action) if action else ())
        if phase == "end" and "outputs" in info:
            self.slots.note(info)

    def _see(self, inputs: Iterable[Any]) -> None:
        """Without an executor the parameters are those that ops have used."""
        if self.executor is None:
            for p in inputs:
                if isinstance(p, Parameter):
                    self.parameters[p.name] = self.shares[p.name] = p

    # -- what it holds ------------------------------------------------------------------------------------------------

    @property
    def moments(self) -> dict[str, dict[str, StateTensor]]:
        """What the optimizer and the reducer keep: kind -> parameter's name -> tensor."""
        if self.executor is None:
            return {}
        return {**self.executor.optimizer.state_tensors(), **self.executor.reducer.state_tensors()}

    @property
    def in_update(self) -> bool:
        """Whether the rank stands in the middle of an update, which has written some weights and others not."""
        is_step = self.acts and self.action is not None and self.action.kind == "STEP"
        return is_step and self.updates != self._updates_before

    @property
    def updates(self) -> int:
        """How many updates were made; -1 where nobody counts."""
        return -1 if self.executor is None else self.executor.optimizer.updates

    @property
    def trouble(self) -> str:
        """The first mistake that the rules of states find; "" for none."""
        return "" if self.onlooker is None else self.onlooker.trouble
