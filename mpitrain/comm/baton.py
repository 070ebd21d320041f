"""Turns: ranks are threads of one process, and exactly one of them runs.

A rank runs until it must wait for a message, or polls one that has not come; then it passes the baton to the next rank
(round robin) that can go on.  So a program takes the same course every time, nothing races, and when nobody can go on
that is known at once and exactly: every rank stands in a message that can never be complete.

The first rank that fails ends all: the others are woken one by one and unwind (`RankStopped`), so their `finally`
blocks run.

A `Debugger` may hold ranks: they then stand where they are while the others go on, until it lets them go.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import NoReturn, Protocol

from mpitrain.comm.page import in_call
from mpitrain.comm.path import MAX_LINES, Doing, deadlock_report, places_told
from mpitrain.comm.places import told
from mpitrain.comm.site import call_site
from mpitrain.comm.thread_rank import Rank as Rank
from mpitrain.comm.thread_rank import Wait as Wait
from mpitrain.errors import CollectiveMismatch, CommError


class RankStopped(BaseException):
    """Unwinds a rank after another one has failed.  Not for catching."""


class Ended(BaseException):
    """A debugger has ended all ranks; its argument is the exit code."""


class Debugger(Protocol):
    """Who looks on, and may hold ranks (`Room.hold`).  While there is one, nobody is ever too slow.

    Both are called in the thread of some rank, with the baton: no other rank runs meanwhile, and it may take any time.
    """

    def idle(self, rank: Rank) -> bool:
        """Nobody can go on: every rank is held, waits for one that is, or has left.

        Args:
            rank: whose thread this is.

        Returns:
            Whether it has let somebody go on (`Rank.held`); if not, it is asked again, or the ranks are deadlocked.
        """
        ...

    def failed(self, rank: Rank, error: BaseException) -> None:
        """The first failure, before anybody unwinds."""
        ...


class Room:
    """The ranks and the baton.

    Args:
        size: number of ranks.
        timeout: seconds after which ranks that poll in vain, with no message moving anywhere, are given up.
        debugger: who looks on.
    """

    def __init__(self, size: int, timeout: float, debugger: Debugger | None = None) -> None:
        self.debugger = debugger
        self.ranks = [Rank(self, number) for number in range(size)]
        self.timeout = timeout
        self.error: BaseException | None = None  # the first failure
        self.failed = -1  # the rank in which it happens
        self.raised = False
        self.ended: tuple[str, list[str]] = "", []  # see LocalWorld
        self.moves = 0  # grows with every message that is posted
        self.turns = 0  # grows with every turn, also where a rank has the next one, too
        self.holder: Rank | None = None  # of the baton
        self.empty = threading.Event()  # all have left
        self._main = sys.modules["__main__"]

    def start(self) -> None:
        """Give the baton to rank 0: all threads have been started."""
        self._give(self.ranks[0])

    def stop(self, error: BaseException) -> None:
        """Fail from outside: the rank that runs unwinds at its next message."""
        if self.error is None:
            self.error, self.raised = error, True

    # -- called by the rank that runs

    def begin(self, rank: Rank) -> None:
        """A rank's thread has started: wait for the first turn."""
        rank.turn.acquire()
        rank.ident = threading.get_ident()
        self._carry_on(rank)

    def check(self, rank: Rank) -> None:
        """Refuse a message of a stopped rank, or of a thread that is no rank."""
        if self.error is not None:
            self._carry_on(rank)
        if threading.get_ident() != rank.ident:
            raise CommError(
                f"a thread of rank {rank.number} sends a message, but only the rank's own thread may:"
                " exactly one rank runs at a time"
            )
        self.moves += 1

    def block(self, rank: Rank, wait: Wait) -> None:
        """Pass the baton until `wait` is done."""
        if self.error is not None:
            self._carry_on(rank)
        rank.waits = wait
        following = self._someone(rank)
        if following is None:
            self.fail(rank, self._deadlock())
        elif following is not rank:
            self._pass(rank, following)
        rank.waits = None
        self._carry_on(rank)
        assert wait.done, "the baton came to a rank that still waits"

    def poll(self, rank: Rank) -> None:
        """Pass the baton on and take it again when the turn comes."""
        if self.error is not None:
            self._carry_on(rank)
        now = time.monotonic()
        in_vain = rank.last_move == self.moves
        if not in_vain:
            rank.last_move, rank.since = self.moves, now
        elif now - rank.since > self.timeout and self.debugger is None:
            text = f"rank {rank.number} polls in vain for {self.timeout:g} s at {call_site()}; {self._waiting()}"
            self.give_up(rank, CommError(text))
        following = self._next(rank)
        if in_vain and following is rank and self.debugger is not None and any(r.held for r in self.ranks):
            self.debugger.idle(rank)  # what it polls for may be held
            following = self._next(rank)
        if following is not None and following is not rank:
            self._pass(rank, following)
        self._carry_on(rank)

    def hold(self, rank: Rank) -> None:
        """Pass the baton until the debugger has let this rank go."""
        if self.error is not None:
            self._carry_on(rank)
        rank.held = True
        following = self._someone(rank)
        if following is None:
            rank.held = False
            self.fail(rank, self._deadlock())
        elif following is not rank:
            self._pass(rank, following)
        self._carry_on(rank)

    def fail(self, rank: Rank, error: BaseException) -> None:
        """The first failure: it is raised in `rank` as soon as that has the baton."""
        if self.error is None:
            if self.debugger is not None:
                self.debugger.failed(rank, error)
            if self.error is None:  # nor has the debugger ended all
                self.error, self.failed = error, rank.number
                if isinstance(error, SystemExit):
                    at = f", at {rank.left_at}" if rank.left_at else ""
                    self.ended = at, places_told([(r.number, r.where()) for r in self.ranks if r.is_waiting], MAX_LINES)

    def give_up(self, rank: Rank, error: BaseException) -> NoReturn:
        """Fail in the rank that runs."""
        self.fail(rank, error)
        self._carry_on(rank)
        raise AssertionError("a failed room lets nobody go on")

    def leave(self, rank: Rank) -> None:
        """A rank is done or has failed: the baton goes to whoever can go on, else the run has failed."""
        rank.left = True
        self.moves += 1
        staying = [r for r in self.ranks if not r.left]
        if not staying:
            sys.modules["__main__"] = self._main
            self.empty.set()
            return
        following = self._someone(rank) if self.error is None else None
        if following is None:
            if self.error is None:
                self.fail(staying[0], self._deadlock())
            following = staying[0]
        self._give(following)

    # -- the baton

    def _next(self, rank: Rank) -> Rank | None:
        """The rank after this one that can go on; maybe itself."""
        size = len(self.ranks)
        for step in range(1, size + 1):
            candidate = self.ranks[(rank.number + step) % size]
            if candidate.can_go_on():
                return candidate
        return None

    def _someone(self, rank: Rank) -> Rank | None:
        """`_next`; a debugger that holds ranks is asked for one first."""
        following = self._next(rank)
        while following is None and self.error is None and self.debugger is not None:
            if not self.debugger.idle(rank) and not any(r.held for r in self.ranks):
                break
            following = self._next(rank)
        return following

    def _give(self, rank: Rank) -> None:
        self.holder = rank
        sys.modules["__main__"] = self._main if rank.main is None else rank.main
        rank.turn.release()

    def _pass(self, rank: Rank, following: Rank) -> None:
        self._give(following)
        rank.turn.acquire()

    def _carry_on(self, rank: Rank) -> None:
        """Go on unless the run has failed: then raise the error in its rank, once, and unwind the others."""
        self.turns += 1
        if self.error is None:
            return
        if self.failed == rank.number and not self.raised:
            self.raised = True
            raise self.error
        raise RankStopped

    # -- reports

    def _deadlock(self) -> CommError:
        """Nobody can go on: say where everybody stands."""
        kind = CommError if any(rank.left for rank in self.ranks) else CollectiveMismatch
        standings = {rank.number: rank.standing() for rank in self.ranks if rank.left or rank.waits is not None}
        return kind("\n".join(deadlock_report("deadlock: no rank can go on.", standings, self._places())))

    def _places(self) -> list[tuple[int, Doing]]:
        return [(rank.number, rank.where()) for rank in self.ranks]

    def _waiting(self) -> str:
        waits = [(rank.number, rank.waits) for rank in self.ranks if rank.waits is not None]
        return told([(number, f"waits{in_call(wait.told)}") for number, wait in waits])


def tell_apart(waits: list[tuple[int, Wait]]) -> str:
    """Who waits where, all in one call of an axis: `ranks 0,1,3 all_gather (4, 512) float32 at a.py:7; rank 2 ...`."""
    return told([(rank, str(wait)) for rank, wait in waits])
