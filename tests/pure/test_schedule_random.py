"""The checker's verdicts against a machine that runs schedules with real values (`schedule_machine`).

Random schedules, right ones and ones broken by hand-slips: both must agree on every one, on where ranks wait for ever,
and on whether they would if sends were synchronous.

    python -m pytest tests/pure/test_schedule_random.py -m "slow or not slow"      10,000 of them
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from schedule_machine import verdict

from mpitrain.errors import ScheduleError
from mpitrain.pipeline.action import Action, Row, Schedule, row_text
from mpitrain.pipeline.check import check
from mpitrain.pipeline.passes import complete
from mpitrain.pipeline.schedules import SCHEDULES

Unit = tuple[int, int | None]
KINDS = ("right", "hangs with synchronous sends", "deadlock", "wrong")


# ------------------------------------------------------------------------------------------------------ right schedules


def a_schedule(rng: random.Random) -> Schedule:
    """A right schedule: one with a name, or any order that some ranks could work in."""
    return named(rng) if rng.random() < 0.4 else any_order(rng)


def named(rng: random.Random) -> Schedule:
    while True:
        name = rng.choice(list(SCHEDULES))
        kind = SCHEDULES[name]
        try:
            return complete(
                name,
                ranks=rng.randint(1, 4),
                microbatches=rng.randint(1, 4),
                chunks=rng.randint(1, 3) if kind.chunked else 1,
                slices=rng.randint(1, 3) if kind.sliced else 1,
                batches=rng.randint(1, 3) if kind.versions else 1,
            )
        except ScheduleError:
            continue  # interleaved and 2bw refuse some sizes


def any_order(rng: random.Random) -> Schedule:
    """Stages on any ranks, W's on some stages, slices of some micro-batches; ranks work in any possible order."""
    num_ranks = rng.randint(1, 4)
    place = [*range(num_ranks), *(rng.randrange(num_ranks) for _ in range(rng.randint(0, 2)))]
    rng.shuffle(place)
    num_batches, size = rng.choice([(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1)])
    sliced = rng.random() < 0.3
    parts = [rng.randint(1, 3) if sliced else None for _ in range(num_batches * size)]
    units: list[Unit] = [(m, i) for m, n in enumerate(parts) for i in ([None] if n is None else range(n))]
    split = {stage for stage in range(len(place)) if rng.random() < 0.25}
    numbered = num_batches > 1 or rng.random() < 0.2
    order = _Order(place, units, parts, split, size, numbered, rng)
    while actions := order.possible():
        order.do(rng.choice(actions))
    return order.rows


class _Order:
    """Rows that grow by one possible action after the other."""

    def __init__(
        self,
        place: list[int],
        units: list[Unit],
        parts: list[int | None],
        split: set[int],
        size: int,
        numbered: bool,
        rng: random.Random,
    ) -> None:
        self.place, self.units, self.parts, self.split, self.size = place, units, parts, split, size
        self.numbered, self.rng = numbered, rng
        self.rows: Schedule = [[] for _ in range(1 + max(place))]
        self.first = [place.index(rank) for rank in range(len(self.rows))]
        self.done: set[Action] = set()
        self.updates = [0] * len(self.rows)

    def possible(self) -> list[Action]:
        return [
            action
            for stage in range(len(self.place))
            for micro, part in self.units
            for kind in ("FBW" if stage in self.split else "FB")
            if (action := Action(kind, micro, stage, part)) not in self.done and self._can(action)
        ]

    def _can(self, action: Action) -> bool:
        kind, micro, stage, part = action
        after = [] if part is None else range(part + 1, self.parts[micro])
        adds = kind == "W" or (kind == "B" and stage not in self.split)
        if adds and self.updates[self.place[stage]] < micro // self.size:
            return False
        if kind == "W":
            return Action("B", micro, stage, part) in self.done
        if kind == "F":
            needed = [Action("F", micro, stage, i) for i in range(part or 0)]
            needed += [Action("F", micro, stage - 1, part)] if stage else []
        else:
            needed = [Action("F", micro, stage, part), *(Action("B", micro, stage, i) for i in after)]
            needed += [Action("B", micro, stage + 1, part)] if stage + 1 < len(self.place) else []
        return self.done.issuperset(needed)

    def do(self, action: Action) -> None:
        kind, micro, stage, part = action
        rank = self.place[stage]
        row, first = self.rows[rank], self.first[rank]
        batch = micro // self.size
        number = batch if self.numbered else None
        if kind == "F" and (count := Action("COUNT", number, first)) not in row:
            for other in range(batch * self.size, (batch + 1) * self.size):
                if (load := Action("LOAD", other, first)) not in row:
                    row.append(load)
            row.append(count)
        for other in range(micro + 1, len(self.parts)):
            if self.numbered and self.rng.random() < 0.02 and (load := Action("LOAD", other, first)) not in row:
                if other // self.size > batch:
                    row.append(load)
                break
        before, after = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
        if kind != "W" and self._elsewhere(before, rank):
            row.append(Action(f"RECV_{kind}", micro, stage, part))
        row.append(action)
        if kind != "W" and self._elsewhere(after, rank):
            row.append(Action(f"SEND_{kind}", micro, stage, part))
        self.done.add(action)
        if self._is_over(rank, batch):
            row += Action("REDUCE", number, first), Action("STEP", number, first)
            self.updates[rank] += 1

    def _elsewhere(self, stage: int, rank: int) -> bool:
        return 0 <= stage < len(self.place) and self.place[stage] != rank

    def _is_over(self, rank: int, batch: int) -> bool:
        return all(
            Action(kind, micro, stage, part) in self.done
            for stage, on in enumerate(self.place)
            if on == rank
            for micro, part in self.units
            if micro // self.size == batch
            for kind in ("FBW" if stage in self.split else "FB")
        )


# ---------------------------------------------------------------------------------------------------------------- slips


def swap(rows: Schedule, rng: random.Random) -> None:
    row = rng.choice(rows)
    i, j = rng.randrange(len(row)), rng.randrange(len(row))
    row[i], row[j] = row[j], row[i]


def swap_neighbours(rows: Schedule, rng: random.Random) -> None:
    row = rng.choice(rows)
    i = rng.randrange(len(row))
    row[i - 1 : i + 1] = reversed(row[i - 1 : i + 1])


def swap_micro_batches(rows: Schedule, rng: random.Random) -> None:
    """Two actions of one kind and stage change places: everything is there, in another order."""
    row = rng.choice(rows)
    kind, _, stage, _ = rng.choice(row)
    like = [i for i, action in enumerate(row) if action.kind == kind and action.stage == stage]
    i, j = rng.choice(like), rng.choice(like)
    row[i], row[j] = row[j], row[i]


def drop(rows: Schedule, rng: random.Random) -> None:
    row = rng.choice(rows)
    if len(row) > 1:
        del row[rng.randrange(len(row))]


def double(rows: Schedule, rng: random.Random) -> None:
    row = rng.choice(rows)
    row.insert(rng.randrange(len(row) + 1), rng.choice(row))


def move(rows: Schedule, rng: random.Random) -> None:
    row = rng.choice(rows)
    row.insert(rng.randrange(len(row)), row.pop(rng.randrange(len(row))))


def move_to_another_rank(rows: Schedule, rng: random.Random) -> None:
    row, other = rng.choice(rows), rng.choice(rows)
    if len(row) > 1:
        action = row.pop(rng.randrange(len(row)))
        other.insert(rng.randrange(len(other) + 1), action)


def move_messages(rows: Schedule, rng: random.Random) -> None:
    """Sends later, receives earlier: right as long as no ranks wait for each other."""
    for _ in range(rng.randint(1, 6)):
        row = rng.choice(rows)
        places = [i for i, action in enumerate(row) if action.kind.startswith(("SEND", "RECV"))]
        if places:
            place = rng.choice(places)
            action = row.pop(place)
            by = rng.randint(1, 4)
            row.insert(min(place + by, len(row)) if action.kind.startswith("SEND") else max(place - by, 0), action)


def change(rows: Schedule, rng: random.Random) -> None:
    """One field of one action."""
    row = rng.choice(rows)
    place = rng.randrange(len(row))
    action = row[place]
    others = [action for row in rows for action in row]
    field = rng.choice(action._fields)
    row[place] = action._replace(**{field: getattr(rng.choice(others), field)})


SLIPS = (
    swap,
    swap_neighbours,
    swap_micro_batches,
    drop,
    double,
    move,
    move_to_another_rank,
    move_messages,
    move_messages,
    change,
)


# ------------------------------------------------------------------------------------------------------------ agreement


def compared(rows: Schedule, seed: int) -> str:
    """What both say of a schedule: one of `KINDS`."""
    text = "\n".join(map(row_text, rows))
    found = verdict(rows, seed=seed)
    try:
        checked, said = check(rows), None
    except ScheduleError as error:
        checked, said = None, str(error)
    assert (said is None) == (found is None), f"seed {seed}: the checker: {said}; the machine: {found}\n{text}"
    if said is not None and said.startswith("deadlock"):
        assert said == found, f"seed {seed}\n{text}"
        return "deadlock"
    if checked is None:
        return "wrong"
    assert checked.blocking_hang == verdict(rows, synchronous=True, seed=seed), f"seed {seed}\n{text}"
    return "right" if checked.blocking_hang is None else "hangs with synchronous sends"


def compared_many(seeds: range) -> Counter[str]:
    verdicts: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        rows: list[Row] = a_schedule(rng)
        for slip in rng.choices(SLIPS, k=rng.choice([0, 1, 1, 1, 2])):
            slip(rows, rng)
        verdicts[compared(rows, seed)] += 1
    return verdicts


def test_the_checker_agrees_with_a_machine_that_runs_random_schedules():
    verdicts = compared_many(range(1500))
    assert min(verdicts[kind] for kind in KINDS) > 40, verdicts


@pytest.mark.slow
def test_the_checker_agrees_with_the_machine_on_ten_thousand_schedules():
    verdicts = compared_many(range(10_000, 20_000))
    print(verdicts)
    assert verdicts.total() == 10_000
    assert min(verdicts[kind] for kind in KINDS) > 300, verdicts


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_named_schedule_computes_what_a_plain_loop_does(name):
    kind = SCHEDULES[name]
    rows = complete(
        name,
        ranks=3,
        microbatches=6,
        chunks=2 if kind.chunked else 1,
        slices=2 if kind.sliced else 1,
        batches=2 if kind.versions else 1,
    )
    assert verdict(rows) is None
    assert (verdict(rows, synchronous=True) is None) == (check(rows).blocking_hang is None)
