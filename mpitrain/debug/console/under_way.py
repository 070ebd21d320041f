"""What is under way between ranks that are threads: who waits for whom, and messages that nobody has taken yet.

Read from what the transport itself keeps (comm/threads.py), so it is exact: a collective is there with those that have
come to it, a message from rank to rank with the side that has asked for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mpitrain.comm.baton import Wait
from mpitrain.comm.places import by_place
from mpitrain.comm.threads import Group, LocalTransport
from mpitrain.debug.console.words import named, runs
from mpitrain.debug.stepper import View

MOST_LINES = 40  # of messages under way


class Pending(NamedTuple):
    """A message that is not complete.

    axis: it is on; what: the call, in words; here: ranks that have asked for it, each with its wait; missing: ranks
    that have not.
    """

    axis: str
    what: str
    here: tuple[tuple[int, Wait], ...]
    missing: tuple[int, ...]


def groups(views: Iterable[View]) -> Iterator[Group]:
    """All communicators of more than one rank, each once; the world first."""
    for view in views:
        transport = view.world.transport
        if isinstance(transport, LocalTransport):
            yield from _below(transport.shared)
            return


def _below(group: Group) -> Iterator[Group]:
    yield group
    for each in group.groups.values():
        yield from _below(each)


def pending(views: Iterable[View]) -> list[Pending]:
    """All that is under way."""
    found = []
    for group in groups(views):
        ranks = group.ranks
        for parts in group.meetings.values():
            here = tuple((ranks[member], part.wait) for member, part in sorted(parts.items()))
            missing = tuple(rank for member, rank in enumerate(ranks) if member not in parts)
            found.append(Pending(group.name, words(here[0][1]), here, missing))
        for letters, sends in ((group.sent, True), (group.wanted, False)):
            for (source, dest, _), waiting in letters.items():
                mine, theirs = (source, dest) if sends else (dest, source)
                for letter in waiting:
                    here = ((ranks[mine], letter.wait),)
                    found.append(Pending(group.name, words(letter.wait), here, (ranks[theirs],)))
    return found


def words(wait: Wait) -> str:
    """`all_reduce (4, 64) float32`, without ranks and axis, which stand apart."""
    call = wait.call
    if call is None:
        return wait.verb
    return f"{call.verb.removeprefix('wait ')} {call.shape} {call.dtype}"


def axis_of(wait: Wait) -> str:
    """The axis on which it was asked for."""
    return wait.axis if wait.call is None else wait.call.axis


def waiting_for(views: Mapping[int, View], under_way: Sequence[Pending]) -> dict[int, tuple[int, ...]]:
    """By rank that waits, the ranks that it waits for."""
    found = {}
    for number, view in views.items():
        wait = view.waits
        if wait is not None:
            of = next((one for one in under_way if any(wait is each for _, each in one.here)), None)
            found[number] = () if of is None else of.missing
    return found


def ring(waiting: Mapping[int, Sequence[int]]) -> list[int]:
    """Ranks of which each waits for the next, and the last for the first; empty if there are none."""
    for start in waiting:
        paths, seen = [[start]], {start}
        while paths:
            path = paths.pop()
            for rank in waiting.get(path[-1], ()):
                if rank == start:
                    return path
                if rank not in seen:
                    seen.add(rank)
                    paths.append([*path, rank])
    return []


def told(views: Mapping[int, View]) -> str:
    """The answer to `waits`: who waits for whom and where, rings, what else is under way."""
    under_way = pending(views.values())
    waiting = waiting_for(views, under_way)
    lines = []
    for text, ranks in by_place((n, _wait_text(views[n])) for n in waiting).items():
        whom = {n: waiting[n] for n in ranks}
        lines.append(f"{_pairs(whom)}: {text}")
    if not waiting:
        lines.append("nobody waits")
    if any(not missing for missing in waiting.values()) and any(view.error is not None for view in views.values()):
        lines.append("! where nobody is named all have come, and their calls do not fit: see the report above")
    found = ring(waiting)
    if found:
        lines.append(f"! a ring: {' -> '.join(map(str, [*found, found[0]]))}: none of them can ever go on")
    gone = sorted({rank for missing in waiting.values() for rank in missing if rank in views and views[rank].rank.left})
    if gone:
        lines.append(f"! {named(gone)} {'has' if len(gone) == 1 else 'have'} ended, and will never come")
    rest = [one for one in under_way if not any(n in waiting and views[n].waits is wait for n, wait in one.here)]
    if rest:
        lines.append("under way, and nobody waits for it just now:")
        texts = _messages(rest)
        lines += [f"  {text}" for text in texts[:MOST_LINES]]
        if len(texts) > MOST_LINES:
            lines.append(f"  and {len(texts) - MOST_LINES} more")
    return "\n".join(lines)


def _pairs(waiting: Mapping[int, Sequence[int]]) -> str:
    """`ranks 1-3 wait for rank 0`, `rank 4 waits for rank 0, 5 for 1`; ranks that wait for the same ones together."""
    parts: list[str] = []
    for missing, ranks in by_place((rank, tuple(missing)) for rank, missing in waiting.items()).items():
        if parts:
            parts.append(f"{runs(ranks)} for {runs(missing)}" if missing else runs(ranks))
            continue
        many = "waits" if len(ranks) == 1 else "wait"
        parts.append(f"{named(ranks)} {many}" + (f" for {named(missing)}" if missing else ""))
    return ", ".join(parts)


def _wait_text(view: View) -> str:
    wait = view.waits
    assert wait is not None
    call = wait.call
    number = "" if call is None else f", call {call.number}" + (f", tag {call.tag}" if call.tag else "")
    return f"{words(wait)} on {axis_of(wait)}{number}, at {wait.site}"


def _messages(under_way: Sequence[Pending]) -> list[str]:
    """Messages in words; those that differ only in their ranks share a line."""
    together: dict[tuple[str, ...], dict[str, int]] = {}
    for one in under_way:
        wait = one.here[0][1]
        call = wait.call
        tag = f", tag {call.tag}" if call is not None and call.tag else ""
        if call is not None and call.peer >= 0:
            sends = "send" in call.verb
            way = f"{one.here[0][0]} {'->' if sends else '<-'} {one.missing[0]}"
            state = "not received yet" if sends else "not sent yet"
        else:
            way, state = runs(rank for rank, _ in one.here), f"{named(one.missing)} not there yet"
        counts = together.setdefault((f"{one.what} on {one.axis}{tag}", wait.site, state), {})
        counts[way] = counts.get(way, 0) + 1
    texts = []
    for (what, site, state), counts in together.items():
        ways = ", ".join(way + (f" ({count} times)" if count > 1 else "") for way, count in counts.items())
        texts.append(f"{ways}  {what}, from {site}: {state}")
    return texts
