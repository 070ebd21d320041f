"""Who waits for whom: ranks in a ring of waiting can never go on.

A rank that waits in the n-th collective call of a channel waits for every member that has entered fewer than n of that
channel; one that waits for the n-th message of another rank waits for it until that has sent n.  If that rank waits
too, in another call, for another rank, and so on back to the first, nothing can end it:

    rank 0 waits in all_reduce on world, call 12        rank 1 has entered 11 of those ...
    rank 1 waits in all_reduce on dp, call 8            ... and waits for rank 0, which has entered 7 of these

Everything is read from the pages of one host; a proof by counts, not by time.  Pages change while they are read, so a
ring counts only if it is the same at two looks.  A blocking send is no proof: a short one ends by itself, before
anybody receives.  Rings that need one must last (watch.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mpitrain.comm.page import Call, Page, answer_key, entered

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
        if call is not None and not call.verb.startswith(("isend", "irecv")):  # those wait for nobody
            waiting[rank] = call
    if start not in waiting:
        return None
    counts = {rank: pages[rank].counts() for rank in waiting}
    paths: list[tuple[int, ...]] = [(start,)]
    seen = {start}
    while paths:
        path = paths.pop()
        for rank in _missing(waiting[path[-1]], counts):
            if rank == start:
                return tuple((member, waiting[member].ordinal) for member in path)
            if rank not in seen:
                seen.add(rank)
                paths.append((*path, rank))
    return None


def _missing(call: Call, counts: Mapping[int, Mapping[int, int]]) -> Iterator[int]:
    """Those of the ranks that wait, for whom a call waits."""
    if call.peer >= 0:
        partner = counts.get(call.partner)  # without a key of its own the call's page is too full to prove anything
        if call.key and partner is not None and not entered(partner, answer_key(call.key), call.number):
            yield call.partner
        return
    for rank, of_rank in counts.items():
        is_member = rank in call.members or call.key in of_rank  # members may not have made the axis yet
        if is_member and not entered(of_rank, call.key, call.number):
            yield rank
