"""Passes: functions from a schedule to a schedule that add what compute order leaves out."""

from __future__ import annotations

from mpitrain.pipeline.action import Action, Schedule


def with_update(rows: Schedule) -> Schedule:
    """Load and count before the first F, reduce and update after the last B.

        LOAD0 LOAD1 COUNT F0 B0 F1 B1 REDUCE STEP

    All micro-batches are loaded first because the loss is a mean over the targets of the *whole* step: their number
    must be known before the first gradient is seeded (see `docs/explanation/loss.md`).
    """
    updated = []
    for stage, row in enumerate(rows):
        micros = sorted({action.micro for action in row if action.kind == "F" and action.micro is not None})
        loads = [Action("LOAD", micro, stage) for micro in micros]
        updated.append(
            [*loads, Action("COUNT", stage=stage), *row, Action("REDUCE", stage=stage), Action("STEP", stage=stage)]
        )
    return updated
