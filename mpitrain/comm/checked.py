"""Checked mode: ranks compare what they are about to do before they exchange data.

    world.set_checked()              every call of every axis, from here on
    with world.checked():            the calls of a block

Ranks of one axis that make different calls hang, or worse: the sum of one with the maximum of another, or two swapped
sums of one shape, give numbers, and MPI says nothing.  In checked mode every call leaves its fingerprint first
(fingerprint.py):

    collectives          each member sends its own to all others, with a tag of its own, and compares (comparison.py)
    send and recv        the sender's travels in a header message, with a tag of its own; the receiver compares
    non-blocking calls   the same, but the call returns at once; its data follows when the fingerprints agree
                         (in_check.py)

A difference is a `CollectiveMismatch` on all members, before any data has moved; of swapped calls that look alike
(call_order.py) at the last of them.  A member whose fingerprint does not come is the flight board's affair: watch.py
proves from its counts that a member has left, or that ranks wait for each other in different calls, and a member that
still runs is waited for until the time limit.  Threads of one process know it at once (baton.py).  Between hosts nobody
sees the counts of the others: what meets in one call of one axis is compared there, too, the rest is the time limit's.

Arrays that are being sent are checked as well: nobody may write them before the message is complete.  So are requests:
two must not write one array, and somebody must have waited for each before the program ends (open_requests.py).

Who follows the states of values (debug/states) tells the op that is going on (`Mode.within`), and reports have it:

    rank 2 reduce_scatter (8, 512) float32 at sequence.py:88 (reduce_scatter in blocks.0.mlp: Partial -> Shard(0))

Whoever reports a difference says which rank left the path, if that can be known, and the last common call (path.py).

Fingerprints are no events and are not counted as bytes sent: they are about messages, and none themselves.  They travel
from rank to rank and not as a collective, because MPI wants all collectives of a group in one order, and a call in
flight moves its data later than others on some ranks.

Cost: a collective of n ranks sends n-1 messages of 256 bytes a rank, and as many with the lengths of its blocks where
they are uneven; a message between two one more.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType
from typing import Any

import numpy as np

from mpitrain.comm.chunked import REST_TAG, Route, Several
from mpitrain.comm.comparison import AxisCalls, BlockLengths, Comparison, Header
from mpitrain.comm.fingerprint import UNEVEN, WORDS, Fingerprint, differ, fingerprint
from mpitrain.comm.in_check import Both, Later, Untouched
from mpitrain.comm.page import call_words, stable_hash
from mpitrain.comm.places import named
from mpitrain.comm.site import caller_of, site_of, words_of
from mpitrain.comm.transport import Array, Lane, Mode, Pending

HEADER_TAG = 16384  # + the tag of the message; above `MAX_TAG`, below the door's other tags
GATHER_TAG = REST_TAG - 2
LENGTHS_TAG = REST_TAG - 3
GROUP_TAG = REST_TAG - 4
_LONGEST_OP = 90  # characters
_SPREAD, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class Checks:
    """The checks of one communicator.

    Args:
        name: of the axis.
        ranks: of the world, in axis order.
        route: the way of messages.
        mode: of the world.
        lane: on the board of this rank.
    """

    def __init__(self, name: str, ranks: Sequence[int], route: Route, mode: Mode, lane: Lane) -> None:
        self._mode = mode
        self._lane = lane
        self._route = route
        self._rank, self._size = route.transport.rank, route.transport.size
        self._posts_later = route.transport.kind == "mpi"  # threads refuse by themselves what does not fit
        self._calls = AxisCalls(name, ranks)
        self._places: dict[tuple[CodeType, int] | None, tuple[int, str]] = {}
        self._collectives: deque[Later] = deque()  # whose data has not been posted, and receives by peer and tag
        self._receives: dict[tuple[int, int], deque[Later]] = {}
        # Of the call that is being made:
        self._mine: Fingerprint
        self._check: Pending
        self._queue: deque[Later]  # of those that come before it

    def post(self, number: int, verb: str, a: Array, how: tuple[Any, ...], peer: int) -> None:
        """Begin a call: leave its fingerprint; never blocks.

        Args:
            number: of the call.
            verb: its name.
            a: the array that this rank brings, or receives into.
            how: the further arguments.
            peer: the other rank in a point-to-point message, else -1.
        """
        place = self._place()
        within = self._mode.within
        mine = fingerprint(number, verb, a, how, place, self._mode.deterministic)
        way = hash((mine.kind, place[0], peer, how[1] if peer >= 0 else 0))
        if self._lane.place(place[1], way):
            mine = mine._replace(turn="new")
        if within:
            mine = mine._replace(site=f"{mine.site} ({within[:_LONGEST_OP]})")
        self._mine = mine
        words = np.frombuffer(mine.pack(), np.int64)
        route = self._route(WORDS)
        if peer < 0:
            rows, arrive = self._gather(words, GATHER_TAG)
            self._check, self._queue = Comparison(self._calls, mine, rows, arrive), self._collectives
            return
        tag = how[1]
        if "send" in verb:
            self._check = route.isend(words, peer, HEADER_TAG + tag)
            return
        theirs = np.empty(WORDS, np.int64)
        arrives = route.irecv(theirs, peer, HEADER_TAG + tag)
        self._check = Header(self._calls, mine, theirs, arrives, (peer, self._rank), tag)
        self._queue = self._receives.setdefault((peer, tag), deque())

    def _gather(self, words: Array, tag: int, members: Sequence[int] = ()) -> tuple[Array, Pending]:
        """A row from each member, and when they are there; from rank to rank, with a tag of its own.

        `members`: some of the axis, in order; none: all.
        """
        route = self._route(words.size)
        members = members or range(self._size)
        rows = np.empty((len(members), words.size), np.int64)
        own = members.index(self._rank)
        rows[own] = words
        others = [(own + step) % len(members) for step in range(1, len(members))]
        parts = [route.irecv(rows[other], members[other], tag) for other in others]
        return rows, Several(parts + [route.isend(words, members[other], tag) for other in others])

    def making(self, ranks: Sequence[int], name: str, block: Callable[[Pending], None]) -> None:
        """Before a group is made: its members must agree on their order, which MPI does not look at.

        Args:
            ranks: of this axis.
            name: of the new one.
            block: how to wait.

        Raises:
            CollectiveMismatch: they do not.
        """
        if not self._posts_later or len(ranks) == 1:
            return
        members, place = sorted(ranks), self._place()
        order = [self._calls.ranks[rank] for rank in ranks]
        shape = f"{stable_hash(order):x}"  # long orders are shortened for people
        mine = Fingerprint("1", "group", named(order)[:_LONGEST_OP], shape, "", "", f"{place[0]:x}", "", place[1])
        rows, arrive = self._gather(np.frombuffer(mine.pack(), np.int64), GROUP_TAG, members)
        block(arrive)
        prints = [Fingerprint.unpack(row.tobytes()) for row in rows]
        if differ(prints):
            world = [self._calls.ranks[rank] for rank in members]
            self._calls.refuse_making(name, prints, world)

    def _place(self) -> tuple[int, str]:
        """Where in the program the call stands: a number that is the same in every process, and its site."""
        frame, way = caller_of(sys._getframe(2))
        key = None if frame is None else (frame.f_code, frame.f_lasti)
        known = self._places.get(key)
        if known is None:
            words = "" if frame is None else words_of(frame)
            known = self._places[key] = stable_hash(words), site_of(frame)
        return (known[0] + _SPREAD * way) & _MASK, known[1]

    def confirm(self, a: Array, how: tuple[Any, ...], block: Callable[[Pending], None]) -> None:
        """Of a blocking call: wait until it is known to fit those of the others.

        Args:
            a: the array of the call.
            how: its further arguments.
            block: how to wait.

        Raises:
            CollectiveMismatch: it does not.
        """
        check = self._check
        block(check)
        if "send" in self._mine.verb:
            return
        while self._queue:
            self._queue[0].advance()  # its check is complete, too, and data moves in the order of the calls
        if self._mine.verb in UNEVEN:
            block(self._lengths(a, how))

    def _lengths(self, a: Array, how: Sequence[Any]) -> BlockLengths:
        """Of an all-to-all: its check, and then that of its blocks."""
        assert isinstance(self._check, Comparison)
        i, j, sent, received = how
        mine = np.array([*a.shape, *sent, *received], np.int64)
        return BlockLengths(self._calls, self._check, (i, j), partial(self._gather, mine, LENGTHS_TAG))

    def receiving(self, post: Callable[[], Pending]) -> Pending:
        """Of a non-blocking call: the message that fills its array, posted when it is known to fit.

        Args:
            post: posts it.
        """
        if self._posts_later:
            return Later(self._check, post, self._queue, self._mode.unfinished)
        return Both(self._check, post())

    def flying(self, post: Callable[[], Pending], a: Array, kept: bool) -> Pending:
        """Of a non-blocking collective: the message, posted when it is known to fit.

        Args:
            post: posts it.
            a: the array that it reads.
            kept: whether nobody may write it before the message is complete; else the message itself does.
        """
        message = self.receiving(post)
        return self.untouched(message, a) if kept else message

    def exchanging(self, post: Callable[[], Pending], a: Array, how: Sequence[Any]) -> Pending:
        """Of a non-blocking all-to-all: the message, posted when it and its blocks are known to fit.

        Args:
            post: posts it.
            a: the array of the call.
            how: its further arguments.
        """
        if self._posts_later:
            self._check = self._lengths(a, how)
        return self.receiving(post)

    def sending(self, message: Pending, a: Array) -> Pending:
        """Of a non-blocking send: the message together with its header.

        Args:
            message: as it was posted.
            a: the array that it reads.
        """
        return self.untouched(Both(self._check, message), a)

    def untouched(self, message: Pending, a: Array) -> Pending:
        """Of a non-blocking call: a message whose array nobody may write before it is complete.

        Args:
            message: as it was posted, or will be.
            a: the array that it reads.
        """
        mine, rank = self._mine, self._calls.ranks[self._rank]
        call = f"{mine.verb} on axis {self._calls.name}, call {mine.number}, {mine.shape} {mine.dtype} at {mine.site}"
        text = (
            f"rank {rank}: {call}: the array was written before the message was complete.  Wait for the request first"
        )
        return Untouched(message, a, text)

    def opened(self, verb: str, message: Pending, a: Array, recv: Array | None, peer: int, tag: int) -> int:
        """Note a non-blocking call that has just been made.

        Returns:
            Its number among the open requests.

        Raises:
            CommError: it shares an array with another one that is in flight.
        """
        mine, rank = self._mine, self._calls.ranks[self._rank]
        words = call_words(verb, self._calls.name, peer, tag, int(mine.number), mine.shape, mine.dtype)
        is_send = "send" in verb
        reads, writes = (None, a) if "recv" in verb else (a, recv)
        return self._mode.requests.add(f"rank {rank}: {words}, at {mine.site}", message, is_send, reads, writes)
