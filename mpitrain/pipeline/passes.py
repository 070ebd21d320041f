"""Passes: functions from a schedule to a schedule that add what compute order leaves out.

    one_f_one_b    F0 F1 B0 B1                                               (stage 1 of 3, two micro-batches)
    with_messages  RECV_F0 F0 SEND_F0 RECV_F1 F1 SEND_F1 RECV_B0 B0 SEND_B0 RECV_B1 B1 SEND_B1
    with_update    LOAD0 LOAD1 COUNT RECV_F0 F0 ... B1 SEND_B1 REDUCE STEP

`complete` applies them all, and where saved values are offloaded

    with_offload   F0 SEND_F0 EVICT0 ... F1 FETCH0 B1 B0        distance 1: a B or an F comes between FETCH and B

and, of stages whose weights are all frozen, `without_backward` leaves what goes forward.
"""

from __future__ import annotations

from mpitrain.errors import ScheduleError
from mpitrain.pipeline.action import COMPUTE, MOVES, Action, Row, Schedule, placement
from mpitrain.pipeline.schedules import SCHEDULES, compute_rows


def with_messages(rows: Schedule) -> Schedule:
    """Receive right before each F and B, send right after it, where the neighbouring stage is on another rank.

    A send does not wait for W: the next rank needs the gradient of the input alone.

    Raises:
        ScheduleError: a stage is on two ranks or on none.
    """
    place = placement(rows)
    last = len(place) - 1

    def beside(action: Action) -> Row:
        kind, micro, stage, part = action
        below = stage > 0 and place[stage - 1] != place[stage]
        above = stage < last and place[stage + 1] != place[stage]
        comes, goes = (below, above) if kind == "F" else (above, below)
        received = [Action(f"RECV_{kind}", micro, stage, part)] if comes else []
        sent = [Action(f"SEND_{kind}", micro, stage, part)] if goes else []
        return [*received, action, *sent]

    return [
        [done for action in row for done in (beside(action) if action.kind in ("F", "B") else (action,))]
        for row in rows
    ]


def with_update(rows: Schedule) -> Schedule:
    """Load and count before the first F, reduce and update after the last B: the whole row is one step.

        LOAD0 LOAD1 COUNT F0 B0 F1 B1 REDUCE STEP

    All micro-batches are loaded first because the loss is a mean over the targets of the *whole* step: their number
    must be known before the first gradient is seeded (see `docs/explanation/loss.md`).
    """
    place = placement(rows)
    updated = []
    for rank, row in enumerate(rows):
        stage = place.index(rank)
        loads = [Action("LOAD", micro, stage) for micro in _micros(row)]
        updated.append([*loads, Action("COUNT", None, stage), *row, *_update(None, stage)])
    return updated


def with_updates(rows: Schedule, microbatches: int) -> Schedule:
    """Load, count, reduce and update for every batch of a row that goes on over several.

        LOAD0 COUNT0 F0 LOAD1 COUNT1 F1 B0 REDUCE0 STEP0 LOAD2 COUNT2 F2 B1 REDUCE1 STEP1 ...

    A rank loads and counts a batch before its first F of it, and updates after its last B or W of it.

    Args:
        rows: with or without messages.
        microbatches: of one batch; micro-batch j belongs to batch j // microbatches.
    """
    if microbatches < 1:
        raise ScheduleError(f"a batch has at least 1 micro-batch, not {microbatches}")
    place = placement(rows)
    updated = []
    for rank, row in enumerate(rows):
        stage = place.index(rank)
        batches = [action.micro // microbatches for action in row if action.micro is not None]
        last = {batch: at for at, batch in enumerate(batches)}  # the place of the last action of each batch
        micros: dict[int, list[int]] = {}
        for micro in _micros(row):
            micros.setdefault(micro // microbatches, []).append(micro)
        filled: Row = []
        for at, (action, batch) in enumerate(zip(row, batches, strict=True)):
            if batch in micros:
                filled += (Action("LOAD", micro, stage) for micro in micros.pop(batch))
                filled.append(Action("COUNT", batch, stage))
            filled.append(action)
            if last[batch] == at:
                filled += _update(batch, stage)
        updated.append(filled)
    return updated


def with_offload(rows: Schedule, distance: int = 1) -> Schedule:
    """Have what an F saves go to the rank's store while others are at work, and come back in time for its B.

        F0 F1 F2 B2 B1 B0   ->   F0 EVICT0 F1 F2 FETCH0 B2 B1 B0        distance 2

    EVICT stands right after F and what F sends; FETCH so that `distance` of F, B and W come between it and the B.  A
    pass whose B comes so soon that nothing else would stand between the two keeps what it saves.

    Args:
        rows: with or without messages and updates.
        distance: 0 begins to fetch when B is next.

    Raises:
        ScheduleError: a negative distance.
    """
    if distance < 0:
        raise ScheduleError(f"nothing can be fetched {distance} actions before its use: the distance is 0 or more")
    return [_offloaded(row, distance) for row in rows]


def without_backward(rows: Schedule, stages: int) -> Schedule:
    """Have nothing go back into the first stages, whose weights are all frozen, as are those of all before them.

        RECV_F0@1 F0@1 SEND_F0@1 RECV_B0@1 B0@1 SEND_B0@1   ->   RECV_F0@1 F0@1 SEND_F0@1 RECV_B0@1 B0@1      1 of 3

    Args:
        rows: any.
        stages: so many; 0 changes nothing.
    """
    if not stages:
        return rows
    back = ("B", "W", "RECV_B", "SEND_B", *MOVES)

    def stays(action: Action) -> bool:
        return not (action.kind in back and action.stage < stages) and action[::2] != ("SEND_B", stages)

    return [[action for action in row if stays(action)] for row in rows]


def _offloaded(row: Row, distance: int) -> Row:
    work = [action for action in row if action.kind in COMPUTE]
    place = {action: at for at, action in enumerate(work)}
    evicted: set[Action] = set()
    fetched: dict[int, Row] = {}  # after which of the work: what begins to come back
    for action, at in place.items():
        back = place.get(action._replace(kind="B"))
        if action.kind == "F" and back is not None and back - at - 1 > distance:
            evicted.add(action)
            fetched.setdefault(back - distance - 1, []).append(action._replace(kind="FETCH"))
    filled: Row = []
    waiting: Row = []  # until what the last F, B or W sends is sent
    for action in row:
        if not action.kind.startswith("SEND"):
            filled, waiting = filled + waiting, []
        filled.append(action)
        if action in place:
            waiting = fetched.get(place[action], [])
            if action in evicted:
                waiting = [action._replace(kind="EVICT"), *waiting]
    return filled + waiting


def complete(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    slices: int = 1,
    batches: int = 1,
    offload: int | None = None,
) -> Schedule:
    """The rows that the executor runs, of the schedule with a name.

    Args:
        name, ranks, microbatches, chunks, slices, batches: as for `compute_rows`, which says what it raises.
        offload: how many actions ahead what was offloaded is fetched (`with_offload`); None: nothing is.
    """
    rows = with_messages(
        compute_rows(name, ranks=ranks, microbatches=microbatches, chunks=chunks, slices=slices, batches=batches)
    )
    rows = with_update(rows) if SCHEDULES[name].versions is None else with_updates(rows, microbatches)
    return rows if offload is None else with_offload(rows, offload)


def _update(batch: int | None, stage: int) -> Row:
    return [Action("REDUCE", batch, stage), Action("STEP", batch, stage)]


def _micros(row: Row) -> list[int]:
    return sorted({action.micro for action in row if action.kind == "F" and action.micro is not None})
