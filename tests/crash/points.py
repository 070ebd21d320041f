"""Where a save can be struck: before every disk operation and every message of every rank.

    counts = count(reference, scene)        how many points each rank has
    Strike(world, rank, number, blow)       a listener: at that rank's point of that number, the blow

Points are counted from the end of the first optimizer's step of a training on; start and resume come before.  After one
operation is before the next: in between a rank does nothing that another process could find.  With ranks that are
threads the course is the same each time, so a number always means the same point.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from mpitrain.comm.world import World
from mpitrain.events import Event

Blow = Callable[[Event], None]


class Points:
    """A listener of one rank that numbers its points from 1.

    Args:
        kinds: of events that are points.
        start: count from the beginning, too.

    Attributes:
        passed: kind and name of all points so far.
    """

    def __init__(self, kinds: tuple[str, ...] = ("disk", "message"), start: bool = False) -> None:
        self.kinds = kinds
        self.passed: list[tuple[str, str]] = []
        self._counting = start
        self._lock = threading.Lock()  # a save in the background has a thread of its own

    def __call__(self, event: Event) -> None:
        if event.kind == "action" and event.phase == "end" and event.name.startswith("STEP"):
            self._counting = True
        if self._counting and event.kind in self.kinds and event.phase == "begin":
            with self._lock:
                self.passed.append((event.kind, event.name))
                number = len(self.passed)
            self.at(number, event)

    def at(self, number: int, event: Event) -> None:
        """A point is reached."""


class Strike(Points):
    """Does something at one point of one rank.

    Args:
        number: of the point.
        blow: what to do there.
        kinds, start: as `Points` has them.
    """

    def __init__(
        self, number: int, blow: Blow, kinds: tuple[str, ...] = ("disk", "message"), start: bool = False
    ) -> None:
        super().__init__(kinds, start)
        self.number, self.blow = number, blow

    def at(self, number: int, event: Event) -> None:
        if number == self.number:
            self.blow(event)


def on_rank(rank: int, listener: Points) -> Callable[[World], Points]:
    """One listener for that rank, for the others some that do nothing."""
    return lambda world: listener if world.rank == rank else Points(())


def kill(_: Event) -> None:
    """The end, without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(code: int) -> Blow:
    """What a disk says."""

    def blow(event: Event) -> None:
        raise OSError(code, os.strerror(code), event.info["path"])

    return blow
