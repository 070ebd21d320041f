"""Where to cut the sequences into slices that go through a pipeline one after the other.

    T = m sum_i t_i + (p - 1) max_i t_i            m micro-batches through p stages, slice i takes t_i on one of them

Many slices make the largest of them small, and with it the time in which the pipeline fills and drains; few slices have
less overhead.  A later slice looks at more keys than an earlier one of the same length, so slices of equal cost become
shorter towards the end.

Source: Li et al. 2021, "TeraPipe", arXiv:2102.07988, sections 3.2 and 3.3.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mpitrain.errors import ConfigError, ShapeError

Cost = Callable[[int, int], float]
"""(tokens of a slice, tokens before it) -> its time on one stage, in any unit."""


def best_slicing(seq_len: int, stages: int, cost: Cost, *, microbatches: int = 1, unit: int = 1) -> list[int]:
    """The lengths of slices that make T smallest, for any cost: exact, by dynamic programming.

    With a limit t on the time of a slice, the best slicing of the first x tokens is

        S(x; t) = min over k with cost(k, x - k) <= t of  S(x - k; t) + cost(k, x - k)

    and the answer is min over t of m S(s; t) + (p - 1) t, where t runs through all times that slices can have.  Since
    S falls as t rises, most limits need not be tried: `_search` leaves out what cannot be better than what is found.

    Args:
        seq_len: tokens of a sequence, s.
        stages: of the pipeline, p.
        cost: of a slice, 0 or more and finite.
        microbatches: how many sequences (or groups of them) go through the pipeline in a step, m.
        unit: lengths are multiples of so many tokens.

    Returns:
        The lengths, first slice first.

    Raises:
        ConfigError: a number below 1, or a cost that is negative or not finite.
        ShapeError: seq_len is no multiple of unit.

    Cost: n^2 / 2 calls of `cost` for n = seq_len / unit, and about a hundred passes over as many numbers where the cost
        grows with both of its arguments: 0.1 s for n = 256, 1 s for n = 1024.
    """
    for name, number in (("seq_len", seq_len), ("stages", stages), ("microbatches", microbatches), ("unit", unit)):
        if number < 1:
            raise ConfigError(f"slices of a sequence: {name} is {number}, wanted is at least 1.")
    if seq_len % unit:
        raise ShapeError(f"{seq_len} tokens cannot be cut into slices whose lengths are multiples of {unit}.")
    times = _times(seq_len // unit, unit, cost)
    cuts = _search(times, microbatches, stages - 1)
    return [(stop - start) * unit for start, stop in pairwise(cuts)]


def equal_cost_slices(seq_len: int, n: int, linear: float, quadratic: float) -> list[int]:
    """The lengths of n slices whose costs are as even as can be, none longer than the one before it.

    A slice of l tokens with c before it costs  linear l + quadratic (l c + l^2 / 2): each token by itself, and
    attention to the tokens before it.  The sum of squares of the costs is smallest, their sum being what it is; of
    equally good ones, early slices are longer.

    Args:
        seq_len: tokens of a sequence.
        n: how many slices, from 1 to seq_len.
        linear: cost of a token by itself, 0 or more.
        quadratic: cost of a token for each one that it looks at, 0 or more; only the ratio of the two matters.

    Returns:
        The lengths, at least 1 each, first slice first.

    Raises:
        ShapeError: there are fewer tokens than slices, or no slice.
        ConfigError: a cost is negative or not finite.

    Cost: n seq_len passes over at most seq_len numbers.
    """
    if not 1 <= n <= seq_len:
        raise ShapeError(f"{n} slices of a sequence of {seq_len} tokens: wanted are 1 to {seq_len}.")
    for name, each in (("linear", linear), ("quadratic", quadratic)):
        if not (each >= 0 and math.isfinite(each)):
            raise ConfigError(f"the {name} cost of a slice is {each}: costs are finite and not below 0.")
    # The cost of a slice is F(its end) - F(its beginning).  In this unit F is exact where only one of the terms counts,
    # so that equally good slicings are found equal.
    x = np.arange(seq_len + 1, dtype=np.float64)
    ratio = quadratic / linear if linear else math.inf
    sums = x * x if ratio == math.inf and quadratic else x + (ratio * x * x / 2 if linear else 0.0)
    squares = sums * sums  # of one slice
    before = []
    for i in range(1, n):
        longer, starts = np.full(seq_len + 1, math.inf), np.zeros(seq_len + 1, np.int64)
        for stop in range(i + 1, seq_len + 1):
            ways = squares[i:stop] + (sums[stop] - sums[i:stop]) ** 2
            last = len(ways) - 1 - int(ways[::-1].argmin())  # the shortest last slice of equally good ones
            longer[stop], starts[stop] = ways[last], i + last
        squares = longer
        before.append(starts)
    return [stop - start for start, stop in pairwise(_cuts(before, seq_len))]


def _cuts(before: list[np.ndarray], stop: int) -> list[int]:
    """Where slices begin and end, from where the last of each number of slices begins."""
    cuts = [stop]
    for starts in reversed(before):
        cuts.append(int(starts[cuts[-1]]))
    return [0, *reversed(cuts)]


# ------------------------------------------------------------------------------------------------- dynamic programming


def _times(n: int, unit: int, cost: Cost) -> np.ndarray:
    """(n + 1, n + 1) the time of a slice by where it ends and where it begins, in units; infinite where none is."""
    times = np.full((n + 1, n + 1), math.inf)
    for stop in range(1, n + 1):
        for start in range(stop):
            tokens, before = (stop - start) * unit, start * unit
            time = cost(tokens, before)
            if not (time >= 0 and math.isfinite(time)):
                raise ConfigError(
                    f"the cost of a slice of {tokens} tokens after {before} is {time}: costs are finite, 0 or more."
                )
            times[stop, start] = time
    return times


@dataclass(frozen=True)
class _Slicing:
    """The best slicing under some limit: sum of the times, index of the largest among all times, where it is cut."""

    total: float
    largest: int
    cuts: list[int]


def _under(times: np.ndarray, limits: np.ndarray, which: int) -> _Slicing | None:
    """S(s; t) for one limit, the inner dynamic programme; None: no slicing keeps it."""
    n = len(times) - 1
    best, before = np.zeros(n + 1), [0] * (n + 1)
    for stop in range(1, n + 1):
        row = times[stop, :stop]
        ways = np.where(row <= limits[which], best[:stop] + row, math.inf)
        before[stop] = int(ways.argmin())  # the longest last slice of equally good ones: fewer slices
        best[stop] = ways[before[stop]]
    if best[n] == math.inf:
        return None
    cuts = [n]
    while cuts[-1]:
        cuts.append(before[cuts[-1]])
    cuts.reverse()
    largest = max(times[stop, start] for start, stop in pairwise(cuts))
    return _Slicing(float(best[n]), int(np.searchsorted(limits, largest)), cuts)


def _search(times: np.ndarray, microbatches: int, waits: int) -> list[int]:
    """The cuts that make microbatches * total + waits * largest smallest.

    Between a limit that was tried and a lower one, totals are no smaller than at the upper and limits no lower than at
    the lower end: where that is no better than the best so far, nothing between them need be tried.
    """
    limits = np.unique(times[np.isfinite(times)])

    def value(slicing: _Slicing) -> float:
        return microbatches * slicing.total + waits * float(limits[slicing.largest])

    free = _under(times, limits, len(limits) - 1)
    assert free is not None
    lowest = bisect_left(range(len(limits)), True, key=lambda which: _under(times, limits, which) is not None)
    tight = _under(times, limits, lowest)
    assert tight is not None
    best = min(free, tight, key=value)
    gaps = [(lowest, free)]
    while gaps:
        low, above = gaps.pop()
        if above.largest - low < 2 or microbatches * above.total + waits * float(limits[low + 1]) >= value(best):
            continue
        middle = _under(times, limits, (low + above.largest) // 2)
        assert middle is not None
        best = min(best, middle, key=value)
        gaps += [(low, middle), ((low + above.largest) // 2, above)]
    return best.cuts
