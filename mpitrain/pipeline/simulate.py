"""Play a schedule without computing: proves that it can run, and says what it will hold in memory."""

from __future__ import annotations

from collections.abc import Iterable

from mpitrain.errors import ScheduleError
from mpitrain.pipeline.action import Action, Row, Schedule


def check(rows: Schedule) -> list[int]:
    """Prove that every row can run.

    Each micro-batch is loaded, then counted with the others, then goes forward once and backward once; gradients are
    reduced after the last B and the weights are updated once, at the end.

    Returns:
        For each row the peak number of micro-batches in flight (forward done, backward not).

    Raises:
        ScheduleError: naming the row, the action and what must come before it.
    """
    if not rows or not all(rows):
        raise ScheduleError("a schedule needs at least one row, and a row at least one action")
    return [_check_row(stage, row) for stage, row in enumerate(rows)]


def _check_row(stage: int, row: Row) -> int:
    done: set[Action] = set()
    micros: set[int | None] = {action.micro for action in row if action.micro is not None}
    flying = peak = 0
    for place, action in enumerate(row):
        if action in done:
            raise ScheduleError(f"row {stage}: {action} stands twice (again at place {place})")
        if action.stage != stage:
            raise ScheduleError(f"row {stage}: {action} at place {place} belongs to stage {action.stage}")
        for needed in _needs(action, micros):
            if needed not in done:
                raise ScheduleError(f"row {stage}: {action} at place {place} comes before {needed}, which it needs")
        done.add(action)
        flying += {"F": 1, "B": -1}.get(action.kind, 0)
        peak = max(peak, flying)
    if not any(action.kind == "STEP" for action in row):
        raise ScheduleError(f"row {stage}: no STEP, the weights would never change")
    return peak


def _needs(action: Action, micros: set[int | None]) -> Iterable[Action]:
    """What must have happened before `action`."""
    stage = action.stage
    match action.kind:
        case "COUNT":
            return [Action("LOAD", micro, stage) for micro in micros]
        case "F":
            return [Action("LOAD", action.micro, stage), Action("COUNT", None, stage)]
        case "B":
            return [Action("F", action.micro, stage)]
        case "REDUCE":
            return [Action("B", micro, stage) for micro in micros]
        case "STEP":
            return [Action("REDUCE", None, stage)]
        case _:
            return []
