"""Commands that let ranks go on: step, next, to, finish, continue.

All ranks go on in lock step: each to where it was told to, and there it stands until the others are there too, wait for
a message, or have ended.  With `rank 2` or `rank 0,3` behind the command only those go, and the others stand.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, NamedTuple

from mpitrain.debug.console.clauses import Happening, limits, ranges
from mpitrain.debug.console.conditions import RANGES, Condition, is_action, parse
from mpitrain.debug.stepper import Goal, View
from mpitrain.errors import ConsoleError
from mpitrain.events import Event

if TYPE_CHECKING:
    from mpitrain.debug.console.console import Console

HELP_STEP = """\
step [action | op | message | ACTION] [N] [rank LIST]      each rank to its next action, op or message
  Without a kind to whichever comes first: into an action to its ops, into an op to its messages.
  ACTION: to the next of its kind or name: step F, step B*@1.  N: to the N-th.  All ranks go, in lock
  step: each stands there until the others are there, too, or wait for a message, or have ended.
  With rank 2 or rank 0,3 only those go; what they need of others does not come then, and waits
  shows it."""

HELP_NEXT = """\
next [action | op | message | ACTION] [N] [rank LIST]      the same, to the next on the level of each rank
  From an op to the next op of that action, from an action to the next action; what is within runs
  through.  With a kind it is step."""

HELP_FINISH = """\
finish [rank LIST]      each rank to the end of what it is in: show output is what that has made"""

HELP_TO = """\
to CONDITION      each rank to where a condition holds: to F3@1, to STEP, to message all_reduce, to step 5
  Conditions are those of break.  Ranks for which it never holds go on as far as messages let them."""

HELP_CONTINUE = """\
continue [rank LIST]      to the next breakpoint, or the end"""

KINDS = ("action", "op", "message")
MOST_STEPS = 10**9
_MOST_OF_A_ROW = 300  # characters


class _Asked(NamedTuple):
    kind: str  # "" for any
    action: str  # pattern or kind of action; "" for any
    times: int
    only: Container[int] | None


def step(console: Console, words: str) -> bool:
    """To the next action, op or message, whichever comes first: into what stands next."""
    asked = _read(console, "step", words)
    if asked.action:
        return _to(console, asked)
    kinds = (asked.kind,) if asked.kind else KINDS
    return _go(console, console.stepper.next(*kinds, count=asked.times), asked.only)


def next_(console: Console, words: str) -> bool:
    """To the next thing on the same level: what is within runs through; with a kind as step."""
    asked = _read(console, "next", words)
    if asked.action:
        return _to(console, asked)
    if asked.kind:
        return _go(console, console.stepper.next(asked.kind, count=asked.times), asked.only)
    return _go(console, console.stepper.over(count=asked.times), asked.only)


def finish(console: Console, words: str) -> bool:
    """To the end of what each rank is in."""
    asked = _read(console, "finish", words)
    if asked.kind or asked.action or asked.times != 1:
        raise ConsoleError("finish takes no more than ranks: finish rank 2")
    depths = {number: max(0, len(view.open) - 1) for number, view in console.stepper.views.items()}
    return _go(console, console.stepper.finish(depths), asked.only)


def continue_(console: Console, words: str) -> bool:
    """To the next breakpoint, or the end."""
    asked = _read(console, "continue", words)
    if asked.kind or asked.action or asked.times != 1:
        raise ConsoleError("continue takes no more than ranks: continue rank 2")
    return _go(console, None, asked.only)


def to(console: Console, words: str) -> bool:
    """Each rank to where a condition holds; ranks for which it never does go on as far as messages let them."""
    if not words:
        raise ConsoleError("to where?  An action, or a condition as of break: to F3@1, to op gelu, to step 5")
    condition = parse(words)
    if never := never_of(console, condition):
        raise ConsoleError(never)
    if condition.is_a_place:
        return _go(console, _place(condition), None, str(condition))
    return _go_to(console, _To(console, condition), None, str(condition))


def _to(console: Console, asked: _Asked) -> bool:
    """To the next action of a name or kind, or the N-th."""
    aim = asked.action if asked.times == 1 else f"{asked.action}, {asked.times} times,"
    return _go_to(console, _To(console, parse(f"action {asked.action}"), asked.times), asked.only, aim)


def _go_to(console: Console, goal: _To, only: Container[int] | None, aim: str) -> bool:
    if goal.is_nowhere():
        raise ConsoleError(goal.why)
    return _go(console, goal, only, aim)


class _To:
    """To where a condition holds; no further than to the first action if it names one that no rank has in its row.

    Args:
        console: the session.
        condition: that must hold.
        times: how often it has to.

    Attributes:
        why: it is nowhere, in words.
    """

    def __init__(self, console: Console, condition: Condition, times: int = 1) -> None:
        named = next((value for word, value in condition.clauses if word == "action"), "")
        self._console = console
        self._condition = condition
        self._times = times
        self._held: dict[int, int] = {}
        self._unsure = "" if set("*?[") & set(named) else named
        self.why = ""

    def __call__(self, view: View, event: Event) -> bool:
        """See `Goal`."""
        if self._condition.holds(_happening(view, event)):
            self._held[view.number] = self._held.get(view.number, 0) + 1
            return self._held[view.number] >= self._times
        if event.kind == "action" and event.phase == "begin" and self.is_nowhere():
            self._console.remark = self.why
            return True
        return False

    def is_nowhere(self) -> bool:
        """Whether all rows are known, and none has the action."""
        views = self._console.stepper.views.values()
        rows = [view.executor.row for view in views if view.executor is not None] if self._unsure else []
        if self._unsure and len(rows) == self._console.size:
            if not any(self._unsure in (str(action), action.kind) for row in rows for action in row):
                focus = self._console.focus
                row = " ".join(map(str, self._console.view.executor.row))
                shown = row if len(row) <= _MOST_OF_A_ROW else f"{row[:_MOST_OF_A_ROW]} ..."
                self.why = f"no rank has {self._unsure} in its row; that of rank {focus}: {shown}"
            self._unsure = ""
        return bool(self.why)


def never_of(console: Console, condition: Condition) -> str:
    """Why a condition cannot come to hold any more, as its clauses on ranks and steps tell; "" if it may."""
    for word, value in condition.clauses:
        if word in ("rank", "peer") and not any(map(ranges(value), range(console.size))):
            return f"there is no rank {value}: ranks are 0 to {console.size - 1}"
        begun = min((view.step for view in console.stepper.views.values()), default=0)
        if word == "step" and (last := max(high for _, high in limits(value))) < max(begun, 1):
            return f"step {last} is over: ranks are in step {begun}" if last else "steps are counted from 1"
    return ""


def _place(condition: Condition) -> Goal:
    """The first action (or op, where a path is named) of it."""
    kind = "op" if any(word == "path" for word, _ in condition.clauses) else "action"

    def is_there(view: View, event: Event) -> bool:
        return event.kind == kind and event.phase == "begin" and condition.holds(_happening(view, event))

    return is_there


def _happening(view: View, event: Event) -> Happening:
    micro = None if view.action is None else view.action.micro
    return Happening(event, view.number, view.step, micro, lambda: view.site)


def _read(console: Console, name: str, words: str) -> _Asked:
    """`[action|op|message|ACTION] [N] [rank LIST]`."""
    rest = words.split()
    only: Container[int] | None = None
    if "rank" in rest:
        at = rest.index("rank")
        text = "".join(rest[at + 1 :])
        if not RANGES.fullmatch(text):
            raise ConsoleError(f"{name}: rank is followed by a number, numbers (0,2) or a range (4-7)")
        among = ranges(text)
        only = {number for number in range(console.size) if among(number)}
        if not only:
            raise ConsoleError(f"there is no rank {text}: ranks are 0 to {console.size - 1}")
        rest = rest[:at]
    kind, action, count = "", "", 1
    for word in rest:
        if word.rstrip("s") in KINDS and not kind and not action:
            kind = word.rstrip("s")
        elif is_action(word) and not kind and not action:
            action = word
        elif word.isascii() and word.isdigit() and 1 <= int(word) <= MOST_STEPS:
            count = int(word)
        else:
            known = "action, op, message, an action (F, F3@1), nor a number from 1 on"
            raise ConsoleError(f"{name} {words}: {word!r} is neither {known}")
    return _Asked(kind, action, count, only)


def _go(console: Console, goal: Goal | None, only: Container[int] | None, aim: str = "") -> bool:
    if console.over:
        raise ConsoleError("the run is over: ranks can be looked at, and do not go on; quit leaves")
    console.aim = aim
    console.stepper.go(goal, only)
    return True
