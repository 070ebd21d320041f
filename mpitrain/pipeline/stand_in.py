"""Somebody who answers in the executor's place: a replay, for the steps before those that were recorded.

    with standing_in(replay):
        train()

What a script asks of its executor is then first asked of the one who stands in.  A step that it answers for is not
made: no action runs, no message is sent, no weight changes; it counts all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from mpitrain.pipeline.update import StepReport


class StandIn(Protocol):
    """Who may answer for an executor; None: the executor shall do it itself."""

    def run(self, executor: Any, batches: Sequence[Any]) -> list[StepReport] | None:
        """One report for each batch of a row of steps, as `Executor.run` gives them."""
        ...

    def evaluate(self, executor: Any, batches: Iterable[Any]) -> float | None:
        """The loss, as `Executor.evaluate` gives it; the batches are left alone where it does not answer."""
        ...


STAND_IN: ContextVar[StandIn | None] = ContextVar("mpitrain.stand_in", default=None)
"""Who stands in on this rank."""


@contextmanager
def standing_in(who: StandIn) -> Iterator[None]:
    """Let `who` answer while the block runs."""
    token = STAND_IN.set(who)
    try:
        yield
    finally:
        STAND_IN.reset(token)
