"""Breakpoints: conditions with numbers, asked at each event of each rank.

      1 keep  3 hits   op gelu.backward rank 2
      2 once  0 hits   parameter blocks.0.mlp.* norm > 1e3

A condition on values stops after the work, when they are there; any other before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mpitrain.debug.console.clauses import Happening, norm, of_parameter, values
from mpitrain.debug.console.conditions import Condition
from mpitrain.debug.stepper import View
from mpitrain.errors import ConsoleError
from mpitrain.events import Event
from mpitrain.pipeline.finding import FINITE, Range, verdict

MOST = 1000  # breakpoints of a session
_KINDS = ("action", "op", "message", "arrival")


@dataclass
class Breakpoint:
    """One of them.

    temporary: it goes when it is hit.  loose: the same with its parameter's name as the end of one, until all names
    are known.  last: by rank, where it was at the last event, for a condition that is a place.
    """

    number: int
    condition: Condition
    temporary: bool = False
    enabled: bool = True
    hits: int = 0
    loose: Condition | None = None
    last: dict[int, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        state = "off" if not self.enabled else "once" if self.temporary else "keep"
        hits = f"{self.hits} hit{'' if self.hits == 1 else 's'}"
        return f"{self.number:>3} {state:<4}  {hits:<7}  {self.condition}"

    def is_hit(self, happening: Happening) -> bool:
        """Whether an event is what it waits for; to be asked at all events."""
        if not self.condition.is_a_place:
            return self.condition.holds(happening) or (self.loose is not None and self.loose.holds(happening))
        return self._comes_there(happening)

    def _comes_there(self, happening: Happening) -> bool:
        """A place holds once when a rank enters it; where only ranks are named, at each action."""
        words = {word for word, _ in self.condition.clauses}
        event = happening.event
        if event.phase != "begin" or event.kind not in (("op", "message") if "path" in words else ("action",)):
            return False
        here: tuple[Any, ...] | None = None
        if self.condition.holds(happening):
            here = (happening.step if "step" in words else 0, happening.micro if "micro" in words else 0)
            if words == {"rank"}:
                here = None  # every time anew
                self.last[happening.rank] = None
                return True
        before, self.last[happening.rank] = self.last.get(happening.rank), here
        return here is not None and here != before


class Breakpoints:
    """All of a session; `halt` is a `Stepper`'s to ask.

    Args:
        trouble: what the rules of states have to object on a rank; "" if nothing.
    """

    def __init__(self, trouble: Callable[[int], str] = lambda rank: "") -> None:
        self._trouble = trouble
        self._points: dict[int, Breakpoint] = {}
        self._count = 0
        self._objected: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._points)

    def __iter__(self) -> Iterator[Breakpoint]:
        return iter(self._points.values())

    def add(self, condition: Condition, temporary: bool = False) -> Breakpoint:
        """A new one.

        Raises:
            ConsoleError: there are too many.
        """
        if len(self._points) >= MOST:
            raise ConsoleError(f"there are {MOST} breakpoints already; delete removes them")
        self._count += 1
        point = self._points[self._count] = Breakpoint(self._count, condition, temporary)
        return point

    def chosen(self, text: str) -> list[Breakpoint]:
        """Those that numbers name; all if there are none.

        Raises:
            ConsoleError: one of them is not there.
        """
        chosen = []
        for word in text.replace(",", " ").split():
            point = self._points.get(int(word)) if word.isascii() and word.isdigit() and len(word) < 10 else None
            if point is None:
                there = " ".join(map(str, self._points)) or "none"
                raise ConsoleError(f"there is no breakpoint {word[:20]}; there: {there}")
            chosen.append(point)
        return chosen or list(self._points.values())

    def delete(self, point: Breakpoint) -> None:
        """Remove one."""
        del self._points[point.number]

    @property
    def hear_ops(self) -> bool:
        """Whether one of them can only be hit at an op."""
        return any(point.enabled and point.condition.hears_ops for point in self._points.values())

    def halt(self, view: View, event: Event) -> str:
        """Why to stop at an event, or "": the first breakpoint that is hit; all of them count."""
        if not self._points or event.kind not in _KINDS:
            return ""
        micro = None if view.action is None else view.action.micro
        trouble = self._trouble(view.number)
        is_new = bool(trouble) and trouble != self._objected.get(view.number)
        self._objected[view.number] = trouble
        happening = Happening(event, view.number, view.step, micro, lambda: view.site, is_new)
        hit = [point for point in self._points.values() if point.enabled and point.is_hit(happening)]
        for point in hit:
            point.hits += 1
            if point.temporary:
                self.delete(point)
        if not hit:
            return ""
        numbers = " and ".join(str(point.number) for point in hit)
        text = f"breakpoint {numbers}: {hit[0].condition}"
        return text + _seen(event, hit[0].condition)


def _seen(event: Event, condition: Condition) -> str:
    """What a condition on values has found."""
    if not condition.is_about_values:
        return ""
    parameter = next((value for word, value in condition.clauses if word == "parameter"), None)
    arrays = list(values(event, parameter))
    if not arrays:
        return ""
    what = f"{event.name} made"
    if parameter is not None:
        names = " ".join(leaf.name for leaf, _ in of_parameter(event, parameter))
        what = f"{names}, part of its gradient:" if "grad" in event.info else f"{names}:"
    worst = max(arrays, key=verdict)
    if verdict(worst) != FINITE:
        return f"\n  {what} {Range.of(worst)}"
    worst = max(arrays, key=norm)
    return f"\n  {what} {Range.of(worst)}, norm {norm(worst):.4g}"
