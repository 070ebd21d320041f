"""The listener that takes the sums of a run, step by step.

    begin         who this rank is, and what it holds of each parameter
    step 0        the weights before the first step
    step 1 2 ..   what the batch held; sums of the values of ops and of their gradients; of final gradients, of weights
                  and of the optimizer's state; the loss, the norm and other numbers of the step

All sums are taken on this rank alone: a digest sends nothing and changes nothing.  How they add up over ranks,
micro-batches and slices stands beside them: by the rules of states, which `following` keeps book of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from mpitrain.comm.world import World
from mpitrain.debug.digests.course import Course
from mpitrain.debug.digests.entries import Record
from mpitrain.events import Event, hear_ops
from mpitrain.pipeline.action import COMPUTE
from mpitrain.pipeline.executor import Executor

FIRST_STEPS = 3
"""Steps at the beginning that have digests, whatever `every` says."""


class Digester:
    """Takes digests of what executors on a world run.

        with listen(digester, ops=False):
            executor.step(batch)

    Args:
        world: of this rank.
        keep: takes each record.
        every: takes those of each so many-th step, and of the first FIRST_STEPS.
        facts: told in the first record.

    Cost: of a step that has digests in `docs/how-to/compare-two-runs.md`; of others a look at each action.
    """

    def __init__(
        self, world: World, keep: Callable[[Record], None], every: int = 1, facts: Mapping[str, Any] | None = None
    ) -> None:
        self._world = world
        self._keep = keep
        self._every = every
        self._facts = dict(facts or {})
        self._courses: WeakKeyDictionary[Executor, Course] = WeakKeyDictionary()
        self._number = 0
        self._running: Course | None = None

    def due(self, step: int) -> bool:
        """Whether a step, counted from 1, has digests."""
        return step <= FIRST_STEPS or step % self._every == 0

    def __call__(self, event: Event) -> None:
        kind, phase, _, info = event
        if kind == "op":
            if self._running is not None:
                self._running.op(event)
        elif kind == "action" and info["executor"].mesh.world is self._world:
            self._action(event, phase, info)

    def _action(self, event: Event, phase: str, info: Mapping[str, Any]) -> None:
        executor, action = info["executor"], info["action"]
        course = self._courses.get(executor)
        if course is None:
            course = self._courses[executor] = Course(executor, self._number)
            self._number += 1
            self._keep(course.begin(self._world, self._facts))
            self._keep(course.before(info["step"] - 1))
        due = self.due(info["step"])
        if action.kind in COMPUTE:
            if phase == "begin":
                self._running = course if due else None
                hear_ops(self, due)
            if due:
                course.action(event)
            if phase == "end":
                self._running = None
                hear_ops(self, False)
        elif action.kind == "STEP":
            if phase == "begin" and due:
                course.step_begins(info["step"])
            elif phase == "end":
                if due:
                    course.step_ends(info["step"])
                for record in course.reported(info["reports"], action.micro or 0, info["step"] if due else None):
                    self._keep(record)

    def interrupt(self) -> None:
        """Keep what is known of steps that did not come to their end."""
        for course in self._courses.values():
            for record in course.rest():
                self._keep(record)
