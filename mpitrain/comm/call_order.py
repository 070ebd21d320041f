"""Do all members of an axis make calls that look alike in the same order?

Two sums of one shape that are swapped on one rank fit each other, and values go into the wrong arrays:

    rank 0   all_reduce(a)   all_reduce(b)
    rank 1   all_reduce(b)   all_reduce(a)

Only the places in the program tell.  But different places in one call prove nothing: a program may well say

    if rank == 0:   log(axis.all_reduce(loss))
    else:           axis.all_reduce(x)

The difference is that rank 1 never comes to rank 0's line.  So each rank's places are added up, as random numbers that
stand for them, and the sums of neighbours are subtracted.  While both make the same calls the difference stays as it
is.  Where they part it changes, and it comes back to an earlier value when both have made the same calls since then,
though in another order: that is a swap.  It shows at the last of the calls that are involved.

A place is file, function and the words of the call (site.py), not the line: what stands in both branches is one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

_MASK = (1 << 64) - 1
_KEPT = 4096  # values of a difference that are remembered; calls that are further apart are not taken for swapped


class Swap(NamedTuple):
    """Two members who have made the same calls in another order, since call `first`."""

    one: int
    other: int
    first: int


class CallOrder:
    """The order of calls of one communicator, kept for each kind of calls that fit each other."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[_Difference]] = {}

    def swap(self, kind: str, number: int, places: Sequence[int]) -> Swap | None:
        """Note a call in which places differ.

        Args:
            kind: what calls have in common that fit each other.
            number: of the call.
            places: one a member.

        Returns:
            The first two neighbours who have now made the same calls in another order.
        """
        pairs = list(pairwise(places))
        differences = self._kinds.setdefault(kind, [_Difference() for _ in pairs])
        found = [difference.add(number, a - b) for difference, (a, b) in zip(differences, pairs, strict=True)]
        return next((Swap(member, member + 1, first) for member, first in enumerate(found) if first), None)


class _Difference:
    """Of the sums of the places of two members."""

    def __init__(self) -> None:
        self._now = 0
        self._seen: dict[int, int] = {}  # value -> the call that changed it, the newest at the end

    def add(self, number: int, change: int) -> int:
        """Note call `number`; from which call on the two made the same ones, 0 if they did not."""
        if change == 0:
            return 0
        self._seen.pop(self._now, None)
        self._seen[self._now] = number
        self._now = (self._now + change) & _MASK
        if len(self._seen) > _KEPT:
            del self._seen[next(iter(self._seen))]
        return self._seen.get(self._now, 0)
