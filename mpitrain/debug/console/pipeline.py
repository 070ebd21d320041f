"""The step as a picture, with a cursor where each rank stands: `pipeline`.

    time    0           5           10
    rank 0| F0 F1 F2  . >B0--- F3 B1---
    rank 2|  . F0 B0---  F1>B1--- F2

    rank 0 before B0@0; rank 2 in RECV_F1@1, which waits for rank 0

The table is the simulator's, in which F, B and W take one unit each; what a rank has done stands left of its cursor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpitrain.debug.console.under_way import pending, waiting_for
from mpitrain.debug.console.words import named
from mpitrain.debug.stepper import View
from mpitrain.errors import ConsoleError
from mpitrain.pipeline import render
from mpitrain.pipeline.action import COMPUTE, Action, Row
from mpitrain.pipeline.simulate import simulate


def place_in_row(view: View) -> tuple[Row, int, bool]:
    """The row of a rank, the place of its next action in it, and whether it is in that already."""
    if view.executor is None or view.action is None:
        raise ConsoleError(f"rank {view.number} has begun no step yet; `next action` goes to its first action")
    row: Row = view.executor.row
    if view.action not in row:
        return row, 0, False
    place = row.index(view.action)
    if view.inside("action") is not None:
        return row, place, True
    return row, place + 1, False


def cursor(row: Row, place: int) -> Action | None:
    """The action in the picture before which a rank's cursor stands; None behind all of them."""
    return next((action for action in row[place:] if action.kind in COMPUTE), None)


def picture(views: Mapping[int, View], focus: int, width: int = 100, every: bool = False) -> str:
    """The pipeline of the focus, or all of them, each with its cursors.

    Raises:
        ConsoleError: a rank of it has begun no step.
    """
    view = views.get(focus)
    if view is None or view.executor is None:
        raise ConsoleError(f"rank {focus} has begun no step yet; `next action` goes to its first action")
    pipelines = [tuple(view.executor.mesh.pp.ranks)]
    if every:
        known = [v for v in views.values() if v.executor is not None]
        pipelines = list(dict.fromkeys(tuple(v.executor.mesh.pp.ranks) for v in known))
    waiting = waiting_for(views, pending(views.values()))
    parts = []
    for ranks in pipelines:
        missing = [rank for rank in ranks if rank not in views or views[rank].executor is None]
        if missing:
            raise ConsoleError(f"{named(missing)} of this pipeline: no step has begun there yet")
        parts.append(_one([views[rank] for rank in ranks], waiting, width))
    return "\n\n".join(parts)


def _one(views: Sequence[View], waiting: Mapping[int, Sequence[int]], width: int) -> str:
    places = [place_in_row(view) for view in views]
    executor = views[0].executor
    timeline = simulate(
        [row for row, _, _ in places], trains_from=0 if executor is None else executor.model.trains_from
    )
    text = render.text(
        timeline,
        width,
        heads=[f"rank {view.number}" for view in views],
        cursors=[cursor(row, place) for row, place, _ in places],
    )
    steps = {view.step for view in views}
    head = f"step {'-'.join(map(str, sorted(steps)))}\n"
    told = [_told(view, *place, waiting) for view, place in zip(views, places, strict=True)]
    return head + text + "\n\n" + "\n".join(_folded(told, width))


def _told(view: View, row: Row, place: int, inside: bool, waiting: Mapping[int, Sequence[int]]) -> str:
    if view.rank.left:
        return f"rank {view.number} has ended"
    if place >= len(row):
        return f"rank {view.number} is behind its row"
    begun = inside and view.event is not None and view.event.kind == "action" and view.event.phase == "begin"
    missing = waiting.get(view.number)
    rest = "" if missing is None else f", which waits for {named(missing)}" if missing else ", which waits"
    how = "before" if begun or not inside else "in"
    return f"rank {view.number} {how} {row[place]}{rest}"


def _folded(texts: Sequence[str], width: int) -> list[str]:
    """Joined by semicolons, in lines of that width."""
    lines: list[str] = []
    for text in texts:
        if lines and len(lines[-1]) + 2 + len(text) <= width:
            lines[-1] += f"; {text}"
        else:
            lines.append(text)
    return lines
