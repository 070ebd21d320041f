"""Stepping through all ranks at once: who stands where, and what makes them stop.

    stepper = Stepper(4, prompt)
    run_script(4, "train.py", [], around=stepper.around, debugger=stepper)

Ranks are threads of this process of which one runs (comm/baton.py), and a listener is called in its rank's thread: one
that does not return is a breakpoint.  Each rank has a `View`, its listener, which knows what the rank is in the middle
of.  Whenever there is something to say, `prompt(why)` is called, in the thread of whichever rank runs; nobody else does
meanwhile, so it may look at everything of every rank.  Before it returns it has said by `go` how far ranks go on:

    stepper.go(stepper.next("op"))       each rank to its next op
    stepper.go(None)                     to the next breakpoint

Ranks go on in lock step: one that is where it was to go is held there until every other rank is, too, or waits for a
message, or has left.  A breakpoint that is hit stops at once.
"""

from __future__ import annotations

import bdb
import sys
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from mpitrain.autograd.tape import TAPE, Tape
from mpitrain.comm.baton import Ended, Rank, Wait
from mpitrain.comm.site import caller_of, site_of
from mpitrain.comm.world import World, world
from mpitrain.events import Event, listen
from mpitrain.pipeline.action import Action

Goal = Callable[["View", Event], bool]
"""Whether a rank is where it was to go, asked at each of its events."""

BEGINS = ("action", "op", "message", "unit")  # kinds that begin and end; the others only end


class View:
    """One rank as a debugger sees it, and its listener.

    Attributes:
        rank: its place among the ranks that are threads: `held`, `waits`, `left`, `calls`.
        world: what the rank calls `world()`.
        event: the newest; None before the first.
        open: what has begun and not ended, the innermost last.
        action: the executor's that it is in, or was in last; None before the first.
        executor: the one whose action that is.
        step: that it is in, counted from 1; 0 before the first.
        tape: that records, or is walked, or was last.
        goal: how far it goes; None: to a breakpoint.
        error: with which it failed, if it is the one that did.
    """

    def __init__(self, stepper: Stepper, world: World) -> None:
        board: Any = world.board
        assert isinstance(board, Rank), "only ranks that are threads can be stepped"
        self.stepper = stepper
        self.world = world
        self.rank = board
        self.event: Event | None = None
        self.open: list[Event] = []
        self.action: Action | None = None
        self.executor: Any = None
        self.step = 0
        self.tape: Tape | None = None
        self.goal: Goal | None = None
        self.error: BaseException | None = None
        self._pdb = False

    @property
    def number(self) -> int:
        """The rank in the world."""
        return self.rank.number

    @property
    def frame(self) -> FrameType | None:
        """Where its thread is, the innermost line that is no plumbing; None before it runs, or after its end."""
        innermost = frame = sys._current_frames().get(self.rank.ident)
        while frame is not None:
            if frame.f_code in _OURS:  # inward of it is the debugger
                innermost = frame.f_back
            frame = frame.f_back
        return caller_of(innermost)[0]

    @property
    def site(self) -> str:
        """`file.py:line` of that; "?" where there is none."""
        return site_of(self.frame)

    @property
    def waits(self) -> Wait | None:
        """The message that it waits for, and that is not complete."""
        wait = self.rank.waits
        return None if wait is None or wait.done else wait

    def inside(self, kind: str) -> Event | None:
        """The innermost of that kind that has begun and not ended."""
        return next((event for event in reversed(self.open) if event.kind == kind), None)

    @property
    def stands_before(self) -> bool:
        """Whether the newest thing has begun, and nothing of it was done yet."""
        return bool(self.open) and self.open[-1] is self.event

    def debug_by_pdb(self) -> None:
        """Have the rank's own thread stop in pdb, in the line that `frame` is in, as soon as it goes on."""
        self._pdb = True

    def __call__(self, event: Event) -> None:
        """See events.py."""
        if threading.get_ident() != self.rank.ident:
            return  # a save in the background
        self._note(event)
        stepper = self.stepper
        why = stepper.halts(self, event)
        if why:
            stepper.ask(why, self)
        elif self.goal is not None and self.goal(self, event):
            stepper.arrived(self)
        self.enter_pdb()

    def enter_pdb(self) -> None:
        """Stop in pdb if that was asked for; in the rank's thread."""
        if self.takes_pdb():
            self.stepper.served = self.number
            self.stepper.pdb(self)

    def takes_pdb(self) -> bool:
        """Whether it was asked for, which is then done with."""
        asked, self._pdb = self._pdb, False
        return asked

    def _note(self, event: Event) -> None:
        self.event = event
        info = event.info
        if event.kind == "action":
            self.executor, self.action = info["executor"], info["action"]
            self.step = info.get("step", self.step)
            self.open.clear()  # what raised has no end
        elif event.kind == "op":
            self.tape = info.get("tape") or TAPE.get() or self.tape
        if event.kind in BEGINS and event.phase == "begin":
            self.open.append(event)
        elif event.phase == "end" and any(one.kind == event.kind and one.name == event.name for one in self.open):
            while self.open:
                one = self.open.pop()
                if one.kind == event.kind and one.name == event.name:
                    break


class Stepper:
    """All ranks of a debugged run; a `Debugger` of the baton.

    Args:
        size: number of ranks.
        prompt: called with the reason whenever the run stands still, see above.  `focus` then is the rank it is about.
        companions: makes further listeners of a rank, told of each event before its view is.

    Attributes:
        views: of the ranks that have begun, by number.
        focus: the rank that the prompt is about.
        breaks: asked at each event of each rank; a text is a reason to stop at once.
        interrupted: stop at the next event, whoever has it.
        served: a rank that is stepped by lines: the others go on, an event at a time, as long as it waits for them.
    """

    def __init__(
        self,
        size: int,
        prompt: Callable[[str], None],
        companions: Callable[[World], Sequence[Callable[[Event], None]]] = lambda world: (),
    ) -> None:
        self.size = size
        self.prompt = prompt
        self.companions = companions
        self.views: dict[int, View] = {}
        self.focus = 0
        self.breaks: list[Callable[[View, Event], str]] = []
        self.interrupted = False
        self.served = -1
        self.pdb: Callable[[View], None] = _pdb
        self._begun = False
        self._post_mortem = False

    # -- what ranks enter ---------------------------------------------------------------------------------------------

    @contextmanager
    def around(self) -> Iterator[None]:
        """What each rank enters before its script (`run_script`)."""
        ranks = world()
        view = View(self, ranks)
        self.views[view.number] = view
        with _listening([*self.companions(ranks), view]):
            self.arrived(view)  # the last one to come has nobody to pass the baton to: so begins the first prompt
            view.enter_pdb()
            yield

    # -- how far they go on -------------------------------------------------------------------------------------------

    def go(self, goal: Goal | None, only: Container[int] | None = None) -> None:
        """Let ranks go on when the prompt returns.

        Args:
            goal: how far; None: to a breakpoint, or the end.
            only: ranks that go; the others stay where they are, and stop at their next event.  None: all.
        """
        for view in self.views.values():
            goes = only is None or view.number in only
            view.goal = goal if goes else _at_once
            view.rank.held = view.rank.held and not goes

    def end(self, code: int = 0) -> None:
        """End all ranks when the prompt returns."""
        for view in self.views.values():
            view.rank.room.stop(Ended(code))
            break

    # -- called by views and by the baton -----------------------------------------------------------------------------

    def halts(self, view: View, event: Event) -> str:
        """Why to stop at once, or ""."""
        if self.interrupted:
            self.interrupted = False
            return "interrupted"
        for breaks in self.breaks:
            why = breaks(view, event)
            if why:
                return why
        return ""

    def arrived(self, view: View) -> None:
        """A rank is where it was to go: it is held there."""
        view.goal = _at_once  # should somebody release only others
        view.rank.room.hold(view.rank)

    def ask(self, why: str, view: View) -> None:
        """Prompt in a rank that need not stop; it is held if it is told to stay."""
        self.focus = view.number
        view.goal = None
        self.prompt(why)
        room = view.rank.room
        if room.error is not None or view.goal is _at_once:
            room.hold(view.rank)

    def idle(self, rank: Rank) -> bool:
        """See `Debugger`."""
        held = [view.number for view in self.views.values() if view.rank.held]
        if not held:
            return False
        if self.served >= 0 and self.served not in held and not self.views[self.served].rank.left:
            for number in held:
                self.views[number].goal, self.views[number].rank.held = _at_once, False
            return True
        self.served = -1
        if self.focus not in self.views or self.views[self.focus].rank.left:
            self.focus = held[0]
        why = "stopped" if self._begun else "start"
        self._begun = True
        self.prompt(why)
        return any(view.rank.can_go_on() for view in self.views.values())

    def failed(self, rank: Rank, error: BaseException) -> None:
        """See `Debugger`."""
        if isinstance(error, Ended) or self._post_mortem:
            return
        self._post_mortem = True
        view = self.views.get(rank.number)
        if view is not None:
            view.error = error
            self.focus = view.number
        self.prompt("failed")

    # -- goals --------------------------------------------------------------------------------------------------------

    @staticmethod
    def next(*kinds: str, count: int = 1) -> Goal:
        """To the beginning of the next event of these kinds (of any, without one), or the `count`-th one."""
        left: dict[int, int] = {}

        def is_there(view: View, event: Event) -> bool:
            if event.phase != "begin" or (kinds and event.kind not in kinds):
                return False
            left[view.number] = left.get(view.number, count) - 1
            return left[view.number] <= 0

        return is_there

    def over(self, *, count: int = 1) -> Goal:
        """To the next beginning on the level on which each rank stands, or further out: what is within runs through."""
        depths = {view.number: max(1, len(view.open) + (not view.stands_before)) for view in self.views.values()}
        left: dict[int, int] = {}

        def is_there(view: View, event: Event) -> bool:
            if event.phase != "begin" or len(view.open) > depths.get(view.number, 1):
                return False
            left[view.number] = left.get(view.number, count) - 1
            return left[view.number] <= 0

        return is_there

    @staticmethod
    def finish(depths: dict[int, int]) -> Goal:
        """To the end of what each rank is in: when no more than so many things are open, by rank."""
        return lambda view, event: event.phase == "end" and len(view.open) <= depths.get(view.number, 0)


_OURS = tuple(
    function.__code__
    for function in (
        View.__call__,
        Stepper.arrived,
        Stepper.ask,
        Stepper.idle,
        Stepper.failed,
        bdb.Bdb.trace_dispatch,
    )
)
"""Where a rank's thread goes over to the debugger."""


def _at_once(view: View, event: Event) -> bool:
    return True


@contextmanager
def _listening(listeners: Sequence[Callable[[Event], None]]) -> Iterator[None]:
    if not listeners:
        yield
        return
    with listen(listeners[0]), _listening(listeners[1:]):
        yield


def _pdb(view: View) -> None:
    """pdb in the thread of the rank, in the frame of whoever uses the library."""
    import pdb

    pdb.Pdb(nosigint=True).set_trace(view.frame)
