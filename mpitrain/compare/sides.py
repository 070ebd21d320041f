"""One run: what its ranks have written, as it is compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.compare.wholes import Key, Seen, number
from mpitrain.debug.digests.files import RankDigests

Records = Mapping[int, Mapping[str, Any]]
"""Rank -> what it knows of a step."""


class Side:
    """One run: the digests of its ranks.

    Args:
        ranks: of all of them.
        number: 1 or 2, for texts.
    """

    def __init__(self, ranks: Mapping[int, RankDigests], number: int) -> None:
        self.ranks = dict(sorted(ranks.items()))
        self.number = number

    @property
    def first(self) -> RankDigests:
        """Its first rank."""
        return next(iter(self.ranks.values()))

    @property
    def executors(self) -> list[int]:
        """Numbers of its executors."""
        return sorted(self.first.begins)

    def begin(self, executor: int) -> Mapping[str, Any]:
        """What its first rank said when it began."""
        return self.first.begins[executor]

    def steps(self, executor: int) -> list[int]:
        """Numbers of steps of which every rank has digests."""
        of_rank = [{n for e, n in rank.steps if e == executor} for rank in self.ranks.values()]
        return sorted(set.intersection(*of_rank))

    def befores(self, executor: int) -> list[int]:
        """Numbers of steps before which all ranks have told their weights."""
        of_rank = [{n for e, n in rank.weights if e == executor} for rank in self.ranks.values()]
        return sorted(set.intersection(*of_rank))

    def whole(self, executor: int) -> bool:
        """Whether all of its ranks have digests."""
        return len(self.ranks) == math.prod(self.begin(executor)["sizes"].values())

    def lacking(self, executor: int) -> dict[int, list[int]]:
        """Ranks that have no digests of steps of which another rank has."""
        of_rank = {rank: {n for e, n in of.steps if e == executor} for rank, of in self.ranks.items()}
        every = set[int]().union(*of_rank.values())
        return {rank: sorted(every - steps) for rank, steps in of_rank.items() if every - steps}

    def step(self, executor: int, number: int) -> dict[int, Mapping[str, Any]]:
        """What each rank knows of a step."""
        return {rank: of.step(executor, number) for rank, of in self.ranks.items()}

    def slabs(self, executor: int, rank: int, kind: str) -> Sequence[Any]:
        """The parts that a rank holds of the tensors of a kind."""
        begin = self.ranks[rank].begins.get(executor, {})
        slabs: Sequence[Any] = begin.get("states", {}).get(kind, begin.get("parameters", []))
        return slabs

    def seen(self, executor: int, records: Mapping[int, Mapping[str, Any]]) -> dict[Key, list[Seen]]:
        """The values of a step, on all ranks."""
        found: dict[Key, list[Seen]] = {}
        for rank, record in records.items():
            coords = self.ranks[rank].begins[executor]["coords"]
            for key, about, numbers in record.get("values", []):
                found.setdefault(tuple(key), []).append(Seen(rank, coords, key[1], about, numbers))
        return found

    def lost(self, executor: int, records: Mapping[int, Mapping[str, Any]]) -> int | None:
        """The first stage that was given something else than the one before it has sent."""
        sent: dict[tuple[int, tuple[tuple[str, int], ...]], dict[str, int]] = {}
        for rank, record in records.items():
            coords = self.ranks[rank].begins[executor]["coords"]
            place = tuple((axis, index) for axis, index in coords.items() if axis != "pp")
            for name, value in record.get("boundaries", {}).items():
                way, _, stage = str(name).partition(" into ")
                if way in ("from", "to") and stage.isdecimal() and type(value) is int:
                    sent.setdefault((int(stage), place), {})[way] = value
        wrong = [stage for (stage, _), of in sent.items() if len(of) == 2 and of["from"] != of["to"]]
        return min(wrong, default=None)

    def numbers(self, records: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
        """What the first rank reports of a step."""
        record = next((r for r in records.values() if isinstance(r.get("numbers"), dict)), {})
        return {n: v for n, value in record.get("numbers", {}).items() if (v := number(value)) is not None}
