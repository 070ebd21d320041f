"""Threads as a transport: a message is complete when its partners have posted theirs.

Whoever posts last does the work for all: the arrays of all ranks lie in one process, and only one rank runs (baton.py).
Sums are taken in rank order.  Arrays may be of a device that all ranks share: a rank waits for it before it posts its
own, and whoever does the work waits until the device has done it.  A blocking `send` waits for its receiver, always,
which MPI may do and does for long messages: what hangs for large models under MPI is a deadlock for small ones here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import array_module, to_device, to_host
from mpitrain.comm.alone import Alone
from mpitrain.comm.baton import Room, tell_apart
from mpitrain.comm.path import common_words, judged, last_common_call, second_line
from mpitrain.comm.places import named, told
from mpitrain.comm.site import call_site
from mpitrain.comm.slices import SLICED, told_lengths
from mpitrain.comm.staging import settle
from mpitrain.comm.thread_rank import Call, Rank, Wait
from mpitrain.comm.transport import Array, Pending, Transport
from mpitrain.comm.wire import KNOWN, blocks, share_memory
from mpitrain.errors import CollectiveMismatch, CommError

_UNEVEN = ("all_to_all", "iall_to_all", "exchange")  # verbs to which ranks may bring different shapes
_NOTHING = np.empty(0)


class Part(NamedTuple):
    """What one rank brings to a collective."""

    wait: Wait
    call: Call | None  # of the door, that asked for it
    verb: str
    like: tuple[Any, ...]  # must be equal on all ranks
    send: Array
    recv: Array
    gives: Sequence[Array] = ()  # where blocks change places: one for each rank, and ...
    takes: Sequence[Array] = ()  # ... where those of each rank go


class Letter(NamedTuple):
    """One side of a message from rank to rank."""

    wait: Wait
    buf: Array


class Group:
    """What the members of one communicator share."""

    def __init__(self, room: Room, ranks: tuple[int, ...], name: str) -> None:
        self.room = room
        self.ranks = ranks
        self.name = name
        self.groups: dict[tuple[tuple[int, ...], str, int], Group] = {}
        self.makings: dict[tuple[tuple[int, ...], str, int], dict[int, tuple[tuple[int, ...], str]]] = {}
        self.meetings: dict[int, dict[int, Part]] = {}
        self.sent: dict[tuple[int, int, int], deque[Letter]] = {}
        self.wanted: dict[tuple[int, int, int], deque[Letter]] = {}
        self.last: Call | None = None  # of the door, that all members have made, as the first of them made it

    def join(self, number: int, rank: int, part: Part) -> None:
        """Rank brings its part to collective `number`; the last one does the work."""
        meeting = self.meetings.setdefault(number, {})
        meeting[rank] = part
        if len(meeting) < len(self.ranks):
            return
        del self.meetings[number]
        parts = [meeting[r] for r in range(len(self.ranks))]
        try:
            self._compare(number, parts)
            _WORK[part.verb](parts)
            settle(part.recv, *part.takes)
        except CommError as error:
            self.room.give_up(part.wait.rank, error)
        self.last = parts[0].call or self.last
        for each in parts:
            each.wait.done = True

    def _compare(self, number: int, parts: list[Part]) -> None:
        first = self._nature(parts[0])
        if all(self._nature(part) == first for part in parts):
            return
        shown = number if parts[0].call is None else parts[0].call.number
        raise CollectiveMismatch(f"on axis {self.name}, call {shown}: {self._told(parts)}")

    def _told(self, parts: list[Part]) -> str:
        """The calls of all, who left the path, and the last common call."""
        waits = [(rank, part.wait) for rank, part in zip(self.ranks, parts, strict=True)]
        new = {rank: wait.call is not None and wait.call.is_new for rank, wait in waits}
        places = {rank: self._nature(part) for rank, part in zip(self.ranks, parts, strict=True)}
        common = common_words(self.last and self.last.entry())
        return f"{tell_apart(waits)}{second_line(judged(new, places), common)}"

    def _nature(self, part: Part) -> tuple[object, ...]:
        """What must agree: the raw verb with its sizes, and the call of the door that asked for it."""
        call = part.call
        if call is None or call.axis != self.name:  # raw use, or the second half of a sum
            return (part.verb, *part.like)
        shape = None if call.verb in _UNEVEN else call.shape
        return (part.verb, *part.like, call.verb, shape, call.dtype, call.number)

    def post(self, way: tuple[int, int, int], letter: Letter, sends: bool) -> None:
        """One side of a message (source, dest, tag); the second one does the work."""
        mine, theirs = (self.sent, self.wanted) if sends else (self.wanted, self.sent)
        waiting = theirs.get(way)
        if not waiting:
            mine.setdefault(way, deque()).append(letter)
            return
        other = waiting.popleft()
        source, dest = (letter, other) if sends else (other, letter)
        if source.buf.nbytes != dest.buf.nbytes:
            error = CollectiveMismatch(self._sizes(way, source, dest))
            self.room.give_up(letter.wait.rank, error)
        bits = source.buf.reshape(-1).view(np.uint8)
        if type(source.buf) is not type(dest.buf):  # one of the host meets one of a device
            bits = to_device(to_host(bits), dest.buf)
        dest.buf.reshape(-1).view(np.uint8)[...] = bits
        settle(dest.buf)
        source.wait.done = dest.wait.done = True

    def _sizes(self, way: tuple[int, int, int], source: Letter, dest: Letter) -> str:
        """What is said of a message that has another size than its receiver expects."""
        ends = {self.ranks[way[0]]: source.wait, self.ranks[way[1]]: dest.wait}
        new = {rank: wait.call is not None and wait.call.is_new for rank, wait in ends.items()}
        standings = {rank: wait.rank.standing() for rank, wait in ends.items()}
        number = "" if source.wait.call is None else f", call {source.wait.call.number}"
        return (
            f"on axis {self.name}{number}: {tell_apart([*ends.items()])}: the message has {source.buf.nbytes} bytes, "
            f"its receiver expects {dest.buf.nbytes}"
            f"{second_line(judged(new, new), common_words(last_common_call(standings)))}"
        )


class LocalTransport:
    """One member's verbs.

    Attributes:
        takes_device: whether buffers may be arrays of a device; it must be one device that all ranks share.
    """

    kind = "local"
    adds_device = True

    def __init__(self, group: Group, rank: int, me: Rank, takes_device: bool = False) -> None:
        self.takes_device = takes_device
        self.rank = rank
        self.size = len(group.ranks)
        self._group = group
        self._me = me
        self._calls = 0
        self._groups: dict[tuple[tuple[int, ...], str], int] = {}
        self._makings: dict[tuple[tuple[int, ...], str], int] = {}

    @property
    def shared(self) -> Group:
        """What the members share: who looks on sees in it what is under way."""
        return self._group

    # -- collectives

    def _post(
        self, verb: str, like: tuple[Any, ...], send: Array = _NOTHING, recv: Array = _NOTHING, detail: str = ""
    ) -> Wait:
        self._check(send, recv)
        wait = Wait(self._me, self._group.name, verb, detail)
        return self._join(Part(wait, self._me.call, verb, like, send.reshape(-1), recv.reshape(-1)))

    def _join(self, part: Part) -> Wait:
        self._calls += 1
        self._group.join(self._calls, self.rank, part)
        return part.wait

    def iall_reduce(self, send: Array, recv: Array, op: str) -> Pending:
        return self._post("all_reduce", (op, send.dtype, send.size), send, recv, detail="" if op == "sum" else op)

    def iall_gather(self, send: Array | None, recv: Array, counts: Sequence[int] | None = None) -> Pending:
        lengths = [recv.size // self.size] * self.size if counts is None else list(counts)
        if send is None:
            start = sum(lengths[: self.rank])
            send = recv.reshape(-1)[start : start + lengths[self.rank]]
        else:
            self._check_apart(send, recv)
        return self._post("all_gather", (send.dtype, tuple(lengths)), send, recv, detail=self._told(lengths))

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int] | None = None) -> Pending:
        lengths = [send.size // self.size] * self.size if counts is None else list(counts)
        like = (send.dtype, send.size, tuple(lengths))
        self._check_apart(send, recv)
        return self._post("reduce_scatter", like, send, recv, detail=self._told(lengths))

    def _told(self, lengths: Sequence[int]) -> str:
        """Of slices of different lengths: how many elements they have, for reports."""
        call = self._me.call
        if len(set(lengths)) == 1 or (call is not None and call.verb not in SLICED):  # other calls are made of these
            return ""
        return f"in slices of {told_lengths(lengths)} elements"

    def iall_to_all(
        self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int], own: bool = True
    ) -> Pending:
        self._check(send, recv)
        wait = Wait(self._me, self._group.name, "all_to_all")
        gives, takes = blocks(send, send_counts), blocks(recv, recv_counts)
        like = (send.dtype, own)
        return self._join(Part(wait, self._me.call, "all_to_all", like, _NOTHING, _NOTHING, gives, takes))

    def all_reduce(self, send: Array, recv: Array, op: str) -> None:
        self.iall_reduce(send, recv, op).wait()

    def all_gather(self, send: Array | None, recv: Array, counts: Sequence[int] | None = None) -> None:
        self.iall_gather(send, recv, counts).wait()

    def all_to_all(
        self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int], own: bool = True
    ) -> None:
        self.iall_to_all(send, send_counts, recv, recv_counts, own).wait()

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int] | None = None) -> None:
        self.ireduce_scatter(send, recv, counts).wait()

    def broadcast(self, buf: Array, root: int) -> None:
        self._post("broadcast", (root, buf.dtype, buf.size), buf, buf, detail=f"root {root}").wait()

    def barrier(self) -> None:
        self._post("barrier", ()).wait()

    # -- from one rank to another

    def isend(self, buf: Array, dest: int, tag: int) -> Pending:
        self._check(buf)
        wait = Wait(self._me, self._group.name, f"send to rank {dest}")
        self._group.post((self.rank, dest, tag), Letter(wait, buf), sends=True)
        return wait

    def irecv(self, buf: Array, source: int, tag: int) -> Pending:
        self._check(buf)
        wait = Wait(self._me, self._group.name, f"recv from rank {source}")
        self._group.post((source, self.rank, tag), Letter(wait, buf), sends=False)
        return wait

    def send(self, buf: Array, dest: int, tag: int) -> None:
        self.isend(buf, dest, tag).wait()

    def recv(self, buf: Array, source: int, tag: int) -> None:
        self.irecv(buf, source, tag).wait()

    def _check(self, *buffers: Array) -> None:
        """May this rank send at all, and are its buffers what a transport is promised?"""
        self._group.room.check(self._me)
        settle(*buffers)
        for buf in buffers:
            assert self.takes_device or type(buf) is np.ndarray, "the door hands out arrays of the host"
            assert buf.flags.c_contiguous, "the door hands out contiguous buffers"
            assert buf.dtype in KNOWN, f"{buf.dtype} is no wire dtype"

    def _check_apart(self, send: Array, recv: Array) -> None:
        assert not share_memory(send, recv), "the door hands out buffers that do not overlap"

    # -- groups

    def group(self, ranks: tuple[int, ...], name: str) -> Transport:
        if len(ranks) == 1:
            return Alone()
        self._compare_making(ranks, name)
        count = self._groups[ranks, name] = self._groups.get((ranks, name), 0) + 1
        shared = self._group.groups
        key = (ranks, name, count)
        if key not in shared:
            shared[key] = Group(self._group.room, tuple(self._group.ranks[r] for r in ranks), name)
        return LocalTransport(shared[key], ranks.index(self.rank), self._me, self.takes_device)

    def _compare_making(self, ranks: tuple[int, ...], name: str) -> None:
        """The members of a group must agree on their order: they would never meet in it."""
        who, members = self._group.ranks[self.rank], tuple(sorted(ranks))
        count = self._makings[members, name] = self._makings.get((members, name), 0) + 1
        all_ = self._group.makings.setdefault((members, name, count), {})
        all_[who] = tuple([self._group.ranks[rank] for rank in ranks]), call_site()
        orders = {rank: order for rank, (order, _) in all_.items()}
        if len({*orders.values()}) > 1:
            calls = told([(rank, f"of {named(order)} at {site}") for rank, (order, site) in all_.items()])
            common = common_words(self._group.last and self._group.last.entry())
            text = f"the making of axis {name}: {calls}{second_line(judged({}, orders), common)}"
            self._group.room.give_up(self._me, CollectiveMismatch(text))

    def close(self) -> None:
        pass


# -- what the last one to come does for all; buffers are flat, and a `recv` may be the same memory as its `send`


def _total(rows: list[Array], op: object) -> Array:
    xp = array_module(rows[0])
    ufunc = xp.add if op == "sum" else xp.maximum
    total: Array = rows[0].copy()
    with np.errstate(over="ignore", invalid="ignore"):
        for row in rows[1:]:
            ufunc(total, row, out=total)
    return total


def _all_reduce(parts: list[Part]) -> None:
    total = _total([part.send for part in parts], parts[0].like[0])
    for part in parts:
        part.recv[...] = total


def _all_gather(parts: list[Part]) -> None:
    joined = array_module(parts[0].send).concatenate([part.send for part in parts])
    for part in parts:
        part.recv[...] = joined


def _reduce_scatter(parts: list[Part]) -> None:
    summed = blocks(_total([part.send for part in parts], "sum"), parts[0].like[2])
    for part, block in zip(parts, summed, strict=True):
        part.recv[...] = block


def _all_to_all(parts: list[Part]) -> None:
    own = parts[0].like[1]
    for rank, part in enumerate(parts):
        for peer, other in enumerate(parts):
            if peer == rank and not own:
                continue
            block, place = other.gives[rank], part.takes[peer]
            if block.size != place.size:
                raise CommError(
                    f"all_to_all on axis {part.wait.axis}: rank {peer} of it sends {block.size} elements"
                    f" to rank {rank}, which expects {place.size}, {part.wait}"
                )
            place[...] = block


def _broadcast(parts: list[Part]) -> None:
    source = parts[parts[0].like[0]].send
    for part in parts:
        if part.recv is not source:
            part.recv[...] = source


def _barrier(parts: list[Part]) -> None:
    pass


_WORK = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "barrier": _barrier,
}
