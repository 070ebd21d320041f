"""Proves, without computing anything, that a schedule can run: in milliseconds, before every run.

Three questions, each asked of all rows before the next:

    What is there?   every stage is on one rank; every micro-batch goes forward once and backward once on each; every
                     message has both its ends; every batch is loaded, counted, reduced and updated once on each rank
    In which order?  in each row what an action needs comes before it
    Does it end?     ranks work in order, sends complete at once, receives wait for their send

A schedule that would hang only if sends waited for their receive is not refused, since ours do not; `Checked` says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mpitrain.errors import ScheduleError
from mpitrain.pipeline.action import MESSAGES, MOVES, PER_MICRO, PER_STEP, PER_UNIT, Action, Row, Schedule, placement

Key = tuple[str, int | None, int, int | None]
"""An action as a plain tuple: equal to it, and made in a tenth of the time."""


@dataclass(frozen=True)
class Checked:
    """What is known of a schedule that can run.

    placement: rank by stage; peaks: for each rank the largest number of forward passes whose backward is not yet done,
    counted over its stages and slices; blocking_hang: where ranks would wait for ever if sends returned only once their
    receiver has come to the receive, None if they would not; here: as `peaks`, without passes between EVICT and FETCH.
    """

    placement: tuple[int, ...]
    peaks: tuple[int, ...]
    blocking_hang: str | None
    here: tuple[int, ...]


def check(rows: Schedule, trains_from: int = 0) -> Checked:
    """Prove that rows can run, with messages and updates in them.

    Args:
        rows: of all ranks.
        trains_from: the first stage that goes backward; those before it are frozen (`passes.without_backward`).

    A row of several batches numbers its COUNT, REDUCE and STEP, and batch k has the k-th share of the micro-batches.

    Raises:
        ScheduleError: naming the row, the action and what is missing or in the way, or where all ranks would wait.

    Cost: about 2 us an action.
    """
    place = placement(rows)
    work = _Work(rows, place, trains_from)
    found = [_index(rank, row) for rank, row in enumerate(rows)]
    for rank, at in enumerate(found):
        _check_contents(rank, at, work)
    for rank, (row, at) in enumerate(zip(rows, found, strict=True)):
        _check_order(rank, row, at, work)
    messages = [[action for action in row if action.kind in MESSAGES] for row in rows]
    if (text := _play(messages)) is not None:
        raise ScheduleError(text)
    peaks, here = (tuple(peak_in_flight(row, inside, trains_from) for row in rows) for inside in (False, True))
    return Checked(tuple(place), peaks, _play(messages, synchronous=True), here)


def peak_in_flight(row: Row, here: bool = False, trains_from: int = 0) -> int:
    """The largest number of forward passes of a row whose backward is not yet done.

    Args:
        row: of a rank.
        here: leave out those whose values are offloaded just then.
        trains_from: the first stage that goes backward; what comes before it keeps nothing.
    """
    more, fewer = (("F", "FETCH"), ("B", "EVICT")) if here else (("F",), ("B",))
    flying = peak = 0
    for action in row:
        if action.stage < trains_from:
            continue
        if action.kind in more:
            flying += 1
            peak = max(peak, flying)
        elif action.kind in fewer:
            flying -= 1
    return peak


class _Work:
    """What a schedule is about: stages, micro-batches, slices, batches."""

    def __init__(self, rows: Schedule, place: list[int], trains_from: int) -> None:
        self.place = place
        self.trains_from = trains_from
        self.last_stage = len(place) - 1
        self.split = {action.stage for row in rows for action in row if action.kind == "W"}
        self.moved = {action[1:] for row in rows for action in row if action.kind in MOVES}
        self.units, self.num_parts = _units(rows)
        self.num_micros = len(self.num_parts)
        self.batches = _batches(rows, self.num_micros)
        self.batch_size = self.num_micros // len(self.batches)
        self.first_stages = [place.index(rank) for rank in range(len(rows))]

    def batch(self, micro: int | None) -> int | None:
        """The batch of a micro-batch, as its COUNT, REDUCE and STEP name it."""
        assert micro is not None
        return self.batches[micro // self.batch_size]

    def elsewhere(self, stage: int, neighbour: int) -> bool:
        """Whether there is a neighbouring stage, and it is on another rank."""
        return 0 <= neighbour <= self.last_stage and self.place[neighbour] != self.place[stage]

    def expected(self, rank: int) -> Iterator[Key]:
        """Every action that the row of a rank must have."""
        first = self.first_stages[rank]
        for micro in range(self.num_micros):
            yield "LOAD", micro, first, None
        for stage, on in enumerate(self.place):
            if on != rank:
                continue
            trains = stage >= self.trains_from
            kinds = ["F", "B"] if trains else ["F"]
            if stage in self.split:
                kinds.append("W")
            if self.elsewhere(stage, stage - 1):
                kinds += ["RECV_F", "SEND_B"] if stage > self.trains_from else ["RECV_F"]
            if self.elsewhere(stage, stage + 1):
                kinds += ["SEND_F", "RECV_B"] if trains else ["SEND_F"]
            for kind in kinds:
                for micro, part in self.units:
                    yield kind, micro, stage, part
            for kind in MOVES:  # of a pass both or none
                for micro, part in self.units:
                    if (micro, stage, part) in self.moved:
                        yield kind, micro, stage, part
        for kind in PER_STEP:
            for batch in self.batches:
                yield kind, batch, first, None

    def needs(self, action: Action) -> list[Key]:
        """What must come before an action in its row; a REDUCE needs more, see `_check_order`."""
        kind, micro, stage, part = action
        match kind:
            case "F":
                first = self.first_stages[self.place[stage]]
                needed: list[Key] = [("LOAD", micro, first, None), ("COUNT", self.batch(micro), first, None)]
                if stage > 0:
                    below = self.place[stage - 1] == self.place[stage]
                    needed.append(("F", micro, stage - 1, part) if below else ("RECV_F", micro, stage, part))
                if part:
                    needed.append(("F", micro, stage, part - 1))
                return needed
            case "B":
                needed = [("F", micro, stage, part)]
                if stage < self.last_stage:
                    above = self.place[stage + 1] == self.place[stage]
                    needed.append(("B", micro, stage + 1, part) if above else ("RECV_B", micro, stage, part))
                if part is not None and part + 1 < self.num_parts[micro or 0]:
                    needed.append(("B", micro, stage, part + 1))
                if (micro, stage, part) in self.moved:
                    needed.append(("FETCH", micro, stage, part))
                return needed if stage in self.split else needed + self.update_before(action)
            case "W":
                return [("B", micro, stage, part), *self.update_before(action)]
            case "SEND_F" | "EVICT":
                return [("F", micro, stage, part)]
            case "FETCH":
                return [("EVICT", micro, stage, part)]
            case "SEND_B":
                return [("B", micro, stage, part)]
            case "COUNT":
                batch = micro or 0
                micros = range(batch * self.batch_size, (batch + 1) * self.batch_size)
                return [("LOAD", micro, stage, None) for micro in micros]
            case "STEP":
                return [("REDUCE", micro, stage, None)]
        return []

    def update_before(self, action: Action) -> list[Key]:
        """The STEP that must have used the sums of gradients before an action adds to them."""
        batch = (action.micro or 0) // self.batch_size
        first = self.first_stages[self.place[action.stage]]
        return [("STEP", self.batches[batch - 1], first, None)] if batch else []


def _units(rows: Schedule) -> tuple[list[tuple[int, int | None]], list[int]]:
    """All (micro-batch, slice), and by micro-batch the number of its slices."""
    found: dict[int, set[int | None]] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if action.kind == "F":
                if action.micro is None:
                    raise ScheduleError(f"row {rank}: {action} names no micro-batch")
                found.setdefault(action.micro, set()).add(action.part)
    units: list[tuple[int, int | None]] = []
    num_parts = []
    for micro in range(len(found)):
        if micro not in found:
            raise ScheduleError(f"micro-batch {micro} has no F, but micro-batch {max(found)} has; they count from 0")
        parts = found[micro]
        if None in parts and len(parts) > 1:
            raise ScheduleError(f"micro-batch {micro} goes forward whole in one place and in slices in another")
        if None not in parts and parts != set(range(len(parts))):
            missing = next(part for part in range(len(parts)) if part not in parts)
            raise ScheduleError(f"micro-batch {micro} has no F of slice {missing}, but of a later one")
        units += [(micro, None)] if None in parts else [(micro, part) for part in range(len(parts))]
        num_parts.append(len(parts))
    return units, num_parts


def _batches(rows: Schedule, num_micros: int) -> list[int | None]:
    """The batches as COUNT, REDUCE and STEP name them: [None] where there is one without a number."""
    numbers = {action.micro for row in rows for action in row if action.kind in PER_STEP}
    if not numbers - {None}:
        return [None]
    if None in numbers:
        raise ScheduleError("COUNT, REDUCE and STEP name their batch in one place and not in another")
    for number in range(len(numbers)):
        if number not in numbers:
            raise ScheduleError(f"there is no COUNT, REDUCE or STEP of batch {number}, but of a later one")
    if num_micros % len(numbers):
        raise ScheduleError(f"{num_micros} micro-batches do not divide into {len(numbers)} batches")
    return list(range(len(numbers)))


def _index(rank: int, row: Row) -> dict[Key, int]:
    """The place of each action of a row."""
    at: dict[Key, int] = {}
    for place, action in enumerate(row):
        if at.setdefault(action, place) != place:
            raise ScheduleError(f"row {rank}: {action} stands twice, at places {at[action]} and {place}")
    return at


def _check_contents(rank: int, at: dict[Key, int], work: _Work) -> None:
    expected = dict.fromkeys(work.expected(rank))
    if at.keys() == expected.keys():
        return
    for key, place in at.items():
        if key not in expected:
            raise ScheduleError(f"row {rank}: {Action(*key)} at place {place} {_why_not(rank, Action(*key), work)}")
    missing = next(Action(*key) for key in expected if key not in at)
    raise ScheduleError(f"row {rank}: {missing} is missing{_why(missing, work)}")


def _why_not(rank: int, action: Action, work: _Work) -> str:
    """Why an action does not belong in a row."""
    kind, micro, stage, part = action
    if kind not in PER_MICRO + PER_STEP:
        return "is no kind of action"
    if kind in ("B", "W", "SEND_B", "RECV_B", *MOVES) and stage <= work.trains_from > 0:
        return f"goes back where all weights are frozen, before stage {work.trains_from}"
    if not 0 <= stage <= work.last_stage or work.place[stage] != rank:
        return f"belongs to stage {stage}, which has no F in this row"
    if kind not in PER_UNIT:
        if stage != work.first_stages[rank]:
            return f"concerns the rank and must name the first of its stages, @{work.first_stages[rank]}"
        return "is of a micro-batch that no stage has an F of" if part is None else "is not done slice by slice"
    if (micro, part) not in work.units:
        return "is of a micro-batch or slice that no stage has an F of"
    other = _neighbour(action)
    if not 0 <= other <= work.last_stage:
        return f"has no other end: stage {stage} is the {'first' if other < 0 else 'last'}"
    return f"would be a message of a rank to itself: stages {stage} and {other} are both on rank {rank}"


def _why(missing: Action, work: _Work) -> str:
    """Why a row must have an action."""
    kind, micro, stage, _ = missing
    if kind in MESSAGES:
        other = _neighbour(missing)
        return f": stage {stage} is on rank {work.place[stage]}, stage {other} on rank {work.place[other]}"
    if kind == "W":
        return f": for other micro-batches stage {stage} has a W"
    if kind == "F":
        return f": micro-batch {micro} has an F on another stage"
    if kind in MOVES:
        return (
            f": what leaves must return, and {'FETCH' if kind == 'EVICT' else 'EVICT'}{micro}@{missing.stage} is here"
        )
    return ""


def _neighbour(message: Action) -> int:
    """The stage at the other end of a message."""
    return message.stage + (1 if message.kind in ("SEND_F", "RECV_B") else -1)


def _check_order(rank: int, row: Row, at: dict[Key, int], work: _Work) -> None:
    ends: dict[int | None, int] = {}  # batch: the place of the last F, B, W or message of it
    for place, action in enumerate(row):
        for key in work.needs(action):
            if at[key] > place:
                raise _too_early(rank, action, place, Action(*key))
        if action.kind not in PER_STEP:
            ends[work.batch(action.micro)] = place
    for batch, place in ends.items():
        reduce = Action("REDUCE", batch, work.first_stages[rank])
        if at[reduce] < place:
            raise _too_early(rank, reduce, at[reduce], row[place])


def _too_early(rank: int, action: Action, place: int, needed: Action) -> ScheduleError:
    return ScheduleError(f"row {rank}: {action} at place {place} comes before {needed}, which it needs")


def sent_by(action: Action) -> Key:
    """The send that a RECV_F or RECV_B waits for."""
    kind, micro, stage, part = action
    return ("SEND_F", micro, stage - 1, part) if kind == "RECV_F" else ("SEND_B", micro, stage + 1, part)


def _play(messages: list[Row], synchronous: bool = False) -> str | None:
    """Let every rank do its messages in order, and say where they stand if they do not come to an end.

    A receive waits for its send.  Sends complete at once, or if `synchronous` only when their receive waits.
    """
    place = [0] * len(messages)
    met: dict[Key, int] = {}  # message: the rank that came to it first
    ready = list(range(len(messages)))
    while ready:
        rank = ready.pop()
        row = messages[rank]
        while place[rank] < len(row):
            action = row[place[rank]]
            sends = action.kind.startswith("SEND")
            key = action if sends else sent_by(action)
            other = met.pop(key, None)
            if other is None:
                met[key] = rank
                if synchronous or not sends:
                    break  # until the other rank comes
            elif synchronous or sends:
                place[other] += 1
                ready.append(other)
            place[rank] += 1
    stuck = [f"rank {rank} at {row[place[rank]]}" for rank, row in enumerate(messages) if place[rank] < len(row)]
    return f"deadlock: {'; '.join(stuck)}" if stuck else None
