"""Bugs that offload is known for: the part of `mutations.py` about what lives elsewhere.

Most of them are races elsewhere, which show once in a hundred runs.  Here they are made so that they always happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from mutations import bug, put

from mpitrain import assemble
from mpitrain.memory import offload
from mpitrain.memory.home import Home
from mpitrain.memory.offload import OfTape
from mpitrain.memory.store import MemoryStore, Plain
from mpitrain.memory.stored_array import StoredArray
from mpitrain.memory.stored_flat import StoredFlat
from mpitrain.optim import elementwise
from mpitrain.optim.windows import Cut, Vector, windows_of
from mpitrain.plan.memory import offload as planned

STATE: dict[str, Any] = {"offload": "optimizer"}
WEIGHTS: dict[str, Any] = {"offload": "parameters"}
TWICE: dict[str, Any] = {**WEIGHTS, "microbatches": 2}
SAVED: dict[str, Any] = {"offload": "activations", "microbatches": 4}
CLIPPED: dict[str, Any] = {**TWICE, "clip": 0.05}

# ------------------------------------------------------------------------------------------------- windows of an update


def windows(change: Callable[[list[list[Cut]]], list[list[Cut]]]) -> Any:
    """Updates go over other windows: change(the right ones)."""
    stack = ExitStack()
    stack.enter_context(put(planned, "MOST_WINDOW", 500))
    stack.enter_context(put(elementwise, "windows_of", lambda runs, size: change(windows_of(runs, size))))
    return stack


@bug("the last window is not updated", "dp2", "T24.1", **STATE)
def _() -> Iterator[None]:
    with windows(lambda cuts: cuts[:-1]):
        yield


@bug("a window takes in the last element of the one before", "tp2", "T24.1", **STATE)
def _() -> Iterator[None]:
    def overlapping(cuts: list[list[Cut]]) -> list[list[Cut]]:
        return [[cut._replace(start=max(0, cut.start - 1)) for cut in window] for window in cuts]

    with windows(overlapping):
        yield


@bug("each run has the moments of the first one", "pp2", "T24.1", **STATE)
def _() -> Iterator[None]:
    with windows(lambda cuts: [[c._replace(run=c.run._replace(start=0)) for c in window] for window in cuts]):
        yield


@bug("a window comes with the moments of the one before", "dp2", "T24.1", **STATE)
def _() -> Iterator[None]:
    take = Vector.take

    def before(self: Vector) -> Any:
        size = self.stop - self.start
        moved = self if self.start < size or not self.is_written else self._replace(start=self.start - size)
        return take(moved._replace(stop=moved.start + size))

    with put(planned, "MOST_WINDOW", 500), put(Vector, "take", before):
        yield


@bug("a window goes back one element late", "dp2,zero1", "T24.1", **STATE)
def _() -> Iterator[None]:
    give = Vector.give_back
    with put(Vector, "give_back", lambda self, values: give(self, np.roll(values, 1))):
        yield


@bug("only the first window goes back", "tp2", "T24.1", **STATE)
def _() -> Iterator[None]:
    give = Vector.give_back

    def first(self: Vector, values: Any) -> None:
        if self.start == 0:
            give(self, values)

    with put(planned, "MOST_WINDOW", 500), put(Vector, "give_back", first):
        yield


@bug("the two moments live in one place", "dp2", "T24.1", **STATE)
def _() -> Iterator[None]:
    keep = Home.keep
    with put(Home, "keep", lambda self, kind, size, dtype: keep(self, "first_moment", size, dtype)):
        yield


# ------------------------------------------------------------------------------------------------- reads and writes


def late(region: str) -> Any:
    """What is written behind lands when the next write of these elements comes: reads overtake it."""
    out = Plain.out
    waiting: dict[tuple[int, str, int], Any] = {}

    def behind(self: Plain, name: str, pieces: Sequence[tuple[int, Any]]) -> Callable[[], None]:
        if not name.startswith(region):
            return out(self, name, pieces)
        landing = []
        for offset, data in pieces:
            key = id(self), name, offset
            before = waiting.get(key)
            landing.append((offset, data.copy() if before is None else before))  # the start is what it is
            waiting[key] = data.copy()
        return out(self, name, landing)

    return put(Plain, "out", behind)


@bug("moments are fetched before what was written behind has landed", "dp2", "T24.1", **STATE)
def _() -> Iterator[None]:
    with late("optimizer/"):
        yield


@bug("weights of the step before are fetched", "dp2", "T24.1", **WEIGHTS)
def _() -> Iterator[None]:
    with late("parameters/0/weights"):
        yield


@bug("a buffer is fetched into again before it was used", "dp2", "T24.1", **STATE)
def _() -> Iterator[None]:
    begin = MemoryStore._begin
    buffers: dict[tuple[int, str, int], Any] = {}

    def into_one(self: MemoryStore, region: str, spans: Any, out: Any = None) -> Any:
        if not region.startswith("optimizer/") or any(f.spans == spans for f in self._fetches[region]):
            return begin(self, region, spans, out)
        size = spans[0][1] - spans[0][0]
        out = buffers.setdefault((id(self), region, size), np.empty(size, self.regions[region].dtype))
        found = begin(self, region, spans, out)
        self._io.wait(found.job)
        return found

    with put(planned, "MOST_WINDOW", 500), put(MemoryStore, "_begin", into_one):
        yield


# -------------------------------------------------------------------------------------------------------- gradients


@bug("where nobody else adds to them, gradients of earlier micro-batches are lost", "tp2", "T24.1", **TWICE)
def _() -> Iterator[None]:
    with put(StoredFlat, "take_gradients", lambda self, first, last: None):
        yield


def brought(around: Callable[[StoredFlat, Callable[[], None], Sequence[Any], Any], None]) -> Any:
    """Gradients go to the store otherwise: around(flat, as it is right, shares, summed)."""
    bring = StoredFlat.bring

    def changed(self: StoredFlat, first: int, last: int, summed: Any) -> None:
        around(self, lambda: bring(self, first, last, summed), self.shares[first:last], summed)

    return put(StoredFlat, "bring", changed)


@bug("the sum of a micro-batch takes the place of those before", "dp2", "T24.1", **TWICE)
def _() -> Iterator[None]:
    def replacing(flat: StoredFlat, right: Callable[[], None], shares: Sequence[Any], summed: Any) -> None:
        for share in shares:
            share.touched = False
        right()

    with brought(replacing):
        yield


@bug("what is in the store is added to a sum that went on from it", "pp2", "T24.1", **TWICE)
def _() -> Iterator[None]:
    def doubled(flat: StoredFlat, right: Callable[[], None], shares: Sequence[Any], summed: Any) -> None:
        if shares[0].touched:
            summed += np.concatenate([share.grad.here().reshape(-1) for share in shares])
        right()

    with brought(doubled):
        yield


@bug("the norm is that of the first micro-batch", "dp2", "T24.1", **CLIPPED)
def _() -> Iterator[None]:
    def of_the_first(flat: StoredFlat, right: Callable[[], None], shares: Sequence[Any], summed: Any) -> None:
        before = [share.grad.squares if share.touched else None for share in shares]
        right()
        for share, squares in zip(shares, before, strict=True):
            share.grad.squares = share.grad.squares if squares is None else squares

    with brought(of_the_first):
        yield


@bug("what lives elsewhere is not clipped", "dp2", "T24.1", **CLIPPED)
def _() -> Iterator[None]:
    with put(StoredArray, "scale_by", lambda self, factor: None):
        yield


@bug("gradients are clipped by all norms so far", "tp2", "T24.1", **CLIPPED)
def _() -> Iterator[None]:
    def for_ever(flat: StoredFlat, right: Callable[[], None], shares: Sequence[Any], summed: Any) -> None:
        before = flat._factor.value
        right()
        flat._factor.value = before

    with brought(for_ever):
        yield


# ------------------------------------------------------------------------------------------- what waits for backward


def small_groups(nbytes: int = 2**13) -> Any:
    """Arrays leave and return a few at a time."""
    return put(planned, "MOST_GROUP", nbytes)


@bug("passes that wait at once have one slot", "pp2,gpipe", "T24.1", **SAVED)
def _() -> Iterator[None]:
    start = OfTape.__init__

    def in_the_first(self: OfTape, of: Any, inner: Any, slot: int | None) -> None:
        start(self, of, inner, None if slot is None else 0)

    with small_groups(), put(OfTape, "__init__", in_the_first):
        yield


@bug("arrays that look alike come back as each other", "dp2", "T24.1", **{**SAVED, "microbatches": 1})
def _() -> Iterator[None]:
    each = MemoryStore.get_each

    def swapped(self: MemoryStore, region: str, spans: Any) -> Any:
        found = each(self, region, spans)
        for at in range(len(found) - 1):
            if found[at].size == found[at + 1].size:
                found[at], found[at + 1] = found[at + 1], found[at]
        return found

    with small_groups(2**15), put(MemoryStore, "get_each", swapped):
        yield


@bug("an array comes back one byte late", "tp2", "T24.1", **SAVED)
def _() -> Iterator[None]:
    of = offload._Part.of
    with small_groups(), put(offload._Part, "of", lambda self, raw: of(self, np.roll(raw, 1))):
        yield


@bug("groups are written over each other", "dp2", "T24.1", **SAVED)
def _() -> Iterator[None]:
    class AtTheStart(offload._Group):
        def __init__(self, start: int) -> None:
            super().__init__(start - start % 2**19)  # of the slot

    with small_groups(), put(offload, "_Group", AtTheStart):
        yield


@bug("what left does not return", "pp2,gpipe", "T24.1", **SAVED)
def _() -> Iterator[None]:
    offloaded = assemble.with_offload

    def forgetting(rows: Any, distance: int) -> Any:
        return [[a for a in row if a.kind != "FETCH"] for row in offloaded(rows, distance)]

    with put(assemble, "with_offload", forgetting):
        yield
