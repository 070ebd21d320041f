"""Which rank left the path that all went together, and the last call on it.

    CollectiveMismatch: ranks wait for each other, none can go on.  Rank 2 left the path: a new turn for it alone.
      ranks 0,1 wait in all_reduce on world, call 7, (4,) float64, at train.py:31
      rank 2 waits in all_reduce on dp, call 1, (4,) float64, at train.py:29
      Last common call: barrier on world, call 6, (0,) uint8, at train.py:27

Two ranks that make different calls look alike from outside: each may be the one that is wrong.  What tells them apart
is their past, since programs of ranks are loops.  A rank notes every *turn* it takes, from one call to the next one, in
checked mode (threads of one process always); a turn that it has not taken before, though it went known ways until now,
is new.  Where some ranks took a new turn and others a known one, the former left the path.  Otherwise a rank that has
ended left those that wait for it, and where most ranks stand together the others left them.  Else nobody can know.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from mpitrain.comm.page import Call, answer_key
from mpitrain.comm.places import MOST_PLACES, by_place, named

MAX_LINES = 5  # of a report, before more is told
_KEPT = 1 << 16  # turns that are remembered; a program that takes more is not judged by them


Doing = tuple[str, str, str]
"""What a rank does: a verb for one rank, the same for several, and the rest."""


class Turns:
    """The turns that one rank has taken."""

    def __init__(self) -> None:
        self._taken: set[tuple[int, int]] = set()
        self._last = 0
        self._knows_its_way = False

    def is_new(self, call: int) -> bool:
        """Note the next call.

        Args:
            call: a number, equal where the same thing is done in the same place again.

        Returns:
            Whether that is a new turn, of a rank that has taken turns twice before.
        """
        turn = self._last, call
        self._last = call
        if turn in self._taken:
            self._knows_its_way = True
            return False
        if len(self._taken) >= _KEPT:
            return False
        self._taken.add(turn)
        return self._knows_its_way


class Standing(NamedTuple):
    """Where one rank stands: its last calls, the newest at the end, how often it entered each channel, and whether ...

    waits: for others, in the last of these calls; has_left: it enters no more.
    """

    calls: Sequence[Call]
    counts: Mapping[int, int]
    waits: bool
    has_left: bool


def last_common_call(standings: Mapping[int, Standing]) -> Call | None:
    """The last call that all of these ranks have made, as far as they remember.

    Args:
        standings: by rank of the world; two at least.
    """
    now = {(call.key, call.number) for s in standings.values() if s.waits for call in s.calls[-1:]}
    now |= {(answer_key(key), number) for key, number in now}
    first, *others = standings
    for call in reversed(standings[first].calls):
        if call.is_wait or not call.key or (call.key, call.number) in now:
            continue
        if call.peer >= 0:
            is_common = others == [call.partner] and _entered(standings[others[0]], answer_key(call.key), call.number)
        else:
            is_common = all(_entered(standings[other], call.key, call.number) for other in others)
        if is_common:
            return call
    return None


def _entered(standing: Standing, key: int, number: int) -> bool:
    return standing.counts.get(key, 0) >= number


def who_left(standings: Mapping[int, Standing], common: Call | None) -> str:
    """`Rank 2 left the path: ...`, or "" where nobody can know.

    Args:
        standings: of ranks that wait in calls that do not fit, or have left.
        common: their last common call.
    """
    waiting = {rank: s for rank, s in standings.items() if s.waits}
    return judged(
        {rank: any(call.is_new for call in _since(s.calls, common)) for rank, s in waiting.items()},
        {rank: (s.calls[-1].key & ~1, s.calls[-1].number, s.calls[-1].verb) for rank, s in waiting.items()},
        [rank for rank, s in standings.items() if s.has_left],
        any(_has_been_here(s.calls) for s in waiting.values()),
    )


def _has_been_here(calls: Sequence[Call]) -> bool:
    *before, now = calls
    here = now.axis, now.verb, now.site
    return bool(now.site) and any((call.axis, call.verb, call.site) == here for call in before)


def _since(calls: Sequence[Call], common: Call | None) -> Sequence[Call]:
    """The calls after that one; the last one where it is not among them."""
    if common is not None:
        for at in range(len(calls) - 1, -1, -1):
            if (calls[at].key | 1, calls[at].number) == (common.key | 1, common.number) and not calls[at].is_wait:
                return calls[at + 1 :]
    return calls[-1:]


def judged(
    new: Mapping[int, bool], places: Mapping[int, Hashable], ended: Sequence[int] = (), have_been_here: bool = False
) -> str:
    """`Rank 2 left the path: ...`, or "" where nobody can know.

    Args:
        new: whether a rank has taken a new turn since they were together.
        places: what it calls; equal where ranks stand together.
        ended: ranks that make no more calls.
        have_been_here: whether ranks that wait for those have been in their places before.
    """
    turned = [rank for rank, is_new in new.items() if is_new]
    if turned and (ended or len(turned) < len(new)):
        return left(turned, f"a new turn for {'it' if len(turned) == 1 else 'them'} alone")
    groups = [*by_place(places.items()).values(), *([[*ended]] if ended else [])]
    total = sum(len(group) for group in groups)
    most = max(groups, key=len, default=[])
    if ended and (have_been_here or 2 * len(ended) < total):
        return left(ended, "it has ended" if len(ended) == 1 else "they have ended")
    if 2 * len(most) > total > len(most):
        others = sorted(rank for group in groups if group is not most for rank in group)
        return left(others, f"the other {len(most)} are together")
    return ""


def deadlock_report(head: str, standings: Mapping[int, Standing], places: Sequence[tuple[int, Doing]]) -> list[str]:
    """Ranks that cannot go on, in five lines at most: who left the path, where all stand, the last common call.

    Args:
        head: the first line, which the sentence about the path joins.
        standings: of the ranks that it is about.
        places: rank, and what it does.
    """
    common = last_common_call(standings) if len(standings) > 1 else None
    who = who_left(standings, common)
    lines = [f"{head}  {who}" if who else head, *places_told(places, MAX_LINES - 1 - (common is not None))]
    return [*lines, f"  {common_words(common)}"] if common else lines


def places_told(places: Sequence[tuple[int, Doing]], most: int) -> list[str]:
    """At most so many lines: ranks that do the same stand together; the last line may hold several places."""
    lines = [
        f"  {named(sorted(ranks))} {several if len(ranks) > 1 else one}{rest}"
        for (one, several, rest), ranks in by_place(places).items()
    ]
    if len(lines) <= most:
        return lines
    shown = max(MOST_PLACES, most)
    rest = [line.strip() for line in lines[most - 1 : shown]]
    more = [f"and {len(lines) - shown} more places"] if len(lines) > shown else []
    return [*lines[: most - 1], "  " + "; ".join([*rest, *more])]


def left(ranks: Sequence[int], why: str) -> str:
    """The sentence of all reports."""
    return f"{named(ranks).capitalize()} left the path: {why}."


def common_words(call: Call | str | None) -> str:
    """`Last common call: ...`, or "" where none is known."""
    if not call:
        return ""
    return f"Last common call: {call if isinstance(call, str) else call.told}"


def second_line(*parts: str) -> str:
    """What stands under a report of one line: those of the parts that are known; "" if none is."""
    known = "  ".join(part for part in parts if part)
    return f"\n  {known}" if known else ""
