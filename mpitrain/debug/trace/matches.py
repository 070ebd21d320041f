"""Which spans of different ranks are one message.

    found = matched(trace)
    for pair in found.pairs:                                      a message between two: an arrow from
        trace of pair["source"] .spans[pair["sent"]]["start"]     where its send began
        trace of pair["dest"]   .spans[pair["got"]]["stop"]       to where it had come
    found.meetings                                                who took part in each collective

Messages of two ranks are matched by axis, tag and number, calls of an axis by step, verb and number: both sides count
alike.  What stands twice, as after a second mesh of the same ranks has begun to count again, is ambiguous and left out,
so that every match is a true one.  What a rank of which there is no file did, or what a full trace has lost, matches
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from mpitrain.comm.payload import LIKE_BLOCKING
from mpitrain.debug.trace.records import KIND, RankTrace, Trace

Array = np.ndarray[Any, Any]

PAIR = np.dtype([(name, "<i8") for name in ("source", "sent", "dest", "got", "asked", "gone")])
"""A message between two ranks of the world, by numbers of their spans.

sent: the send or isend; got: at its stop the message had come: the recv, the wait for an irecv, or an arrival; asked:
the recv or irecv; gone: at its stop the send was complete: itself, the wait for it, or -1 where nobody waited.
"""

MEETING = np.dtype([*((name, "<i8") for name in ("meeting", "rank", "span", "done", "of")), ("binds", "?")])
"""One rank's part in a collective: `span` is its call, `done` the span at whose stop it had its result, -1 where that
is not in the trace.  `of`: the one rank that its result comes from, as in a broadcast; -1: from all.  `binds`: nobody
has the result before this rank has called."""

VERBS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "shift", "barrier", "exchange"),
    *("send", "recv"),
)
_SEND, _RECV = VERBS.index("send"), VERBS.index("recv")
_FROM_ONE = VERBS.index("broadcast"), VERBS.index("shift")
_SHAPE = re.compile(r"\(((?:[0-9]{1,15},? ?){0,64})\) ([a-z_]{1,20}?([0-9]{1,3})?)")
_BINDING = ("all_reduce", "barrier", "exchange")
_CALL = np.dtype([(name, "<i8") for name in ("axis", "verb", "peer", "tag", "number", "step", "rank", "span", "done")])
_OF_A_CALL = ("axis", "verb", "peer", "tag", "number")  # what a wait and an arrival share with it


@dataclass(frozen=True)
class Matched:
    """Messages of which both sides are known.

    pairs: array of PAIR; meetings: array of MEETING, those of a meeting together, and at least two of them.
    """

    pairs: Array
    meetings: Array


def matched(trace: Trace) -> Matched:
    """Find the messages.

    Cost: sorts the spans of messages a few times; ops cost nothing.
    """
    axes: dict[tuple[str, tuple[int, ...]], int] = {}
    calls = [_calls(rank, axes) for rank in trace.ranks]
    found = np.concatenate([np.zeros(0, _CALL), *calls])
    ranks = {rank.rank: rank for rank in trace.ranks}
    return Matched(_pairs(found), _meetings(found, ranks, [members for _, members in axes]))


def _calls(rank: RankTrace, axes: dict[tuple[str, tuple[int, ...]], int]) -> Array:
    """The messages of one rank, each with the span in which it was complete."""
    at = np.flatnonzero(np.isin(rank.spans["kind"], [KIND[kind] for kind in ("message", "wait", "arrival")]))
    spans = rank.spans[at]
    known = {name: members for name, members in rank.axes.items() if rank.rank in members}
    numbers = {name: axes.setdefault((name, tuple(known[name])), len(axes)) for name in known}
    axis = np.array([numbers.get(text, -1) for text in rank.strings], np.int64)
    verb = np.array([_verb(text) for text in rank.strings], np.int64)
    posts = np.array([text in LIKE_BLOCKING for text in rank.strings])
    table = np.zeros(at.size, _CALL)
    table["axis"], table["verb"], table["span"] = axis[spans["axis"]], verb[spans["name"]], at
    for name in ("tag", "number", "step"):
        table[name] = spans[name]
    table["peer"] = _in_the_world(spans["peer"], table["axis"], {numbers[name]: known[name] for name in known})
    table["rank"] = rank.rank
    good = (table["axis"] >= 0) & (table["verb"] >= 0) & ((table["peer"] >= 0) == (table["verb"] >= _SEND))
    table, spans, at = table[good], spans[good], at[good]
    is_call = spans["kind"] == KIND["message"]
    waits = is_call & posts[spans["name"]]
    table["done"] = np.where(waits | ~is_call, -1, table["span"])
    _complete(table, spans["start"], is_call, waits)
    return table[is_call]


def _verb(text: str) -> int:
    verb = LIKE_BLOCKING.get(text, text)
    return VERBS.index(verb) if verb in VERBS else -1


def _in_the_world(peers: Array, axis: Array, members: dict[int, Sequence[int]]) -> Array:
    """Peers by their ranks in the world; -1 for collectives, -2 for what is no rank of its axis."""
    found = np.where(peers < 0, -1, -2).astype(np.int64)
    for number, ranks in members.items():
        here = (axis == number) & (peers >= 0) & (peers < len(ranks))
        found[here] = np.asarray(ranks, np.int64)[peers[here]]
    return found


def _complete(table: Array, start: Array, is_call: Array, waits: Array) -> None:
    """Give each call that did not block its wait, or where nobody waited its arrival: the next of its number."""
    order, first = _grouped([table[name] for name in _OF_A_CALL], [start, ~is_call])
    followed = order[:-1][~first[1:]], order[1:][~first[1:]]
    completes = waits[followed[0]] & ~is_call[followed[1]]
    table["done"][followed[0][completes]] = table["span"][followed[1][completes]]


def _grouped(columns: Sequence[Array], within: Sequence[Array] = ()) -> tuple[Array, Array]:
    """The order in which rows of equal columns stand together, and where in it a new group begins."""
    order = np.lexsort([*reversed([*columns, *within])])
    first = np.ones(order.size, bool)
    if order.size:
        first[1:] = np.logical_or.reduce([column[order[1:]] != column[order[:-1]] for column in columns])
    return order, first


def _pairs(calls: Array) -> Array:
    """Sends and receives of one number; exactly one of each, else it is not known which is which."""
    calls = calls[calls["verb"] >= _SEND]
    sends = calls["verb"] == _SEND
    source = np.where(sends, calls["rank"], calls["peer"])
    dest = np.where(sends, calls["peer"], calls["rank"])
    columns = [calls["axis"], source, dest, calls["tag"], calls["number"]]
    order, first = _grouped(columns, [calls["verb"]])
    starts = np.flatnonzero(first)
    starts = starts[np.diff(np.append(starts, order.size)) == 2]
    a, b = calls[order[starts]], calls[order[starts + 1]] if starts.size else calls[:0]
    good = (a["verb"] == _SEND) & (b["verb"] == _RECV) & (b["done"] >= 0)
    pairs = np.zeros(int(good.sum()), PAIR)
    pairs["source"], pairs["sent"], pairs["gone"] = a["rank"][good], a["span"][good], a["done"][good]
    pairs["dest"], pairs["asked"], pairs["got"] = b["rank"][good], b["span"][good], b["done"][good]
    return pairs


def _meetings(calls: Array, ranks: dict[int, RankTrace], members: Sequence[Sequence[int]]) -> Array:
    """Collectives of one step, verb and number; each rank once.  `members`: of each axis, by its number."""
    calls = calls[calls["verb"] < _SEND]
    order, first = _grouped([calls[name] for name in ("axis", "verb", "step", "number")], [calls["rank"]])
    calls = calls[order]
    group = np.cumsum(first) - 1
    size = np.bincount(group, minlength=1)
    twice = ~first & (calls["rank"] == np.roll(calls["rank"], 1))
    bad = np.bincount(group, weights=twice, minlength=1) > 0
    keep = (size >= 2) & ~bad
    calls, group = calls[keep[group]], group[keep[group]]
    meetings = np.zeros(calls.size, MEETING)
    meetings["meeting"] = np.unique(group, return_inverse=True)[1]
    for name in ("rank", "span", "done"):
        meetings[name] = calls[name]
    meetings["of"] = -1
    for number, rank in ranks.items():
        here = np.flatnonzero(calls["rank"] == number)
        meetings["binds"][here] = _binds(rank, calls[here])
        one = here[np.isin(calls["verb"][here], _FROM_ONE)]
        alike, which = np.unique(calls[["axis", "verb", "tag"]][one], return_inverse=True)
        sources = [_source(rank, members[call["axis"]], call) for call in alike]
        meetings["of"][one] = np.array(sources, np.int64)[which]
    return meetings


def _source(rank: RankTrace, members: Sequence[int], call: Any) -> int:
    """The rank from which a broadcast or a shift comes; their tag is the root, or the distance."""
    if call["verb"] == VERBS.index("shift"):
        return int(members[(members.index(rank.rank) - int(call["tag"])) % len(members)])
    return int(members[call["tag"]]) if 0 <= call["tag"] < len(members) else -1


def _binds(rank: RankTrace, calls: Array) -> Array:
    """Whether everybody's result depends on what this rank brings.

    Not where it brings nothing: MPI may not wait for an empty array.  Of gathers those of equal slices count, which
    bytes tell; how others cut, a trace does not know.
    """
    spans = rank.spans[calls["span"]]
    nbytes = np.array([_nbytes(text) for text in rank.strings])[spans["shape"]]
    others = np.array([len(rank.axes.get(text, ())) - 1 for text in rank.strings])[spans["axis"]]
    barrier, gather = VERBS.index("barrier"), VERBS.index("all_gather")
    whole = np.isin(calls["verb"], [VERBS.index(verb) for verb in _BINDING])
    even = (calls["verb"] == gather) & (spans["bytes"] > 0.99 * others * nbytes)
    return (whole | even) & ((calls["verb"] == barrier) | (nbytes > 0))


def _nbytes(shape: str) -> float:
    """Bytes of an array that is written as `(4, 512) float32`; 0 where that cannot be read."""
    written = _SHAPE.fullmatch(shape)
    if written is None:
        return 0.0
    bits = 8 if written[2] == "bool" else int(written[3] or 0)
    return bits / 8 * prod(float(size) for size in written[1].split(",") if size.strip())
