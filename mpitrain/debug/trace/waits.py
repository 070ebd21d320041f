"""How long each message made its rank wait, and for whom.

    waited = waits(trace, clocks, messages)
    waited[3].ns[span], waited[3].whom[span]        of the spans of rank 3

A rank that stands in a message either waits until the others have come, or moves bytes:

    rank 0   |  all_reduce              |      called at 10, done at 31
             | waits for rank 2 | moves |
    rank 2   .  .  .  .  .  .  .| moves |      called at 25, done at 30

So a call, or the wait for one, is cut where the last of the others called: who that was is whom the rank waited for.  A
receive waits until its sender has called, a send that blocks until its receiver has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitrain.debug.trace.clocks import Clocks
from mpitrain.debug.trace.matches import Matched
from mpitrain.debug.trace.records import KIND, Trace

Array = np.ndarray[Any, Any]
_BITS = 21  # of the number of a rank


@dataclass(frozen=True)
class Waited:
    """The waits of one rank, for each of its spans.

    ns: that it waited for others, 0 for what is no message; whom: the rank that came last, -1: nobody.
    """

    ns: Array
    whom: Array


def waits(trace: Trace, clocks: Clocks, messages: Matched) -> dict[int, Waited]:
    """The waits of every rank of a trace."""
    start = {rank.rank: clocks.shared(rank.rank, rank.spans["start"]) for rank in trace.ranks}
    length = {rank.rank: rank.spans["stop"] - rank.spans["start"] for rank in trace.ranks}
    blocks = {
        rank.rank: np.isin(rank.spans["kind"], (KIND["message"], KIND["wait"])) & (length[rank.rank] > 0)
        for rank in trace.ranks
    }
    found = {rank: Waited(np.zeros(n.size, np.int64), np.full(n.size, -1)) for rank, n in length.items()}

    def book(rank: Array, span: Array, until: Array, whom: Array) -> None:
        for number in found:
            here = (rank == number) & (span >= 0)
            at = span[here]
            ns = np.clip(until[here] - start[number][at], 0, length[number][at])
            ns[~blocks[number][at]] = 0
            found[number].ns[at] = ns
            found[number].whom[at] = np.where(ns > 0, whom[here], -1)

    pairs, met = messages.pairs, messages.meetings
    book(pairs["dest"], pairs["got"], _of(start, pairs["source"], pairs["sent"]), pairs["source"])
    book(pairs["source"], pairs["gone"], _of(start, pairs["dest"], pairs["asked"]), pairs["dest"])
    book(met["rank"], met["done"], *_last_of_the_others(met, _of(start, met["rank"], met["span"])))
    return found


def _of(times: dict[int, Array], ranks: Array, spans: Array) -> Array:
    """The times of spans of several ranks."""
    found = np.zeros(ranks.size, np.int64)
    for number, of_rank in times.items():
        here = ranks == number
        found[here] = of_rank[spans[here]]
    return found


def _last_of_the_others(met: Array, called: Array) -> tuple[Array, Array]:
    """For each rank of a meeting when the last of the others called, and which rank that was.

    Of a broadcast and a shift when the one called from which the result comes; if it comes from the rank itself, then.
    """
    order = np.lexsort([called, met["meeting"]])
    group = met["meeting"][order]
    last = np.flatnonzero(np.append(group[1:] != group[:-1], np.ones(min(group.size, 1), bool)))
    latest, second = order[last], order[last - 1]
    number = np.searchsorted(group[last], met["meeting"])
    rows = np.arange(met.size)
    other = np.where(latest[number] == rows, second[number], latest[number]) if met.size else rows
    key = met["meeting"] << _BITS | met["rank"]
    by_key = np.argsort(key)
    wanted = met["meeting"] << _BITS | np.maximum(met["of"], 0)
    at = by_key[np.minimum(np.searchsorted(key, wanted, sorter=by_key), max(met.size - 1, 0))] if met.size else rows
    other = np.where((met["of"] >= 0) & (key[at] == wanted), at, other)
    return called[other], met["rank"][other]
