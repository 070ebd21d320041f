"""The step is data: what a rank does in one step is a list of actions.

An action prints as `F3@1` (forward of micro-batch 3 on stage 1) and parses back, so a schedule can be printed, drawn,
compared, stepped through, and written by hand.

    LOAD3@0    bring micro-batch 3 to the rank           COUNT@0   count the step's targets over all ranks
    RECV_F3@1  its input comes from stage 0              REDUCE@0  sum gradients over the ranks that share a weight
    F3@1       forward                                   STEP@0    norm, clipping, optimizer
    SEND_F3@1  what F3@1 made goes to stage 2
    RECV_B3@1  the gradient of that comes from stage 2
    B3@1       backward: of the input alone if W3@1 follows, else of the weights too
    SEND_B3@1  the gradient of the input goes to stage 0
    W3@1       backward of the weights
    EVICT3@1   what F3@1 has saved, and is still here, goes to the rank's store
    FETCH3@1   what B3@1 uses of it first begins to come back

`F3.1@1` is slice 1 of micro-batch 3, where sequences are cut too.  `STEP2@0` is the update by batch 2, in a row of
several batches.  LOAD, COUNT, REDUCE and STEP concern a rank, not a stage: they name the first of its stages.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mpitrain.errors import ScheduleError

COMPUTE = ("F", "B", "W")
MESSAGES = ("RECV_F", "SEND_F", "RECV_B", "SEND_B")
MOVES = ("EVICT", "FETCH")
PER_UNIT = (*COMPUTE, *MESSAGES, *MOVES)
"""Once for each micro-batch (or slice of it) and stage."""
PER_MICRO = ("LOAD", *PER_UNIT)
PER_STEP = ("COUNT", "REDUCE", "STEP")

LONGEST_SHOWN = 60
"""Characters of a word that is no action, in the error that names it."""

_PATTERN = re.compile(r"([A-Z_]+)([0-9]{1,9})?(?:\.([0-9]{1,9}))?@([0-9]{1,9})")


class Action(NamedTuple):
    """One thing to do.

    kind: one of `PER_MICRO` or `PER_STEP`; micro: the micro-batch, or for what happens once a step the batch, None in
    a row of one batch; stage: number in the whole pipeline, counted from the input; part: slice of the sequences, None
    where they are whole.
    """

    kind: str
    micro: int | None = None
    stage: int = 0
    part: int | None = None

    def __str__(self) -> str:
        micro = "" if self.micro is None else self.micro
        part = "" if self.part is None else f".{self.part}"
        return f"{self.kind}{micro}{part}@{self.stage}"


Row = list[Action]
"""What one rank does in a step, in order."""

Schedule = list[Row]
"""One row for each rank of the pipeline."""


def parse(text: str) -> Action:
    """The action that prints as `text`.

    Raises:
        ScheduleError: not an action; a micro-batch or slice where there is none to give, or none where it is needed.
    """
    word = text.strip()
    match = _PATTERN.fullmatch(word)
    if match is None or match[1] not in PER_MICRO + PER_STEP:
        kinds = " ".join((*PER_MICRO, *PER_STEP))
        shown = word if len(word) <= LONGEST_SHOWN else f"{word[:LONGEST_SHOWN]}..."  # a file may be one long word
        raise ScheduleError(f"{shown!r} is not an action; actions read KIND, micro-batch, @stage with {kinds}")
    kind, micro, part, stage = match.groups()
    if kind in PER_MICRO and micro is None:
        raise ScheduleError(f"{word!r}: {kind} names a micro-batch, as in {kind}0@{stage}")
    if part is not None and kind not in PER_UNIT:
        raise ScheduleError(f"{word!r}: {kind} is not done slice by slice; only {' '.join(PER_UNIT)} name one")
    return Action(kind, None if micro is None else int(micro), int(stage), None if part is None else int(part))


def parse_row(text: str) -> Row:
    """A row from its printed form, actions parted by white space."""
    return [parse(word) for word in text.split()]


def row_text(row: Row) -> str:
    """A row on one line."""
    return " ".join(map(str, row))


def placement(rows: Schedule) -> list[int]:
    """Which rank has which stage, read off the F's: rank by stage.

    Raises:
        ScheduleError: a stage is on two ranks or on none, or a rank has no stage.
    """
    if not rows:
        raise ScheduleError("a schedule needs at least one row")
    ranks: dict[int, int] = {}
    for rank, row in enumerate(rows):
        stages = {action.stage for action in row if action.kind == "F"}
        if not stages:
            raise ScheduleError(f"row {rank} has no F: every rank needs a stage")
        for stage in sorted(stages):
            if stage in ranks:
                raise ScheduleError(f"stage {stage} is on ranks {ranks[stage]} and {rank}; a stage is on one rank")
            ranks[stage] = rank
    for stage in range(len(ranks)):
        if stage not in ranks:
            raise ScheduleError(f"no row has an F of stage {stage}, but one has of stage {max(ranks)}")
    return [ranks[stage] for stage in range(len(ranks))]
