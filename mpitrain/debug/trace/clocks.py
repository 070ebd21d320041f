"""One clock for all ranks of a trace, and how far it may be wrong.

    clocks = aligned(trace)
    clocks.shared(3, trace.ranks[3].spans["start"])      ns by the clock of the first rank
    clocks.error[3]                                       ns: so far they are off at most
    print(clocks.said)                                    2 clocks brought together by 1,204 messages, ...

Ranks of one host read one clock.  Between hosts nothing is measured while a run goes: messages say it afterwards.
None comes before it was sent, and nobody leaves an all-reduce before the last one has entered it.  With o the time by
which a clock is ahead, a message that left a at t_a and had come to b at t_b, each by its own clock, says

    o_b - o_a  <=  t_b - t_a

All that messages say are such differences, so the largest and the smallest o that go together with every one of them
are shortest paths (Cormen et al., Introduction to Algorithms, section 24.4).  The truth lies between the two; the
middle is taken, and half the distance is the error.  A trip forth and back of two messages leaves half the time of the
trip, less what the other side held it, as NTP's does (RFC 5905); here the fastest of thousands count, and detours over
third hosts.

Clocks also run apart, at most by `DRIFT`, which is more than the crystals of two hosts do.  So o is a polyline: it has
a knot for every tenth of a second, knots beside each other differ by no more than the drift allows, and what a message
says holds at a knot with what the clock may have run apart from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpitrain.debug.trace.matches import Matched, matched
from mpitrain.debug.trace.records import RankTrace, Trace

Array = np.ndarray[Any, Any]

DRIFT = 100e-6  # by which two clocks run apart, of the time that passes
WINDOW = 0.1e9  # ns from knot to knot
MOST_KNOTS = 8192  # of all clocks together
_FAR = 1 << 60  # ns: times beyond, 36 years, are those of a damaged file
_AT_A_TIME = 1 << 16  # meetings
_SLOPES = (DRIFT, 10 * DRIFT, 100 * DRIFT)  # tried in turn, where messages contradict a smaller one


@dataclass(frozen=True)
class Clock:
    """The clock of some ranks.

    Attributes:
        first: its first time in the trace.
        ahead: whole ns by which it is ahead of the first rank's clock, about.
        knots: its times, in ns after `first`; more: ns by which it is ahead there besides; error: of that.
        between: what the error may be larger at times that are no knots.
    """

    first: int = 0
    ahead: int = 0
    knots: Array = field(default_factory=lambda: np.zeros(1))
    more: Array = field(default_factory=lambda: np.zeros(1))
    error: Array = field(default_factory=lambda: np.zeros(1))
    between: float = 0.0

    def shared(self, times: Array) -> Array:
        """Times of this clock by the first rank's."""
        after = np.clip(times, -_FAR, _FAR) - self.first
        more = np.interp(after, self.knots, self.more)
        return after + (self.first - self.ahead) - np.rint(more).astype(np.int64)


@dataclass(frozen=True)
class Clocks:
    """The clocks of a trace.

    Attributes:
        of: world rank -> its clock.
        offset: world rank -> ns by which its clock is ahead of the first rank's, in the middle of the trace.
        error: world rank -> ns by which its times on the shared clock are wrong at most; inf: nobody knows.
        used: messages between clocks that say something.
        drift: by which clocks are taken to run apart at most, of the time that passes.
        note: what is wrong with them; "" where nothing is.
    """

    of: Mapping[int, Clock]
    offset: Mapping[int, int]
    error: Mapping[int, float]
    used: int = 0
    drift: float = DRIFT
    note: str = ""

    @property
    def exact(self) -> bool:
        """Whether all ranks read one clock."""
        return len({id(clock) for clock in self.of.values()}) < 2

    @property
    def apart(self) -> float:
        """ns by which times of two ranks are wrong at most, the one beside the other."""
        errors = {id(clock): self.error[rank] for rank, clock in self.of.items()}
        return sum(sorted(errors.values())[-2:])

    def shared(self, rank: int, times: Array) -> Array:
        """Times of a rank by the first rank's clock.

        Args:
            rank: in the world.
            times: int64, ns of its own clock.
        """
        return self.of[rank].shared(np.asarray(times, np.int64))

    @property
    def said(self) -> str:
        """A line that tells all this."""
        if self.exact:
            ranks = len(self.of)
            return "one clock" + (f" for all {ranks} ranks: times are compared without an error" if ranks > 1 else "")
        number = len({id(clock) for clock in self.of.values()})
        line = f"{number} clocks brought together by {self.used:,} messages"
        if self.note:
            return f"{line}: {self.note}"
        lost = [rank for rank, error in self.error.items() if not np.isfinite(error)]
        if lost:
            return f"{line}; nothing bounds the clock of rank {_some(lost)}, which has no answer to its messages"
        return f"{line}; times of different hosts are off by at most {_time(self.apart)}"


def aligned(trace: Trace, messages: Matched | None = None) -> Clocks:
    """Bring the clocks of all ranks together.

    Args:
        trace: as it was read.
        messages: what `matched` found in it, if somebody knows that already.

    Cost: nothing where all ranks read one clock; else seconds for a million messages between hosts.
    """
    if len({rank.clock for rank in trace.ranks}) < 2:
        clock, ranks = Clock(_first(trace.ranks)), [rank.rank for rank in trace.ranks]
        return Clocks(dict.fromkeys(ranks, clock), dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0.0))
    told = _Told(trace, matched(trace) if messages is None else messages)
    for drift in _SLOPES:
        found = told.solved(drift)
        if found is not None:
            return found
    return told.unsolved()


class _Told:
    """What messages say of the clocks, and which clocks go together with that.

    Number 0 is the clock of the first rank, which is the measure of the others.
    """

    def __init__(self, trace: Trace, messages: Matched) -> None:
        self._ranks = {rank.rank: rank for rank in trace.ranks}
        names = list(dict.fromkeys(rank.clock for rank in trace.ranks))
        self._clock = {rank.rank: names.index(rank.clock) for rank in trace.ranks}
        of = [[rank for rank in trace.ranks if rank.clock == name] for name in names]
        self._first = [_first(ranks) for ranks in of]
        longest = max(max(_last(ranks) - first, 1) for ranks, first in zip(of, self._first, strict=True))
        self._knots = int(np.clip(np.ceil(longest / WINDOW), 1, max(1, MOST_KNOTS // len(names))))
        self._step = longest / self._knots
        self._a, self._b, self._left, self._came = self._differences(messages)
        across = self._a != self._b
        self._torn = bool(np.any((self._came < self._left) & ~across))  # before it was sent, by one clock
        self._a, self._b, self._left, self._came = (
            column[across] for column in (self._a, self._b, self._left, self._came)
        )

    def _differences(self, messages: Matched) -> tuple[Array, Array, Array, Array]:
        """(clock a, clock b, time on a, time on b): what left a at its time had come to b at its."""
        clock = np.full(1 + max(self._ranks), -1)
        for rank, number in self._clock.items():
            clock[rank] = number
        pairs, met = messages.pairs, messages.meetings
        columns = [
            [clock[pairs["source"]], clock[pairs["dest"]]],
            [self._times(pairs["source"], pairs["sent"], "start"), self._times(pairs["dest"], pairs["got"], "stop")],
        ]
        (a, b), (left, came) = columns
        found = [(a, b, left, came)]
        entered = self._times(met["rank"], met["span"], "start")
        has_left = self._times(met["rank"], np.maximum(met["done"], 0), "stop")
        number = len(self._first)
        for begin in range(0, int(met["meeting"].max(initial=-1)) + 1, _AT_A_TIME):
            here = np.flatnonzero((met["meeting"] >= begin) & (met["meeting"] < begin + _AT_A_TIME))
            row, column = met["meeting"][here] - begin, clock[met["rank"][here]]
            last_in = np.full((int(row.max(initial=-1)) + 1, number), -np.inf)
            first_out = np.full_like(last_in, np.inf)
            binds, done = met["binds"][here], met["done"][here] >= 0
            np.maximum.at(last_in, (row[binds], column[binds]), entered[here][binds])
            np.minimum.at(first_out, (row[done], column[done]), has_left[here][done])
            for p in range(number):
                for q in range(number):
                    both = np.isfinite(last_in[:, p]) & np.isfinite(first_out[:, q])
                    ones = np.full(int(both.sum()), 1)
                    found.append((p * ones, q * ones, last_in[both, p], first_out[both, q]))
        a, b, left, came = (np.concatenate(column) for column in zip(*found, strict=True))
        return a, b, left, came

    def _times(self, ranks: Array, spans: Array, which: str) -> Array:
        """ns after the first time of each one's clock."""
        times = np.zeros(ranks.size)
        for number, rank in self._ranks.items():
            here = ranks == number
            own = np.clip(rank.spans[which][spans[here]], -_FAR, _FAR) - self._first[self._clock[number]]
            times[here] = own
        return times

    def solved(self, drift: float) -> Clocks | None:
        """The clocks, if none runs apart from another by more than `drift`; None: messages say otherwise."""
        if self._torn:
            return None
        tail, head, weight = self._graph(drift)
        nodes = 1 + (len(self._first) - 1) * self._knots
        most = _shortest(tail, head, weight, nodes)
        least = _shortest(head, tail, weight, nodes)
        if most is None or least is None or np.any(most + least < -1.0):
            return None
        with np.errstate(invalid="ignore"):
            middle = (most - least) / 2
            error = np.maximum((most + least) / 2, 0.0)
        middle = np.where(np.isfinite(middle), middle, np.where(np.isfinite(most), most, -least))
        middle[~np.isfinite(middle)] = 0.0
        clocks = [Clock(self._first[0])]
        for number in range(1, len(self._first)):
            here = slice(1 + (number - 1) * self._knots, 1 + number * self._knots)
            clocks.append(
                Clock(
                    self._first[number],
                    self._first[number] - self._first[0],
                    knots=(np.arange(self._knots) + 0.5) * self._step,
                    more=middle[here],
                    error=error[here],
                    between=drift * self._step / 2 + 1,
                )
            )
        return self._clocks(clocks, drift)

    def _clocks(self, clocks: Sequence[Clock], drift: float, note: str = "") -> Clocks:
        of = {rank: clocks[number] for rank, number in self._clock.items()}
        offset = {rank: clock.ahead + round(float(np.median(clock.more))) for rank, clock in of.items()}
        error = {rank: float(clock.error.max() + clock.between) for rank, clock in of.items()}
        return Clocks(of, offset, error, self._a.size, drift, note)

    def unsolved(self) -> Clocks:
        """Clocks of which nothing is known but that their traces began at about one time."""
        clocks = [
            Clock(first, first - self._first[0], error=np.full(1, np.inf if number else 0.0))
            for number, first in enumerate(self._first)
        ]
        note = (
            "some messages came before they were sent, by one and the same clock: times of ranks cannot be compared"
            if self._torn
            else "what they say cannot be true of clocks that run evenly: times of different hosts cannot be compared"
        )
        return self._clocks(clocks, _SLOPES[-1], note)

    def _graph(self, drift: float) -> tuple[Array, Array, Array]:
        """Edges (tail, head, weight): o at the head is at most that at the tail and the weight.

        Node 0 is the first clock, at all times; then come the knots of the others.
        """
        tail, left = self._nodes(self._a, self._left)
        head, came = self._nodes(self._b, self._came)
        weight = self._came - self._left + drift * (left + came)
        knots = np.arange(1, 1 + (len(self._first) - 1) * self._knots).reshape(-1, self._knots)
        before, after = knots[:, :-1].ravel(), knots[:, 1:].ravel()
        apart = np.full(before.size, drift * self._step)
        tail = np.concatenate([tail, before, after])
        head = np.concatenate([head, after, before])
        weight = np.concatenate([weight, apart, apart])
        order = np.lexsort([weight, tail, head])
        tail, head, weight = tail[order], head[order], weight[order]
        first = np.ones(tail.size, bool)
        first[1:] = (tail[1:] != tail[:-1]) | (head[1:] != head[:-1])
        return tail[first], head[first], weight[first]

    def _nodes(self, clock: Array, times: Array) -> tuple[Array, Array]:
        """The knot that each time belongs to, and the time from there; the first clock is right at all times."""
        knot = np.clip(times // self._step, 0, self._knots - 1).astype(np.int64)
        far = np.abs(times - (knot + 0.5) * self._step)
        return np.where(clock == 0, 0, 1 + (clock - 1) * self._knots + knot), np.where(clock == 0, 0.0, far)


def _shortest(tail: Array, head: Array, weight: Array, nodes: int) -> Array | None:
    """The shortest path from node 0 to each, inf where there is none; None: a circle is shorter than nothing.

    Cost: Bellman and Ford's, all edges at once, as often as the longest of these paths has edges.
    """
    order = np.argsort(head, kind="stable")
    tail, head, weight = tail[order], head[order], weight[order]
    starts = np.flatnonzero(np.diff(head, prepend=-1))
    distance = np.full(nodes, np.inf)
    distance[0] = 0.0
    if not starts.size:
        return distance
    for _ in range(nodes + 1):
        reached = np.minimum.reduceat(distance[tail] + weight, starts)
        better = reached < distance[head[starts]] - 1e-3
        if not better.any():
            return distance
        distance[head[starts][better]] = reached[better]
        if distance[0] < 0:
            return None
    return None


def _first(ranks: Sequence[RankTrace]) -> int:
    """The first time in the spans of some ranks."""
    return min((int(np.clip(rank.spans["start"][0], -_FAR, _FAR)) for rank in ranks if rank.spans.size), default=0)


def _last(ranks: Sequence[RankTrace]) -> int:
    return max((int(np.clip(rank.spans["stop"].max(), -_FAR, _FAR)) for rank in ranks if rank.spans.size), default=0)


def _time(ns: float) -> str:
    """`18 us`, `1.2 ms`."""
    for unit, size in (("us", 1e3), ("ms", 1e6)):
        if ns < 1000 * size:
            amount = ns / size
            return f"{amount:.0f} {unit}" if amount >= 10 else f"{amount:.1f} {unit}"
    return f"{ns / 1e9:.1f} s"


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return shown + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
