"""Who is behind: the ranks for which, in the end, all those wait that wait too long.

    rank 3 waits in all_reduce on dp, call 8        rank 1 has entered 7 of those ...
    rank 1 waits in recv from rank 0, call 20       ... and rank 0 has sent 19 of these ...
    rank 0 is in no call                            ... so rank 0 is behind

From a rank that waits the way goes to each rank that has not entered the call, and on from there; it ends at ranks that
wait for nobody: in no call, in a call that all its members have entered, or with a process that stands still.  Those
never answer, also where they have entered the call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from mpitrain.comm.page import Call, Page, answer_key, entered


def behind(pages: Mapping[int, Page], start: int, partners: Sequence[int], still: Collection[int]) -> list[int] | None:
    """The ranks for which rank `start` waits in the end.

    Args:
        pages: of the ranks that can be seen; of others nothing is said.
        start: a rank that waits.
        partners: the other ranks of its call; members of others' calls stand on their pages, or have the axis, too.
        still: ranks whose processes stand still.

    Returns:
        Them, in order.  Empty: all that can be seen have entered the call of `start`.  None: it waits for ranks that
        wait for each other.
    """
    calls = {rank: page.current() for rank, page in pages.items()}
    counts = {rank: page.counts() for rank, page in pages.items()}
    ends: list[int] = []
    seen, ahead = {start}, [start]
    first = True
    while ahead:
        rank = ahead.pop()
        call = None if rank in still else calls[rank]
        found = [] if call is None else list(_missing(call, rank, counts, still, partners if first else ()))
        if not found:
            if first:
                return []
            ends.append(rank)
        first = False
        ahead += [other for other in found if other not in seen]
        seen.update(found)
    return sorted(ends) or None


def _missing(
    call: Call, own: int, counts: Mapping[int, Mapping[int, int]], still: Collection[int], partners: Sequence[int]
) -> Iterator[int]:
    """The ranks for which a call waits."""
    if call.verb.startswith(("isend", "irecv")):  # they wait for nobody
        return
    if call.peer >= 0:
        partner = counts.get(call.partner)
        answered = partner is None or (call.key and entered(partner, answer_key(call.key), call.number))
        if partner is not None and (not answered or call.partner in still):
            yield call.partner
        return
    for rank, of_rank in counts.items():
        is_member = rank in partners or rank in call.members or call.key in of_rank
        if rank != own and is_member and (rank in still or not entered(of_rank, call.key, call.number)):
            yield rank
