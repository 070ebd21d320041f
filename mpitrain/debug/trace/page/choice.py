"""Which spans of a long trace go into its page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitrain.debug.trace.records import KIND, RankTrace, Trace

DETAIL = ("op", "unit")
"""Kinds that are left out first: they are many, and the picture is whole without them."""

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Choice:
    """The spans that go into a page.

    Attributes:
        kept: for each rank which of its spans.
        first: the first step that is in it; first_detailed: the first whose ops are, and what memory was held.
        left_out: what is not, in words; empty where all is.
    """

    kept: list[Numbers]
    first: int
    first_detailed: int
    left_out: str


def choose(trace: Trace, most: int) -> Choice:
    """At most about this many spans: ops of old steps go first, then old steps as a whole; the newest step stays."""
    steps, details, others = _counted(trace)
    too_many = int(details.sum() + others.sum()) - most
    details_from = _first_kept(steps, details, too_many)
    too_many -= int(details[steps < details_from].sum())
    first = _first_kept(steps, others, too_many)
    details_from = max(details_from, first)
    kept = [rank.spans["step"] >= np.where(_is_detail(rank), details_from, first) for rank in trace.ranks]
    said = []
    if details[steps < details_from].any():
        said.append(f"ops before step {details_from} and outside of steps")
    if others[steps < first].any():
        said.append(f"everything before step {first} and outside of steps")
    return Choice(kept, first, details_from, ", ".join(said))


def _is_detail(rank: RankTrace) -> Numbers:
    return np.isin(rank.spans["kind"], [KIND[kind] for kind in DETAIL])


def _counted(trace: Trace) -> tuple[Numbers, Numbers, Numbers]:
    """The steps of all ranks, ascending, and for each how many details and other spans it has."""
    steps = np.unique(np.concatenate([np.zeros(0, np.uint32), *(rank.spans["step"] for rank in trace.ranks)]))
    counts = np.zeros((2, len(steps)), np.int64)
    for rank in trace.ranks:
        place, detail = np.searchsorted(steps, rank.spans["step"]), _is_detail(rank)
        counts[0] += np.bincount(place[detail], minlength=len(steps))
        counts[1] += np.bincount(place[~detail], minlength=len(steps))
    return steps, counts[0], counts[1]


def _first_kept(steps: Numbers, counts: Numbers, too_many: int) -> int:
    """The first step to be kept so that at least so many are left out, or all but those of the last step."""
    if too_many <= 0 or not len(steps):
        return 0
    gone = np.cumsum(counts)
    return int(steps[min(int(np.searchsorted(gone, too_many)) + 1, len(steps) - 1)])
