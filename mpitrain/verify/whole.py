"""From the records of all ranks to whole tensors.

Every rank kept its slabs; each says which rectangle of the full tensor it is.  Here the rectangles are laid into place.
What lies on the same place must be the same: ranks that hold a part twice are replicas, and replicas never differ.  A
place where nothing lies stays NaN, which equals nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import numpy as np

from mpitrain.debug.capture import Fact, Record
from mpitrain.spec import ATOMIC_AXES, slab_shape

Rectangle = tuple[slice, ...]


class Slab(NamedTuple):
    """One parameter on one rank."""

    name: str
    full_shape: tuple[int, ...]
    rectangle: Rectangle
    decays: bool


@dataclass(frozen=True)
class Seat:
    """A rank in a layout, and what it holds of each parameter."""

    rank: int
    coords: dict[str, int]
    sizes: dict[str, int]
    slabs: tuple[Slab, ...]


class Moment(NamedTuple):
    """One record of one rank, with the seat that it belongs to."""

    seat: Seat
    facts: dict[str, Fact]
    arrays: dict[str, np.ndarray]

    def slabs_of(self, kind: str) -> Iterator[tuple[Slab, np.ndarray]]:
        """Each parameter's slab of a kind, cut from the flat vector."""
        vector, start = self.arrays[kind], 0
        for slab in self.seat.slabs:
            shape = slab_shape(slab.rectangle)
            stop = start + int(np.prod(shape, dtype=np.int64))
            yield slab, vector[start:stop].reshape(shape)
            start = stop
        if start != vector.size:
            raise ValueError(f"rank {self.seat.rank} holds {vector.size} elements of kind {kind}, and slabs of {start}")


def moments(records: Iterable[Record]) -> Iterator[Moment]:
    """The records of a rank, each with the seat that its executor's begin has given."""
    seats: dict[int, Seat] = {}
    for facts, arrays in records:
        if facts["is"] == "begin":
            slabs = tuple(
                Slab(name, tuple(shape), tuple(slice(*ends) for ends in rectangle), decays)
                for name, shape, rectangle, decays in facts["parameters"]
            )
            seats[facts["executor"]] = Seat(facts["rank"], facts["coords"], facts["sizes"], slabs)
        yield Moment(seats[facts["executor"]], facts, arrays)


class Holder(NamedTuple):
    """A rank that holds a part of a tensor."""

    seat: Seat
    rectangle: Rectangle
    slab: np.ndarray

    def part(self, rectangle: Rectangle) -> np.ndarray:
        """What it holds of a rectangle of the full tensor that lies in its own."""
        inner = (slice(r.start - s.start, r.stop - s.start) for r, s in zip(rectangle, self.rectangle, strict=True))
        return self.slab[(..., *inner)]


class Split(NamedTuple):
    """Replicas that differ: two ranks that do, the axes along which neighbours do, and the largest difference."""

    ranks: tuple[int, int]
    axes: tuple[str, ...]
    error: float


@dataclass
class Whole:
    """All tensors of one kind at one step.

    Attributes:
        tensors: name -> full tensor.
        holders: name -> each rank that holds a part.
        gaps: name -> number of elements that no rank holds.
        splits: name -> where its replicas differ.
    """

    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    holders: dict[str, list[Holder]] = field(default_factory=dict)
    gaps: dict[str, int] = field(default_factory=dict)
    splits: dict[str, Split] = field(default_factory=dict)


def join(kind: str, ranks: Sequence[Moment]) -> Whole:
    """Lay the slabs of all ranks into place.

    Raises:
        ValueError: ranks disagree on the shape of a tensor, or a slab does not lie in it.
    """
    whole = Whole()
    filled: dict[str, np.ndarray] = {}
    differ: set[str] = set()
    for moment in ranks:
        for (name, shape, rectangle, _), slab in moment.slabs_of(kind):
            if name not in whole.tensors:
                whole.tensors[name] = np.full(shape, np.nan)
                filled[name] = np.zeros(shape, bool)
            full = whole.tensors[name]
            if full.shape != shape:
                raise ValueError(f"{name} is {full.shape} as a whole on one rank, {shape} on rank {moment.seat.rank}")
            whole.holders.setdefault(name, []).append(Holder(moment.seat, rectangle, slab))
            place = (..., *rectangle)  # a view also of a tensor without dims
            known, there = filled[name][place], full[place]
            if known.shape != slab.shape:
                raise ValueError(f"rank {moment.seat.rank} holds a part of {name} that does not lie in {shape}")
            if known.any() and not same_bits(there[known], slab[known]):
                differ.add(name)
            there[~known] = slab[~known]
            known[...] = True
    whole.splits = {name: _split(whole.holders[name]) for name in differ}
    whole.gaps = {name: missing for name, seen in filled.items() if (missing := int((~seen).sum()))}
    return whole


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
