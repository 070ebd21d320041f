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
from collections import deque
from types import ModuleType
from typing import NamedTuple, NoReturn, Protocol

from mpitrain.comm.page import KEPT_CALLS
from mpitrain.comm.places import named, told
from mpitrain.comm.site import call_site
from mpitrain.comm.transport import DType
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


class Call(NamedTuple):
    """The call of the door that a rank is in, as its lane was told."""

    axis: str
    number: int
    verb: str
    shape: tuple[int, ...]
    dtype: DType
    peer: int
    tag: int

    def __str__(self) -> str:
        if self.peer >= 0:
            way = "from" if "recv" in self.verb else "to"
            return f"{self.verb} {self.shape} {self.dtype} {way} rank {self.peer}"
        return f"{self.verb} {self.shape} {self.dtype}"


class Wait:
    """A message in flight of one rank: what it waits for, and how to say so.  The `Pending` of this transport."""

    __slots__ = ("axis", "call", "detail", "done", "rank", "site", "verb")

    def __init__(self, rank: Rank, axis: str, verb: str, detail: str = "") -> None:
        self.rank = rank
        self.axis = axis
        self.verb = verb
        self.detail = detail
        self.call = rank.call
        self.site = call_site()
        self.done = False

    def test(self) -> bool:
        """Poll: if it is not complete, the others run until it is this rank's turn again."""
        if not self.done:
            self.rank.room.poll(self.rank)
        return self.done

    def wait(self) -> None:
        """Let the others run until it is complete."""
        if not self.done:
            self.call = self.rank.call or self.call
            self.site = call_site()
            self.rank.room.block(self.rank, self)

    def __str__(self) -> str:
        call = self.call
        detail = f" {self.detail}" if self.detail else ""
        return f"{self.verb if call is None else call}{detail} at {self.site}"

    def where(self) -> str:
        """Axis and number, behind the rest."""
        call = self.call
        if call is None:
            return f" (axis {self.axis})"
        tag = f"tag {call.tag}, " if call.tag else ""
        return f" (axis {call.axis}, {tag}call {call.number})"


class Rank:
    """One rank: its thread, its turn, and what it is doing.  Also its flight board."""

    def __init__(self, room: Room, number: int) -> None:
        self.room = room
        self.number = number
        self.main: ModuleType | None = None  # its own __main__, where scripts run
        self.ident = 0
        self.call: Call | None = None
        self.calls: deque[Call] = deque(maxlen=KEPT_CALLS)  # entered last
        self.waits: Wait | None = None
        self.left = False
        self.held = False  # by a debugger
        self.turn = threading.Lock()
        self.turn.acquire()
        self.run_folder: str | None = None  # ranks that share a process need none
        self.step = 0
        self.last_move = -1  # of the room, when this rank polled, and when that was
        self.since = 0.0

    @property
    def limit(self) -> float:
        """Seconds after which polling in vain is a hang, the same for all ranks of the process."""
        return self.room.timeout

    @limit.setter
    def limit(self, seconds: float) -> None:
        self.room.timeout = seconds

    def open(self, axis: str, ranks: tuple[int, ...]) -> LocalLane:
        """See `transport.Board`."""
        return LocalLane(self, axis)

    def can_go_on(self) -> bool:
        """True if it would do something with the baton."""
        return not self.left and not self.held and (self.waits is None or self.waits.done)


class LocalLane:
    """One communicator's line on the board of a rank."""

    __slots__ = ("_axis", "_rank")

    def __init__(self, rank: Rank, axis: str) -> None:
        self._rank = rank
        self._axis = axis

    def enter(self, number: int, verb: str, shape: tuple[int, ...], dtype: DType, peer: int, tag: int = 0) -> None:
        """See `transport.Lane`."""
        call = self._rank.call = Call(self._axis, number, verb, shape, dtype, peer, tag)
        self._rank.calls.append(call)

    def leave(self) -> None:
        """See `transport.Lane`."""
        self._rank.call = None


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
        calls = [rank.waits.call for rank in self.ranks if rank.waits is not None and rank.waits.call is not None]
        alike = len({(call.axis, call.number) for call in calls if call.peer < 0}) == 1
        kind = CollectiveMismatch if alike and len({call.verb for call in calls}) > 1 else CommError
        left = [rank.number for rank in self.ranks if rank.left]
        gone = f"; {named(left)} {'has' if len(left) == 1 else 'have'} left" if left else ""
        return kind(f"deadlock, no rank can go on: {self._waiting()}{gone}")

    def _waiting(self) -> str:
        return tell_apart([(rank.number, rank.waits) for rank in self.ranks if rank.waits is not None])


def tell_apart(waits: list[tuple[int, Wait]], with_axis: bool = True) -> str:
    """Who waits where: `ranks 0,1,3 all_gather (4, 512) float32 at a.py:7 (axis tp, call 41); ...`."""
    return told([(rank, f"{wait}{wait.where() if with_axis else ''}") for rank, wait in waits])
