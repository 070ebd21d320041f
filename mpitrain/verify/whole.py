"""From the records of all ranks to whole tensors.

Every rank keeps its slabs in one vector and says which rectangle of the full tensor each of them is.  A plan, made
once, holds the place in the whole of every element of every rank's vector; then the whole is one assignment a rank.

What lies on the same place must be the same: ranks that hold a part twice are replicas, and replicas do not differ.  A
place where nothing lies stays NaN, which equals nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from mpitrain.debug.capture import Fact, Record
from mpitrain.spec import ATOMIC_AXES, slab_shape

Rectangle = tuple[slice, ...]


def at(rectangle: Rectangle) -> Any:
    """The index of a rectangle, which gives a view also of a tensor without dims."""
    return (..., *rectangle)


class Slab(NamedTuple):
    """One parameter on one rank, or what an optimizer keeps for it."""

    name: str
    full_shape: tuple[int, ...]
    rectangle: Rectangle
    decays: bool


@dataclass(frozen=True)
class Seat:
    """A rank in a layout, and what it holds of each parameter.

    states: kind -> what it holds of it, for kinds of tensors that have other shapes than the parameters.
    """

    rank: int
    coords: dict[str, int]
    slabs: tuple[Slab, ...]
    states: dict[str, tuple[Slab, ...]]

    def of(self, kind: str) -> tuple[Slab, ...]:
        """What it holds of the tensors of a kind."""
        return self.states.get(kind, self.slabs)


class Moment(NamedTuple):
    """One record of one rank, with the seat that it belongs to."""

    seat: Seat
    facts: dict[str, Fact]
    arrays: dict[str, np.ndarray]


def moments(records: Iterable[Record]) -> Iterator[Moment]:
    """The records of a rank, each with the seat that its executor's begin has given."""
    seats: dict[int, Seat] = {}
    for facts, arrays in records:
        if facts["is"] == "begin":
            states = {kind: _slabs(told) for kind, told in facts.get("states", {}).items()}
            seats[facts["executor"]] = Seat(facts["rank"], facts["coords"], _slabs(facts["parameters"]), states)
        yield Moment(seats[facts["executor"]], facts, arrays)


def _slabs(told: Iterable[Fact]) -> tuple[Slab, ...]:
    return tuple(
        Slab(name, tuple(shape), tuple(slice(*ends) for ends in rectangle), decays)
        for name, shape, rectangle, decays in told
    )


class Holder(NamedTuple):
    """A rank that holds a part of a tensor."""

    seat: Seat
    rectangle: Rectangle
    slab: np.ndarray

    def part(self, rectangle: Rectangle) -> np.ndarray:
        """What it holds of a rectangle of the full tensor that lies in its own."""
        pairs = zip(rectangle, self.rectangle, strict=True)
        return self.slab[at(tuple(slice(r.start - s.start, r.stop - s.start) for r, s in pairs))]


class Split(NamedTuple):
    """Replicas that differ: two ranks that do, the axes along which neighbours do, and the largest difference."""

    ranks: tuple[int, int]
    axes: tuple[str, ...]
    error: float


@dataclass(frozen=True)
class Whole:
    """All tensors of one kind at one step.

    Attributes:
        tensors: name -> full tensor.
        splits: name -> where its replicas differ.
    """

    plan: Plan
    vectors: Sequence[np.ndarray]
    tensors: dict[str, np.ndarray]
    splits: dict[str, Split]

    def holders(self, name: str) -> list[Holder]:
        """Each rank that holds a part of a tensor."""
        return self.plan.holders(name, self.vectors)


class Plan:
    """Where each element of each rank's vector lies.

    Args:
        seats: of all ranks.
        kind: of the tensors; those of most kinds have the parameters' shapes.

    Attributes:
        problems: name -> why a tensor cannot be laid together.
        gaps: name -> number of elements that no rank holds.
    """

    def __init__(self, seats: Sequence[Seat], kind: str = "weight") -> None:
        self.seats = seats
        self.kind = kind
        self.problems: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for seat in seats:
            for slab in seat.of(self.kind):
                self._check(seat, slab)
        sizes = [int(np.prod(shape, dtype=np.int64)) for shape in self._shapes.values()]
        stops = np.cumsum([0, *sizes])
        self._ranges = {name: (int(a), int(b)) for name, a, b in zip(self._shapes, stops, stops[1:], strict=False)}
        self._total = int(stops[-1])
        self._places = [self._places_of(seat) for seat in seats]
        filled = np.zeros(self._total + 1, bool)
        for places in self._places:
            filled[places] = True
        missing = {name: int((~filled[start:stop]).sum()) for name, (start, stop) in self._ranges.items()}
        self.gaps = {name: count for name, count in missing.items() if count and name not in self.problems}

    def _check(self, seat: Seat, slab: Slab) -> None:
        shape = self._shapes.setdefault(slab.name, slab.full_shape)
        if shape != slab.full_shape:
            self.problems[slab.name] = f"is {shape} as a whole on one rank, {slab.full_shape} on rank {seat.rank}"
        elif len(shape) != len(slab.rectangle) or any(
            not 0 <= part.start <= part.stop <= length for part, length in zip(slab.rectangle, shape, strict=True)
        ):
            self.problems[slab.name] = f"rank {seat.rank} holds a part of it that does not lie in {shape}"

    def _places_of(self, seat: Seat) -> np.ndarray:
        """Places of the elements of a rank's vector; behind the end for tensors with a problem."""
        found = []
        for name, shape, rectangle, _ in seat.of(self.kind):
            if name in self.problems:
                found.append(np.full(int(np.prod(slab_shape(rectangle), dtype=np.int64)), self._total))
            else:
                start, stop = self._ranges[name]
                found.append(np.arange(start, stop).reshape(shape)[at(rectangle)].reshape(-1))
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def size_of(self, rank: int) -> int:
        """Number of elements of a rank's vector."""
        return len(self._places[rank])

    def join(self, vectors: Sequence[np.ndarray]) -> Whole:
        """Lay the vectors of all ranks, of `size_of` elements each, into place."""
        whole = np.full(self._total + 1, np.nan)
        known = np.zeros(self._total + 1, bool)
        known[-1] = True
        odd: set[str] = set()
        for places, vector in zip(self._places, vectors, strict=True):
            again = known[places]
            if again.any():
                seen = places[again]
                differs = whole[seen].view(np.int64) != np.asarray(vector, np.float64)[again].view(np.int64)
                odd.update(self._names_at(seen[differs]))
                fresh = ~again
                whole[places[fresh]] = vector[fresh]
            else:
                whole[places] = vector
            known[places] = True
        tensors = {
            name: whole[start:stop].reshape(self._shapes[name])
            for name, (start, stop) in self._ranges.items()
            if name not in self.problems
        }
        return Whole(self, vectors, tensors, {name: _split(self.holders(name, vectors)) for name in odd})

    def _names_at(self, places: np.ndarray) -> list[str]:
        if not len(places):
            return []
        names = [*self._ranges, ""]  # the last one for what lies behind the end
        starts = [*(start for start, _ in self._ranges.values()), self._total]
        return [names[i] for i in np.unique(np.searchsorted(starts, places, side="right") - 1) if names[i]]

    def holders(self, name: str, vectors: Sequence[np.ndarray]) -> list[Holder]:
        """Each rank that holds a part of a tensor."""
        found = []
        for seat, vector in zip(self.seats, vectors, strict=True):
            start = 0
            for slab in seat.of(self.kind):
                shape = slab_shape(slab.rectangle)
                stop = start + math.prod(shape)
                if slab.name == name:
                    found.append(Holder(seat, slab.rectangle, vector[start:stop].reshape(shape)))
                start = stop
        return found


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays hold the same bits; a NaN equals itself here, and 0 is not -0."""
    return a.dtype == b.dtype and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def _split(holders: Sequence[Holder]) -> Split:
    """Between which ranks, and along which axes, the holders of a tensor differ."""
    pairs: list[tuple[tuple[str, ...], Rectangle, Holder, Holder]] = []
    for one, other in combinations(holders, 2):
        overlap = tuple(
            slice(max(a.start, b.start), min(a.stop, b.stop))
            for a, b in zip(one.rectangle, other.rectangle, strict=True)
        )
        if all(part.start < part.stop for part in overlap) and not same_bits(one.part(overlap), other.part(overlap)):
            here, there = one.seat.coords, other.seat.coords
            axes = tuple(axis for axis in ATOMIC_AXES if here.get(axis) != there.get(axis))
            pairs.append((axes, overlap, one, other))
    # Neighbours on one axis say most: where they differ, it is along that axis.
    pairs.sort(key=lambda pair: len(pair[0]))
    axes, _, one, other = pairs[0]
    single = {pair[0][0] for pair in pairs if len(pair[0]) == 1}
    with np.errstate(invalid="ignore", over="ignore"):
        gaps = [np.abs(one.part(overlap) - other.part(overlap)).max() for _, overlap, one, other in pairs]
    error = float(np.nan_to_num(gaps, nan=np.inf).max())
    return Split((one.seat.rank, other.seat.rank), tuple(a for a in ATOMIC_AXES if a in single) or axes, error)
