"""The step is data: what a rank does in one step is a list of actions.

An action prints as `F3@1` (forward of micro-batch 3 on stage 1) and parses back, so a schedule can be printed, drawn,
compared, stepped through, and written by hand.

    LOAD3@0   bring micro-batch 3 to the stage          REDUCE@0  sum gradients over the ranks that share a weight
    COUNT@0   count the step's targets over all ranks   STEP@0    norm, clipping, optimizer
    F3@0      forward                                   B3@0      backward
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mpitrain.errors import ScheduleError

PER_MICRO = ("LOAD", "F", "B")
PER_STEP = ("COUNT", "REDUCE", "STEP")

_PATTERN = re.compile(r"([A-Z_]+?)(\d*)@(\d+)")


class Action(NamedTuple):
    """One thing to do: its kind, the micro-batch (None for what happens once a step), the stage."""

    kind: str
    micro: int | None = None
    stage: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{'' if self.micro is None else self.micro}@{self.stage}"


Row = list[Action]
"""What one rank does in a step, in order."""

Schedule = list[Row]
"""One row for each rank of the pipeline."""


def parse(text: str) -> Action:
    """The action that prints as `text`.

    Raises:
        ScheduleError: not an action, or a micro-batch number where there is none to give, or none where one is needed.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None or match[1] not in PER_MICRO + PER_STEP:
        kinds = " ".join((*PER_MICRO, *PER_STEP))
        raise ScheduleError(f"{text.strip()!r} is not an action; actions read KIND, micro-batch, @stage with {kinds}")
    if (match[1] in PER_MICRO) != bool(match[2]):
        raise ScheduleError(f"{text.strip()!r}: {' '.join(PER_MICRO)} name a micro-batch, the other kinds do not")
    return Action(match[1], int(match[2]) if match[2] else None, int(match[3]))


def parse_row(text: str) -> Row:
    """A row from its printed form, actions parted by white space."""
    return [parse(word) for word in text.split()]


def row_text(row: Row) -> str:
    """A row on one line."""
    return " ".join(map(str, row))
