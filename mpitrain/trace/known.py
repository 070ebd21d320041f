"""A trace with all that is worked out of it once: clocks, messages, waits, what is inside of what."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from mpitrain.debug.trace.clocks import Clocks, aligned
from mpitrain.debug.trace.matches import Matched, matched
from mpitrain.debug.trace.nesting import own_time, parents
from mpitrain.debug.trace.records import KIND, RankTrace, Trace
from mpitrain.debug.trace.waits import Waited, waits

Array = np.ndarray[Any, Any]
T = TypeVar("T")

MESSAGE = KIND["message"], KIND["wait"]


@dataclass(frozen=True)
class Lane:
    """What one rank did.

    Attributes:
        rank: its trace.
        waited: its waits.
        around: number of the span around each.
        own: ns of each span that are in no span inside it.
        start, stop: of its spans, by the clock of all.
        step: the step that each span is in, 0 outside of those that the rank has from begin to end.
        steps: number -> (start, stop) by the clock of all.  Of a step whose first action is lost the rest is no step.
    """

    rank: RankTrace
    waited: Waited
    around: Array
    own: Array
    start: Array
    stop: Array
    step: Array
    steps: Mapping[int, tuple[int, int]]

    @property
    def number(self) -> int:
        """Its rank in the world."""
        return self.rank.rank

    @property
    def spans(self) -> Array:
        """Its spans."""
        return self.rank.spans

    @property
    def length(self) -> Array:
        """ns of each span."""
        return self.stop - self.start

    @cached_property
    def is_message(self) -> Array:
        """Which spans are calls of the door, or waits for one."""
        return np.isin(self.spans["kind"], MESSAGE)

    def words(self, field: str, at: Array) -> list[str]:
        """The texts of a field of some spans."""
        texts = self.rank.strings
        return [texts[number] for number in self.spans[field][at].tolist()]

    def flags(self, field: str, words: Collection[str]) -> Array:
        """Which spans have one of these words in a field."""
        return np.array([text in words for text in self.rank.strings], bool)[self.spans[field]]

    def during(self, steps: Sequence[int]) -> Array:
        """Which spans are in some of these steps; without steps all."""
        return np.isin(self.step, steps) if len(steps) else np.ones(self.spans.size, bool)

    def of(self, kind: str) -> Array:
        """Which spans are of a kind."""
        return self.spans["kind"] == KIND[kind]


@dataclass(frozen=True)
class Known:
    """A trace, and what follows from it.

    Attributes:
        trace: as it was read.
        messages: who spoke to whom.
        clocks: one for all.
        lanes: one a rank.
        steps: numbers of those that every rank has from begin to end.
        cut: numbers of those that some rank lacks.
        spans_of: (start, stop) of a step by the clock of all: from its first begin to its last end over the ranks.
    """

    trace: Trace
    messages: Matched
    clocks: Clocks
    lanes: list[Lane]
    steps: list[int] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)
    spans_of: dict[int, tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def with_ops(self) -> list[int]:
        """Steps in which every rank has noted its ops."""
        noted = [{about["step"] for about in lane.rank.steps if about.get("ops")} for lane in self.lanes]
        return [step for step in self.steps if all(step in of for of in noted)]

    @cached_property
    def judged(self) -> list[int]:
        """The steps by which a run is judged: all but the first, which warms up, if there are others."""
        return self.steps[1:] if len(self.steps) > 1 else self.steps

    @cached_property
    def gaps(self) -> list[int]:
        """Steps between the first and the last of which some rank, or every one, has nothing."""
        there = [*self.steps, *self.cut]
        return sorted(set(range(min(there), max(there) + 1)).difference(self.steps)) if there else []

    def fact(self, name: str, kind: type[T]) -> T:
        """What the run says of itself, from its first rank; empty where it says nothing of that kind."""
        found = self.lanes[0].rank.facts.get(name) if self.lanes else None
        return found if isinstance(found, kind) else kind()

    def about(self, step: int) -> dict[str, Any]:
        """What is known of a step besides its times: loss and tokens, from the first rank that knows them."""
        for lane in self.lanes:
            for found in lane.rank.steps:
                if found["step"] == step and found.get("loss") is not None:
                    return found
        return {}


def know(trace: Trace) -> Known:
    """Work all of it out."""
    messages = matched(trace)
    clocks = aligned(trace, messages)
    waited = waits(trace, clocks, messages)
    lanes = [_lane(rank, clocks, waited[rank.rank]) for rank in trace.ranks]
    begun = sorted({about["step"] for rank in trace.ranks for about in rank.steps})
    whole = [step for step in begun if all(step in lane.steps for lane in lanes)]
    spans_of = {step: _around(step, lanes) for step in whole}
    return Known(trace, messages, clocks, lanes, whole, sorted(set(begun).difference(whole)), spans_of)


def _lane(rank: RankTrace, clocks: Clocks, waited: Waited) -> Lane:
    start, stop = (clocks.shared(rank.rank, rank.spans[name]) for name in ("start", "stop"))
    around = parents(rank.spans)
    told = {about["step"]: about for about in rank.steps}  # of a script's two executors the later one counts
    acts = rank.spans[rank.spans["kind"] == KIND["action"]]
    begun = set(zip(acts["step"].tolist(), acts["start"].tolist(), strict=True))
    told = {step: about for step, about in told.items() if (step, about["start"]) in begun}
    numbers = np.array(sorted(told), np.int64)
    times = np.array([[told[step]["start"], told[step]["stop"]] for step in numbers.tolist()], np.int64).reshape(-1, 2)
    step = rank.spans["step"].astype(np.int64)
    if numbers.size:
        at = np.minimum(np.searchsorted(numbers, step), numbers.size - 1)
        inside = (rank.spans["start"] >= times[at, 0]) & (rank.spans["start"] <= times[at, 1])
        step[(numbers[at] != step) | ~inside] = 0
    else:
        step[:] = 0
    shared = clocks.shared(rank.rank, times)
    steps = {number: (int(a), int(b)) for number, (a, b) in zip(numbers.tolist(), shared.tolist(), strict=True)}
    return Lane(rank, waited, around, own_time(rank.spans, around), start, stop, step, steps)


def _around(step: int, lanes: Sequence[Lane]) -> tuple[int, int]:
    """From the first begin of a step to its last end."""
    of = [lane.steps[step] for lane in lanes]
    return min(start for start, _ in of), max(stop for _, stop in of)
