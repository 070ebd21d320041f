"""Two runs with digests, in the order of the program, up to where they part.

    weights before the first step        to the last bit
    step 1   batch                       to the last bit
             values of ops               in the order of forward
             loss
             gradients of values         in the order of backward
             gradients of parameters
             norm, learning rate ...
             weights, optimizer's state
    step 2   ...

Only what exists in both runs is compared: a message that one layout sends and the other does not is no difference.
What is compared are sums, of whole values, within the bounds of rounding.  Where both runs have one layout, their bytes
are compared as well, rank by rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mpitrain.compare.beside import between, messages, split_of, states
from mpitrain.compare.bounds import FLOOR, Gap, gap, precision_of, root_mean_square
from mpitrain.compare.drift import UPDATES, Drift
from mpitrain.compare.findings import Finding, Place, Walk
from mpitrain.compare.sides import Records, Side
from mpitrain.compare.wholes import Key, Name, Seen, Tensor, Whole, part_of, tensors, wholes

EXACT = ("targets", "scale", "skipped")


def walk(one: Side, other: Side) -> Walk:
    """Compare two runs."""
    found = Walk()
    for executor in [e for e in one.executors if e in other.executors]:
        course = _Course(found, one, other, executor)
        found.same_layout = course.same_layout
        found.precision = course.precision
        for step in sorted({*one.befores(executor)} & {*other.befores(executor)}):
            if _taken(found, course.before(step)):
                return found
        for step in sorted({*one.steps(executor)} & {*other.steps(executor)}):
            found.steps.append(step)
            if _taken(found, course.step(step)):
                return found
    return found


def _taken(found: Walk, findings: Iterable[Finding]) -> bool:
    """Take findings in their order; whether the runs part in one."""
    for finding in findings:
        found.compared[finding.phase] = found.compared.get(finding.phase, 0) + 1
        if finding.gap is not None and finding.ok:
            found.largest[finding.phase] = max(found.largest.get(finding.phase, 0.0), finding.gap.share)
        if finding.bits is False and found.bits is None:
            found.bits = finding
        if not finding.ok:
            found.first = finding
            return True
        if finding.is_op:
            found.before = finding
    return False


class _Course:
    """One executor of both runs."""

    def __init__(self, found: Walk, one: Side, other: Side, executor: int) -> None:
        self._found = found
        self._sides = one, other
        self._executor = executor
        begins = one.begin(executor), other.begin(executor)
        self.same_layout = begins[0]["sizes"] == begins[1]["sizes"] and begins[0].get("dtype") == begins[1].get("dtype")
        dims = [length for side in begins for _, shape, _ in side["parameters"] for length in shape]
        self._length = max(dims, default=1)
        self.precision = precision_of([str(side.get("dtype")) for side in begins], self._length)
        self._drift = Drift(self._sides, executor, self.precision)

    # -- weights before the first step --------------------------------------------------------------------------------

    def before(self, number_of_step: int) -> Iterator[Finding]:
        """The weights before a first step: both have the same, to the last bit."""
        held = [
            tensors(
                (
                    (
                        rank,
                        side.slabs(self._executor, rank, "weight"),
                        of.before(self._executor, number_of_step).get("weights", []),
                    )
                    for rank, of in side.ranks.items()
                ),
                has_hash=True,
            )
            for side in self._sides
        ]
        yield from self._tensors(number_of_step, "weights before", held[0], held[1], exact=number_of_step == 0)

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self, number_of_step: int) -> Iterator[Finding]:
        """Everything of a step, in the order of the program."""
        records = [side.step(self._executor, number_of_step) for side in self._sides]
        yield from self._data(number_of_step, records)
        seen = [side.seen(self._executor, of) for side, of in zip(self._sides, records, strict=True)]
        one, other = (
            wholes(of, side.begin(self._executor)["sizes"]) for side, of in zip(self._sides, seen, strict=True)
        )
        self._found.left_out += len({*map(_name, seen[0]), *map(_name, seen[1])}) - len({*one} & {*other})
        numbers = [side.numbers(of) for side, of in zip(self._sides, records, strict=True)]
        forward = self._order(one, other)
        self._found.ops = len(forward)
        lost = [side.lost(self._executor, of) for side, of in zip(self._sides, records, strict=True)]
        yield from self._values(number_of_step, "F", forward, one, other, seen, lost)
        yield from messages(number_of_step, lost)
        yield from states(number_of_step, records)
        yield from self._number(number_of_step, "loss", numbers, "loss")
        scaled = numbers[0].get("scale") == numbers[1].get("scale")
        back = [name for name in one if name[0] == "B" and name in other] if scaled else []
        back.sort(key=lambda n: (*(-place for place in self._place(one[n])), n[4]))
        yield from self._values(number_of_step, "B", back, one, other, seen)
        if not any(of.get("skipped") for of in numbers):
            yield from self._kind(number_of_step, "gradient", "gradients", records)
        for name in ("norm", "learning rate", "scale", "skipped", "targets"):
            yield from self._number(number_of_step, name, numbers, "number")
        moved = UPDATES * max((abs(of.get("learning rate", 0.0)) for of in numbers), default=0.0)
        self._drift.updates = max((int(r.get("updates", 0)) for of in records for r in of.values()), default=0)
        may_move = self._drift.moved(records, moved)
        yield from self._kind(number_of_step, "weight", "weights", records, may_move)
        kinds = {kind for of in records for r in of.values() for kind in r.get("moments", {})}
        for kind in sorted(kinds):
            yield from self._kind(number_of_step, "state", kind, records)

    def _data(self, step: int, records: Sequence[Records]) -> Iterator[Finding]:
        """What the batch held: sums of hashes over the ranks that hold different parts of it."""
        found: list[dict[str, int]] = []
        whole = all(side.whole(self._executor) for side in self._sides)
        for side, of in zip(self._sides, records, strict=True):
            total: dict[str, dict[tuple[int, ...], int]] = {}
            for rank, record in of.items():
                coords = side.ranks[rank].begins[self._executor]["coords"]
                where = tuple(coords.get(axis, 0) for axis in ("edp", "ep", "cp"))
                for name, value in record.get("data", {}).items():
                    if type(value) is int:
                        total.setdefault(name, {}).setdefault(where, value)
            found.append({name: sum(values.values()) % (1 << 64) for name, values in total.items()})
        for name in [name for name in found[0] if name in found[1] and whole]:
            same = found[0][name] == found[1][name]
            problem = "" if same else f"the {name} of the batch are others, or other rows of it"
            yield Finding(step, "batch", name, problem=problem)

    def _order(self, one: Mapping[Name, Whole], other: Mapping[Name, Whole]) -> list[Name]:
        """The values of forward that both have, in the order of the first run."""
        both = [name for name in one if name[0] == "F" and name in other]
        return sorted(both, key=lambda name: (self._place(one[name]), name[4]))

    @staticmethod
    def _place(whole: Whole) -> tuple[int, int]:
        return whole.stage, whole.place

    def _values(
        self,
        step: int,
        kind: str,
        order: Sequence[Name],
        one: Mapping[Name, Whole],
        other: Mapping[Name, Whole],
        seen: Sequence[Mapping[Key, list[Seen]]],
        lost: Sequence[int | None] = (None, None),
    ) -> Iterator[Finding]:
        """The values of ops, or their gradients.

        Args:
            step: of which.
            kind: "F" or "B".
            order: their names.
            one, other: the values of both runs.
            seen: the same on each rank.
            lost: the first stage of each run that was not given what the one before it has sent.
        """
        counts = [_counts(kind, of) for of in seen]
        largest = max(
            (root_mean_square(of.of) for side in (one, other) for name, of in side.items() if name[0] == kind),
            default=0.0,
        )
        floor = FLOOR * self.precision.eps * largest
        phase = "forward" if kind == "F" else "backward"
        total = len(order)
        last: Name | None = None
        for place, name in enumerate(order):
            if counts[0][name[1:3]] != counts[1][name[1:3]]:
                self._found.left_out += 1
                continue
            mine, theirs = one[name], other[name]
            relative = self._drift.forward(place + 1) if kind == "F" else self._drift.back(place + total + 1)
            found = gap(mine.of, theirs.of, relative, floor)
            if found is None:
                self._found.left_out += 1
                continue
            _, path, op, count, index = name
            finding = Finding(step, phase, path, op, index, count, gap=found)
            finding.places = Place(mine.title, mine.site, mine.stage), Place(theirs.title, theirs.site, theirs.stage)
            finding.problem = split_of(mine.of.split, theirs.of.split)
            if self.same_layout:
                key = kind, mine.stage, path, op, count, index
                ranks, finding.bits = self._by_rank(seen, key, relative, floor)
                finding.ranks = ranks if not finding.ok and len(self._sides[0].ranks) > 1 else ()
            if not finding.ok:  # at the message that came before it, if that is why
                yield from messages(step, lost, (mine.stage, theirs.stage))
                finding.between = between(kind, one, other, last, name), between(kind, other, one, last, name)
            yield finding
            last = name

    def _by_rank(
        self, seen: Sequence[Mapping[Key, list[Seen]]], key: Key, relative: float, floor: float
    ) -> tuple[tuple[int, ...], bool | None]:
        """Ranks on which two runs of one layout differ in a value, and whether their bytes are the same everywhere."""
        mine, theirs = ({each.rank: each.numbers for each in side.get(key, [])} for side in seen)
        odd, same = [], True
        for rank in sorted({*mine} & {*theirs}):
            a, b = part_of(mine[rank], rank), part_of(theirs[rank], rank)
            if a is None or b is None or mine[rank][8] != theirs[rank][8]:
                return (), None
            same = same and a.crc == b.crc
            found = gap(a, b, relative, floor)
            if found is None or found.share > 1:
                odd.append(rank)
        return tuple(odd), same

    # -- parameters and numbers ---------------------------------------------------------------------------------------

    def _kind(
        self,
        step: int,
        phase: str,
        kind: str,
        records: Sequence[Records],
        more: Mapping[str, float] | None = None,
    ) -> Iterator[Finding]:
        """All tensors of one kind."""
        held = []
        for side, of in zip(self._sides, records, strict=True):
            told = (
                (
                    rank,
                    side.slabs(self._executor, rank, kind),
                    record.get("moments", {}).get(kind, []) if phase == "state" else record.get(kind, []),
                )
                for rank, record in of.items()
            )
            held.append(tensors(told, has_hash=kind == "weights"))
        yield from self._tensors(step, phase, held[0], held[1], kind=kind if phase == "state" else "", more=more)

    def _tensors(
        self,
        step: int,
        phase: str,
        one: Mapping[str, Tensor],
        other: Mapping[str, Tensor],
        *,
        exact: bool = False,
        kind: str = "",
        more: Mapping[str, float] | None = None,
    ) -> Iterator[Finding]:
        largest = max((root_mean_square(t.of) for side in (one, other) for t in side.values()), default=0.0)
        floor = FLOOR * self.precision.eps * largest
        relative = self._drift.back(2 * max(1, self._found.ops))
        for name in [name for name in one if name in other]:
            mine, theirs = one[name], other[name]
            lacking = not all(side.whole(self._executor) for side in self._sides)
            if lacking and (mine.problem or theirs.problem):
                self._found.left_out += 1  # the rest of it is with ranks that have no digests
                continue
            finding = Finding(step, phase, name, op=kind)
            apart = self._apart
            finding.problem = mine.problem or theirs.problem
            if phase != "gradient" and not apart:
                finding.problem = finding.problem or split_of(mine.of.split, theirs.of.split)
            finding.gap = gap(mine.of, theirs.of, relative, floor, (more or {}).get(name, 0.0))
            if finding.gap is None:
                finding.problem = finding.problem or f"has {mine.of.elements:,} and {theirs.of.elements:,} elements"
            if mine.exact is not None and theirs.exact is not None and not apart:
                same = mine.exact == theirs.exact
                finding.bits = same if self.same_layout else None
                if exact and not same and self._same_dtype:
                    finding.problem = "does not begin with the same numbers, to the last bit"
            yield finding

    @property
    def _apart(self) -> bool:
        return any(side.begin(self._executor).get("apart") for side in self._sides)

    @property
    def _same_dtype(self) -> bool:
        one, other = (side.begin(self._executor).get("dtype") for side in self._sides)
        return bool(one == other)

    def _number(self, step: int, name: str, of: Sequence[Mapping[str, float]], phase: str) -> Iterator[Finding]:
        if name not in of[0] or name not in of[1]:
            return
        a, b = of[0][name], of[1][name]
        relative = self._drift.back(2 * max(1, self._found.ops))
        same = a == b or not (math.isfinite(a) or math.isfinite(b))  # another order of sums may make NaN of inf - inf
        allowed = 0.0 if same or name in EXACT else relative * max(abs(a), abs(b))
        error = 0.0 if same else abs(a - b)
        yield Finding(step, phase, name, gap=Gap(name, (a, b), error, allowed), bits=same if self.same_layout else None)


def _name(key: Key) -> Name:
    return key[0], *key[2:]


def _counts(kind: str, seen: Mapping[Key, Any]) -> _Counting:
    """How many ops of each name a part has."""
    found = _Counting()
    for of, _, path, name, count, _ in seen:
        if of == kind:
            found[path, name] = max(found[path, name], count + 1)
    return found


class _Counting(dict[tuple[str, str], int]):
    def __missing__(self, key: tuple[str, str]) -> int:
        return 0
