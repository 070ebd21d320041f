"""Where all ranks stand, a line for each place: ranks that stand in the same one share it.

rank     step  action     next, or in                                                 at
> 0,2       1  F0@0       gelu (4, 16, 64)  blocks.0.mlp                              transformer.py:212
  1,3       1  RECV_F0@1  waits for rank 0: recv (4, 16, 32) float32 on pp            stages.py:88
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mpitrain.comm.places import by_place
from mpitrain.debug.console.source import site_of
from mpitrain.debug.console.under_way import axis_of, pending, waiting_for, words
from mpitrain.debug.console.words import runs
from mpitrain.debug.stepper import View
from mpitrain.events import Event

_GAP = 2  # columns between columns
_LEAST = 20  # columns of what is done, however narrow the terminal


class Place(NamedTuple):
    """Where a rank stands.  What it does names no ranks: those that it waits for are apart, so that places compare."""

    step: str
    action: str
    doing: str
    at: str
    waits: bool = False


def place_of(view: View) -> Place:
    """Where one rank stands."""
    step = str(view.step) if view.step else "-"
    if view.rank.left:
        return Place(step, "-", "has ended", "")
    action = view.inside("action")
    name = "-" if action is None else action.name
    wait = view.waits
    if wait is not None:
        return Place(step, name, f"{words(wait)} on {axis_of(wait)}", wait.site, waits=True)
    if view.error is not None:
        how = "has left: sys.exit" if isinstance(view.error, SystemExit) else f"has failed: {type(view.error).__name__}"
        return Place(step, name, how, site_of(view))
    return Place(step, name, doing(view), "" if view.event is None else view.site)


def doing(view: View) -> str:
    """What a rank that does not wait is about to do, is doing, or has just done."""
    event = view.event
    if event is None:
        return "before its first line"
    if not view.stands_before:
        return f"after {said(event)}"
    stands = view.rank.held or view.rank.room.holder is view.rank  # else it only waits for its turn
    if event.kind == "action":
        return "next" if stands else "in it"
    return f"{'next' if stands else 'in'} {said(event)}"


def said(event: Event) -> str:
    """An event in a few words: `gelu (4, 64)  blocks.0.mlp`, `all_reduce (4, 64) float32 on tp`."""
    info = event.info
    if event.kind in ("message", "arrival"):
        array, peer = info["array"], info["peer"]
        way = "" if peer < 0 else f" {'from' if 'recv' in event.name else 'to'} {info['ranks'][peer]}"
        return f"{event.name} {tuple(array.shape)} {array.dtype} on {info['axis']}{way}"
    if event.kind == "op":
        path = info.get("path") or ""
        return f"{event.name} {_shapes(event)}  {path}".rstrip()
    if event.kind == "action":
        return event.name
    return f"{event.kind} {event.name} {info.get('path', '')}".rstrip()


def _shapes(event: Event) -> str:
    """What an op is given, or what it has made."""
    info = event.info
    if event.phase == "end" and "output" in info:
        made = info["output"] if isinstance(info["output"], (tuple, list)) else (info["output"],)
        return "-> " + " ".join(_shape(x) for x in made if hasattr(x, "shape"))
    if event.phase == "end" and "grads" in info:
        return "-> " + " ".join(_shape(x) for x in info["grads"] if hasattr(x, "shape"))
    if "grad" in info:
        given: Any = info["grad"] if isinstance(info["grad"], (tuple, list)) else (info["grad"],)
    else:
        given = info.get("inputs", ())
    return " ".join(_shape(x) for x in given if hasattr(x, "shape"))


def _shape(x: Any) -> str:
    return str(tuple(x.shape))


def table(
    views: Mapping[int, View],
    size: int,
    focus: int,
    width: int = 100,
    every: bool = False,
    mark: Callable[[str], str] = str,
    quiet: Callable[[str], str] = str,
) -> str:
    """Where all ranks stand.

    Args:
        views: of the ranks that have begun.
        size: number of ranks.
        focus: the rank whose line is marked.
        width: of a line.
        every: a line for each rank, also where several stand in one place.
        mark, quiet: what the line of the focus and the heading pass through.
    """
    waiting = waiting_for(views, pending(views.values()))
    found: list[tuple[int, Any]] = []
    for number in range(size):
        view = views.get(number)
        place = Place("-", "-", "has not begun", "") if view is None else place_of(view)
        found.append((number, (place, number if every else -1)))
    places = [
        (runs(ranks), ranks, place, _told(ranks, place, waiting)) for (place, _), ranks in by_place(found).items()
    ]
    names = max(4, *(len(name) for name, _, _, _ in places))
    steps = max(4, *(len(place.step) for _, _, place, _ in places))
    actions = max(6, *(len(place.action) for _, _, place, _ in places))
    sites = max(2, *(len(place.at) for _, _, place, _ in places))
    room = max(_LEAST, width - 2 - names - steps - actions - sites - 4 * _GAP)
    doings = min(room, max(len(text) for _, _, _, text in places))
    gap = " " * _GAP
    head = [f"{'rank':<{names}}", f"{'step':>{steps}}", f"{'action':<{actions}}", f"{'what':<{doings}}", "at"]
    lines = [quiet(f"  {gap.join(head)}")]
    for name, ranks, place, text in places:
        if len(text) > doings:
            text = text.replace(", ", ",")
        shown = text if len(text) <= doings else text[: doings - 3] + "..."
        row = [
            f"{name:<{names}}",
            f"{place.step:>{steps}}",
            f"{place.action:<{actions}}",
            f"{shown:<{doings}}",
            place.at,
        ]
        line = ("> " if focus in ranks else "  ") + gap.join(row).rstrip()
        lines.append(mark(line) if focus in ranks else line)
    return "\n".join(lines)


def _told(ranks: Sequence[int], place: Place, waiting: Mapping[int, Sequence[int]]) -> str:
    return f"{waits_for(ranks, waiting)}: {place.doing}" if place.waits else place.doing


def waits_for(ranks: Sequence[int], waiting: Mapping[int, Sequence[int]]) -> str:
    """For whom ranks in one place wait: `waits for 0`, `wait for 0-3 (one each)`."""
    missing = sorted({other for rank in ranks for other in waiting.get(rank, ())})
    many = "wait" if len(ranks) > 1 else "waits"
    if not missing:
        return many
    each = len(ranks) > 1 and len(missing) > 1 and all(len(waiting[rank]) == 1 for rank in ranks)
    return f"{many} for {runs(missing)}" + (" (one each)" if each else "")
