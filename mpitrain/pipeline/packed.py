"""Whose gradient an element of a message is, where messages hold the gradients of many parameters.

Gradients leave in buckets: neighbours in a flat buffer, from its end, each once in a walk back.  So the size of a
message, over how many ranks it goes, and what has left before it say which bucket it is; no reducer has to tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Flat, Parameter
from mpitrain.nn.share import CutFlat


class Bucket(NamedTuple):
    """Parameters [first, last) of a flat buffer."""

    flat: Flat
    first: int
    last: int

    def sent(self, index: int) -> Parameter:
        """Whose gradient an element is of what a rank gives."""
        flat, at = self.flat, 0
        for start, stop, place in self._pieces():
            at += stop - start
            if index < at:
                return flat.parameters[place]
        raise AssertionError(f"element {index} of a message of {at}")

    def received(self, index: int) -> Parameter:
        """Whose gradient an element is of what a rank gets."""
        flat = self.flat
        if not isinstance(flat, CutFlat):
            return self.sent(index)
        begin = flat.own_offsets[self.first]
        place = next(i for i in range(self.first, self.last) if index < flat.own_offsets[i + 1] - begin)
        return flat.parameters[place]

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """The pieces of a message in its order: elements (start, stop) of the parameter at a place."""
        flat, places = self.flat, range(self.first, self.last)
        if isinstance(flat, CutFlat):
            yield from ((*of_rank[place], place) for of_rank in flat.ranges for place in places)
        else:
            yield from ((flat.offsets[place], flat.offsets[place + 1], place) for place in places)


class Packed:
    """Tells the buckets of a model's messages.

    Args:
        model: materialised.
        sizes: ranks on each axis.
    """

    def __init__(self, model: Module, sizes: Mapping[str, int]) -> None:
        self._flats = []
        for flat in model.flats:
            ranks = 1
            for axis in flat.axes:
                ranks *= sizes[axis]
            self._flats.append((flat, ranks))
        self._of_stage = {
            stage: {p for part in model.parts(stage) for p in part.parameters()} for stage in model.stages
        }
        self._left: list[Bucket] = []

    def begin(self) -> None:
        """A walk back begins, or the sums after all of them."""
        self._left = []

    @property
    def left(self) -> set[Parameter]:
        """The parameters whose gradients have left since then."""
        return {p for flat, first, last in self._left for p in flat.parameters[first:last]}

    def bucket(self, size: int, ranks: int, stage: int | None, cut: bool) -> Bucket | None:
        """What a message is that is given now; None: it is no bucket.

        Args:
            size: elements that a rank gives.
            ranks: over which it goes.
            stage: that is walked back; None: after all walks.
            cut: whether each rank gets its rows of the sum only.
        """
        found = [bucket for bucket in self._buckets(size, ranks, cut) if not self._has_left(bucket)]
        if not found:
            return None
        here = None if stage is None else self._of_stage[stage]

        def order(bucket: Bucket) -> tuple[bool, int]:
            """Those of the stage alone are the likeliest, though some reducers' buckets are of several stages."""
            flat, first, last = bucket
            return here is None or all(p in here for p in flat.parameters[first:last]), flat.places[first]

        next_one = max(found, key=order)
        self._left.append(next_one)
        return next_one

    def _buckets(self, size: int, ranks: int, cut: bool) -> Iterator[Bucket]:
        for flat, of_flat in self._flats:
            if of_flat == ranks and isinstance(flat, CutFlat) == cut:
                ends = {offset: place for place, offset in enumerate(flat.offsets)}
                for last in range(len(flat.parameters), 0, -1):
                    first = ends.get(flat.offsets[last] - size)
                    if first is not None and first < last:
                        yield Bucket(flat, first, last)

    def _has_left(self, bucket: Bucket) -> bool:
        """Whether any of it has."""
        flat, first, last = bucket
        return any(flat is other.flat and first < other.last and other.first < last for other in self._left)
