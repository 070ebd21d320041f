"""A row of steps, as one who listens to an executor hears it: which steps, what they report, and when they are over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain.events import Event
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.update import StepReport


class RowHeard:
    """A row that begins; made by who stands in for the executor, before it works.

    Args:
        executor: that makes it.
        batches: one a step.

    Attributes:
        steps: their numbers, counted from 1 over all starts of the run.
        reports: of the steps, once they are over.
    """

    def __init__(self, executor: Executor, batches: Sequence[Any]) -> None:
        self.executor = executor
        self.steps = [
            (known if isinstance(known := getattr(batch, "step", None), int) else executor.steps + place) + 1
            for place, batch in enumerate(batches)
        ]
        self.reports: Sequence[StepReport] = ()
        self._place = 0  # of the action that comes next; -1: the row was given up

    def is_over(self, event: Event) -> bool:
        """Whether this event ends the row: it is the end of its last action."""
        if event.kind != "action" or event.phase == "begin" or event.info["executor"] is not self.executor:
            return False
        row = self.executor.row
        if self._place < 0 or event.name != str(row[self._place]):  # an error ended it, and a cause is looked for
            self._place = -1
            return False
        self._place += 1
        self.reports = event.info.get("reports", self.reports)
        return self._place == len(row)
