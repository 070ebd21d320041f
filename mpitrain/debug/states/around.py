"""The check of states around a program that knows nothing of it: each executor of a rank gets a checker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from mpitrain.comm.world import World
from mpitrain.debug.states.checker import StateChecker
from mpitrain.events import Event, listen
from mpitrain.pipeline.executor import Executor


@contextmanager
def checking_states(world: World) -> Iterator[None]:
    """Check what executors on this world run in the block.

    Raises:
        StateError: by the op that is wrong, on all ranks of the axis.
    """
    checkers: WeakKeyDictionary[Executor, StateChecker] = WeakKeyDictionary()
    current: list[StateChecker] = []  # of the executor whose action runs

    def follow(event: Event) -> None:
        if event.kind == "action":
            current.clear()
            executor: Executor = event.info["executor"]
            if executor.mesh.world is not world:
                return
            if executor not in checkers:
                checkers[executor] = StateChecker(executor.model.parameters(), executor.mesh)
            current.append(checkers[executor])
        if current:
            current[0](event)

    with listen(follow):
        yield
