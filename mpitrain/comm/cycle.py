"""Who waits for whom: ranks in a ring of waiting can never go on.

A rank that waits in the n-th collective call of a channel waits for every member that has entered fewer than n of that
channel.  If that member waits too, in another call, for another rank, and so on back to the first, nothing can end it:

    rank 0 waits in all_reduce on world, call 12        rank 1 has entered 11 of those ...
    rank 1 waits in all_reduce on dp, call 8            ... and waits for rank 0, which has entered 7 of these

Everything is read from the pages of one host; a proof by counts, not by time.  Pages change while they are read, so a
ring counts only if it is the same at two looks.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpitrain.comm.page import Page

Ring = tuple[tuple[int, int], ...]
"""(rank, ordinal of the call that it waits in), in the order of waiting."""


def ring(pages: Mapping[int, Page], start: int) -> Ring | None:
    """A ring of waiting that holds rank `start`, or None.

    Args:
        pages: of the ranks that can be seen; others are taken to be able to go on.
        start: where to begin.
    """
    waiting = {}
    for rank, page in pages.items():
        call = page.current()
        if call is not None and call.peer < 0:
            waiting[rank] = call
    if start not in waiting:
        return None
    counts = {rank: pages[rank].counts() for rank in waiting}
    paths: list[tuple[int, ...]] = [(start,)]
    seen = {start}
    while paths:
        path = paths.pop()
        call = waiting[path[-1]]
        for rank, entered in counts.items():
            if entered.get(call.key, call.number) >= call.number:  # it is there, or it is no member
                continue
            if rank == start:
                return tuple((member, waiting[member].ordinal) for member in path)
            if rank not in seen:
                seen.add(rank)
                paths.append((*path, rank))
    return None
