"""Where ranks stand, in few words.

    ranks 0,1,3 all_gather (4, 512) float32 at sequence.py:71; rank 2 reduce_scatter (8, 512) float32 at sequence.py:88

Ranks in the same place are named together, and no report is longer than a few places.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

Place = TypeVar("Place", bound=Hashable)

MOST_PLACES = 4  # that a report tells apart
_MOST_RANKS, _FIRST, _LAST = 12, 8, 2  # ranks of one place that are named, all or from both ends


def by_place(found: Iterable[tuple[int, Place]]) -> dict[Place, list[int]]:
    """Place -> the ranks there, places in the order of their first rank."""
    places: dict[Place, list[int]] = {}
    for rank, place in found:
        places.setdefault(place, []).append(rank)
    return places


def told(found: Sequence[tuple[int, str]]) -> str:
    """(rank, place) pairs as one line."""
    places = by_place(found)
    parts = [f"{named(ranks)} {place}" for place, ranks in places.items()]
    if len(parts) > MOST_PLACES:
        seen = sum(len(ranks) for ranks in list(places.values())[:MOST_PLACES])
        parts = [*parts[:MOST_PLACES], f"{len(found) - seen} more elsewhere"]
    return "; ".join(parts)


def named(ranks: Sequence[int]) -> str:
    """`rank 2`, or `ranks 0,1,3`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}"


def listed(ranks: Sequence[int]) -> str:
    """`0,1,3`, shortened in the middle where there are many."""
    texts = [str(rank) for rank in ranks]
    return ",".join(texts if len(texts) <= _MOST_RANKS else [*texts[:_FIRST], "...", *texts[-_LAST:]])
