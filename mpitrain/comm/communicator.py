"""The one door: every message of the library goes through a `Communicator`.

A communicator is the ranks along one mesh axis (or the whole world).  It owns what every message needs and no algorithm
wants to see: contiguity, dtypes on the wire, staging of device arrays, cutting of long messages, the order of sums,
tags, sequence numbers, the flight board, counting of bytes, and events.  What moves the bytes is a `Transport`.

All members of an axis call its collectives in the same order, and wait for their requests in the same order.  Arrays
are NumPy's or CuPy's, of any order and strides; results are fresh C-contiguous arrays where the input lives, or `out`.
A device array goes to a transport that takes such arrays as it is, to others through page-locked memory (staging.py);
which it is, a world knows (device_messages.py).  In a message all ranks bring arrays of the host, or all of a device.
An axis of size 1 sends nothing: there the result is the input itself, as a read-only view.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np

import mpitrain.errors
from mpitrain.backend import array_module
from mpitrain.comm.checked import Checks
from mpitrain.comm.chunked import REST_TAG, Route, Several
from mpitrain.comm.mistakes import check_counts, check_peer, check_rank, check_slices, check_sum
from mpitrain.comm.ordered import OrderedSums
from mpitrain.comm.payload import LIKE_BLOCKING, Payload
from mpitrain.comm.request import Request
from mpitrain.comm.site import call_site
from mpitrain.comm.slices import Counts, Joined, Scattered, shape_of_call
from mpitrain.comm.staging import Pinned
from mpitrain.comm.to_all import Blocks
from mpitrain.comm.transport import Array, Board, Mode, NoBoard, Pending, Transport
from mpitrain.comm.wire import (
    Empty,
    deliver,
    dim_of,
    is_inexact,
    is_known,
    on_wire,
    ready,
    shape_of,
    share_memory,
    target,
    unmoved,
)
from mpitrain.errors import CommError, UserError
from mpitrain.events import STEP_LISTENERS, WITNESSES, Event, tell

SHIFT_TAG = REST_TAG - 1
PAUSE = 20e-6  # seconds between two looks while sums in order are in flight
EXCHANGE_LIMIT = 16 * 1024 * 1024  # bytes of JSON from one rank


class Communicator:
    """The ranks along one axis.

    Attributes:
        name: of the axis: "tp", "edp+ep", "world".
        rank: this rank's index on the axis.
        size: number of ranks on it.
        ranks: their ranks in the world, in axis order.

    Errors of all verbs: `CommError` where a message cannot be sent or answered, `ShapeError` where sizes do not fit;
    both before anything is sent, if this rank alone can see it.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        ranks: Sequence[int],
        board: Board | None = None,
        mode: Mode | None = None,
    ) -> None:
        self.name = name
        self.rank = transport.rank
        self.size = transport.size
        self.ranks = tuple(ranks)
        self.board: Board = NoBoard() if board is None else board
        self.mode = Mode() if mode is None else mode
        self._lane = self.board.open(name, self.ranks)
        self.carry(transport)
        self._calls = 0
        self._sent: dict[tuple[int, int], int] = {}  # messages to each peer with each tag, and from it
        self._received: dict[tuple[int, int], int] = {}
        self._bytes: dict[str, float] = {}
        self._payload = Payload(self.size)

    def carry(self, transport: Transport) -> None:
        """Hand all messages to this transport of the same ranks from here on; those of groups made later, too.

        Collective, when no message is in flight.
        """
        self.transport = transport
        self._route = Route(transport, self.mode)
        self._sums = OrderedSums(self._route, self._second, self.mode.unfinished)
        self._checks = Checks(self.name, self.ranks, self._route, self.mode, self._lane)

    def __repr__(self) -> str:
        return f"Communicator({self.name}, rank {self.rank} of {self.size}, world ranks {list(self.ranks)})"

    # -- collectives --------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, op: str = "sum", out: Any = None) -> Any:
        """Sum (or maximum) over the axis, on every rank.

        Args:
            x: same shape and dtype on all ranks.  Halves (float16, bfloat16) are summed in float32.
            op: "sum" or "max".
            out: where the result goes; may be `x`; may be float32 where x is a half.

        Returns:
            The sum, in x.dtype; `out` if given.  A sum of halves beyond their range is inf; in a float32 `out` it is
            the sum.

        Cost: each rank sends 2(n-1)/n of x.nbytes.
        """
        return self._call("all_reduce", x, self._all_reduce, op, out, out=out)

    def _all_reduce(self, a: Array, empty: Empty, op: str, out: Any) -> Array:
        recv = target(a, a.shape, out, empty, "all_reduce")
        if self._in_order(a, op):
            self._sums.all_reduce(a.reshape(-1), recv.reshape(-1), op)
        else:
            self._route(a.size).all_reduce(*_numbers(a, recv), op)
        return recv

    def iall_reduce(self, x: Any, op: str = "sum", out: Any = None) -> Request:
        """`all_reduce` that returns at once; the same bits in deterministic mode.

        Returns:
            A request; `x` and `out` belong to it until it is complete.
        """
        request: Request = self._call("iall_reduce", x, self._iall_reduce, op, out, out=out)
        return request

    def _iall_reduce(self, a: Array, empty: Empty, op: str, out: Any) -> tuple[Pending, Array]:
        recv = target(a, a.shape, out, empty, "iall_reduce")
        post: Callable[[], Pending]
        if self._in_order(a, op):
            if self.mode.checked:
                self._sums.second()  # made here, where all ranks pass
            post = partial(self._sums.iall_reduce, a.reshape(-1), recv.reshape(-1), op)
        else:
            post = partial(self._route(a.size).iall_reduce, *_numbers(a, recv), op)
        return self._in_flight(post, a, kept=not share_memory(a, recv)), recv

    def all_gather(self, x: Any, dim: int = 0, out: Any = None, counts: Sequence[int] | None = None) -> Any:
        """Join the ranks' slices along `dim`, in rank order.

        Args:
            x: same shape on all ranks; with `counts` but for the length along dim.
            dim: to join along.
            out: where the result goes; may be float32 where x is a half.  Along dim 0 x may be its own slice of it,
                which then stays where it is.
            counts: length along dim of each rank's slice, the same numbers on all ranks, zeros allowed; None: all are
                as long as x.

        Cost: each rank sends (n-1)/n of the result's bytes.
        """
        how = self._dim_and_lengths("all_gather", x, dim, counts)
        return self._call("all_gather", x, self._all_gather, *how, out, out=out)

    def _all_gather(self, a: Array, empty: Empty, dim: int, counts: Counts, out: Any) -> Array:
        joined = Joined(a, dim, counts, self.rank, self.size, out, empty, "all_gather")
        self._route(joined.recv.size).all_gather(*joined.message)
        joined.join()
        return joined.recv

    def iall_gather(self, x: Any, dim: int = 0, out: Any = None, counts: Sequence[int] | None = None) -> Request:
        """`all_gather` that returns at once; `x` and `out` belong to the request until it is complete."""
        how = self._dim_and_lengths("iall_gather", x, dim, counts)
        request: Request = self._call("iall_gather", x, self._iall_gather, *how, out, out=out)
        return request

    def _iall_gather(self, a: Array, empty: Empty, dim: int, counts: Counts, out: Any) -> tuple[Pending, Array]:
        joined = Joined(a, dim, counts, self.rank, self.size, out, empty, "iall_gather")
        post = partial(self._route(joined.recv.size).iall_gather, *joined.message)
        message = self._in_flight(post, a)
        return message if joined.is_straight else Several([message], joined.join), joined.recv

    def reduce_scatter(self, x: Any, dim: int = 0, out: Any = None, counts: Sequence[int] | None = None) -> Any:
        """Sum over the axis, of which each rank keeps its slice along `dim`.

        Args:
            x: same shape on all ranks.
            dim: to cut along.
            out: where the slice goes; may be float32 where x is a half.
            counts: length along dim of each rank's slice, the same numbers on all ranks, zeros allowed; they add up to
                x.shape[dim].  None: the axis' size divides that, and all are equal.

        Cost: each rank sends (n-1)/n of x.nbytes.
        """
        how = self._dim_and_lengths("reduce_scatter", x, dim, counts)
        return self._call("reduce_scatter", x, self._reduce_scatter, *how, out, out=out)

    def _reduce_scatter(self, a: Array, empty: Empty, dim: int, counts: Counts, out: Any) -> Array:
        in_order = self._in_order(a, "sum")
        cut = Scattered(a, dim, counts, self.rank, self.size, out, empty, "reduce_scatter")
        if in_order:
            self._sums.reduce_scatter(cut.blocks, cut.counts, cut.recv.reshape(-1))
        else:
            self._route(cut.blocks.size).reduce_scatter(cut.blocks, cut.recv, counts and cut.counts)
        return cut.recv

    def ireduce_scatter(self, x: Any, dim: int = 0, out: Any = None, counts: Sequence[int] | None = None) -> Request:
        """`reduce_scatter` that returns at once; the same bits in deterministic mode.

        Returns:
            A request; `x` and `out` belong to it until it is complete.
        """
        how = self._dim_and_lengths("ireduce_scatter", x, dim, counts)
        request: Request = self._call("ireduce_scatter", x, self._ireduce_scatter, *how, out, out=out)
        return request

    def _ireduce_scatter(self, a: Array, empty: Empty, dim: int, counts: Counts, out: Any) -> tuple[Pending, Array]:
        post: Callable[[], Pending]
        in_order = self._in_order(a, "sum")
        cut = Scattered(a, dim, counts, self.rank, self.size, out, empty, "ireduce_scatter")
        if in_order:
            post = partial(self._sums.ireduce_scatter, cut.blocks, cut.counts, cut.recv.reshape(-1))
        else:
            post = partial(self._route(cut.blocks.size).ireduce_scatter, cut.blocks, cut.recv, counts and cut.counts)
        return self._in_flight(post, a), cut.recv

    def _dim_and_lengths(self, verb: str, x: Any, dim: int, counts: Counts) -> tuple[int, list[int] | None]:
        dim = dim_of(x, dim, verb)
        return dim, check_slices(self, shape_of(x), dim, counts, verb, whole="scatter" in verb)

    def all_to_all(
        self, x: Any, i: int = 0, j: int = 0, counts: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> Any:
        """Every rank sends a slice to every rank: what was cut along dim `i` is then cut along dim `j`.

        The array is cut along `j`, slice k goes to rank k, and what arrives is joined along `i` in rank order.  With
        i = j slices just change places (experts); with i != j the sharded dim changes (Ulysses).

        Args:
            x: this rank's part.
            i: dim to join along.
            j: dim to cut along.
            counts: (lengths along j of the slices sent, lengths along i of the slices received), one a rank, zeros
                allowed; None: x.shape[j] is cut evenly, and all ranks hold equal parts.  The reverse call is
                `all_to_all(y, j, i, (received, sent))`.

        Cost: each rank sends (n-1)/n of x.nbytes.
        """
        how = self._dims_and_lengths("all_to_all", x, i, j, counts)
        return self._call("all_to_all", x, self._all_to_all, *how)

    def _all_to_all(
        self, a: Array, empty: Empty, i: int, j: int, sent: Sequence[int], received: Sequence[int]
    ) -> Array:
        blocks = Blocks(a, i, j, sent, received, self.rank, empty)
        self._route(blocks.elements).all_to_all(*blocks.message)
        blocks.join()
        return blocks.recv

    def iall_to_all(
        self, x: Any, i: int = 0, j: int = 0, counts: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> Request:
        """`all_to_all` that returns at once; `x` must not be written until the request is complete."""
        how = self._dims_and_lengths("iall_to_all", x, i, j, counts)
        request: Request = self._call("iall_to_all", x, self._iall_to_all, *how)
        return request

    def _iall_to_all(
        self, a: Array, empty: Empty, i: int, j: int, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Pending, Array]:
        blocks = Blocks(a, i, j, sent, received, self.rank, empty)
        post = partial(self._route(blocks.elements).iall_to_all, *blocks.message)
        if self.mode.checked:
            message = self._checks.untouched(self._checks.exchanging(post, a, (i, j, sent, received)), a)
        else:
            message = post()
        return Several([message], blocks.join) if i else message, blocks.recv

    def _dims_and_lengths(
        self, verb: str, x: Any, i: int, j: int, counts: tuple[Sequence[int], Sequence[int]] | None
    ) -> tuple[int, int, list[int], list[int]]:
        i, j = dim_of(x, i, verb), dim_of(x, j, verb)
        return i, j, *check_counts(self, shape_of(x), i, j, counts)

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """The array of rank `root`, on every rank.

        Args:
            x: on `root` the array; elsewhere one of the same shape and dtype, whose values do not matter.
            root: a rank of this axis.

        Cost: each rank sends at most x.nbytes.
        """
        check_rank(self, root, "broadcast root")
        return self._call("broadcast", x, self._broadcast, root)

    def _broadcast(self, a: Array, empty: Empty, root: int) -> Array:
        recv = empty(a.shape, a.dtype)
        if self.rank == root:
            recv[...] = a
        self._route(recv.size).broadcast(on_wire(recv), root)
        return recv

    def shift(self, x: Any, k: int = 1) -> Any:
        """Pass x on to rank + k around the ring, receive that of rank - k; same shape on all ranks.

        Cost: each rank sends x.nbytes.
        """
        return self._call("shift", x, self._shift, k)

    def _shift(self, a: Array, empty: Empty, k: int) -> Array:
        recv = empty(a.shape, a.dtype)
        dest, source = (self.rank + k) % self.size, (self.rank - k) % self.size
        if dest == self.rank:
            recv[...] = a
            return recv
        transport = self._route(a.size)
        arrives = transport.irecv(on_wire(recv), source, SHIFT_TAG)
        self._block(transport.isend(on_wire(a), dest, SHIFT_TAG))
        self._block(arrives)
        return recv

    def barrier(self) -> None:
        """Return when every rank of the axis has called it."""
        self._call("barrier", _NOTHING, self._barrier)

    def _barrier(self, a: Array, empty: Empty) -> None:
        self.transport.barrier()

    # -- from one rank to another -------------------------------------------------------------------------------------

    def send(self, x: Any, dest: int, tag: int = 0) -> None:
        """Send; may block until `dest` receives, so two ranks that both send first may hang.

        Args:
            x: any array; the receiver must know its shape and dtype.
            dest: another rank of this axis.
            tag: 0 ... 16000; messages of one pair and tag arrive in order.
        """
        check_peer(self, dest, tag, "send to")
        self._call("send", x, self._send, dest, tag, peer=dest)

    def _send(self, a: Array, empty: Empty, dest: int, tag: int) -> None:
        if self.mode.unfinished:
            self._block(self._route(a.size).isend(on_wire(a), dest, tag))
        else:
            self._route(a.size).send(on_wire(a), dest, tag)

    def recv(
        self, shape: Sequence[int], dtype: Any, source: int, tag: int = 0, out: Any = None, like: Any = None
    ) -> Any:
        """Receive an array of this shape and dtype into `out`, else into a fresh one where `like` is, else on the host.

        Args:
            shape: of the array that is sent.
            dtype: of it.
            source: another rank of this axis.
            tag: as in `send`.
            out: where the result goes.
            like: an array of the host or of a device.
        """
        check_peer(self, source, tag, "receive from")
        recv, out = self._place(dtype, tuple(shape), out, like, "recv")
        return self._call("recv", recv, self._recv, source, tag, out=out, peer=source)

    def _recv(self, recv: Array, empty: Empty, source: int, tag: int) -> Array:
        if self.mode.unfinished:
            self._block(self._route(recv.size).irecv(on_wire(recv), source, tag))
        else:
            self._route(recv.size).recv(on_wire(recv), source, tag)
        return recv

    def isend(self, x: Any, dest: int, tag: int = 0) -> Request:
        """`send` that returns at once; `x` must not be written until the request is complete."""
        check_peer(self, dest, tag, "send to")
        request: Request = self._call("isend", x, self._isend, dest, tag, peer=dest)
        return request

    def _isend(self, a: Array, empty: Empty, dest: int, tag: int) -> tuple[Pending, None]:
        message = self._route(a.size).isend(on_wire(a), dest, tag)
        return self._checks.sending(message, a) if self.mode.checked else message, None

    def irecv(
        self, shape: Sequence[int], dtype: Any, source: int, tag: int = 0, out: Any = None, like: Any = None
    ) -> Request:
        """`recv` that returns at once; `wait` returns the array."""
        check_peer(self, source, tag, "receive from")
        recv, out = self._place(dtype, tuple(shape), out, like, "irecv")
        request: Request = self._call("irecv", recv, self._irecv, source, tag, out=out, peer=source)
        return request

    def _irecv(self, recv: Array, empty: Empty, source: int, tag: int) -> tuple[Pending, Array]:
        transport = self._route(recv.size)
        if self.mode.checked:
            return self._checks.receiving(partial(transport.irecv, on_wire(recv), source, tag)), recv
        return transport.irecv(on_wire(recv), source, tag), recv

    # -- small things that are no arrays ------------------------------------------------------------------------------

    def exchange(self, obj: Any) -> list[Any]:
        """Tell all ranks of the axis something small.

        Args:
            obj: anything JSON can hold, at most 16 MiB as text.

        Returns:
            One object a rank, in rank order, each as JSON gives it back (tuples become lists).

        Raises:
            CommError: JSON cannot hold obj (on this rank), or some rank's text is too long (on all ranks).
        """
        try:
            text = np.frombuffer(json.dumps(obj).encode(), np.uint8)
        except (TypeError, ValueError) as error:
            raise CommError(f"exchange on axis {self.name}: {error}") from error
        lengths = self._call("exchange", np.array([text.size]), self._all_gather, 0, None, None)
        longest = int(lengths.max())
        if longest > EXCHANGE_LIMIT:
            who = int(lengths.argmax())
            raise CommError(
                f"exchange on axis {self.name}: rank {who} brings {longest} bytes of JSON,"
                f" at most {EXCHANGE_LIMIT} are allowed; send arrays by all_gather"
            )
        padded = np.zeros(longest, np.uint8)
        padded[: text.size] = text
        rows = self._call("exchange", padded, self._all_gather, 0, None, None).reshape(self.size, longest)
        return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]

    def agree(self, error: UserError | None) -> None:
        """Raise the same error on all ranks of the axis if any rank has one.

        Args:
            error: what went wrong here, or None.

        Raises:
            UserError: the error of the lowest rank that has one, in its class and with its text.
        """
        if error is not None and not isinstance(error, UserError):
            raise TypeError(f"agree takes a UserError or None, not {type(error).__name__}")
        told = self.exchange(None if error is None else [type(error).__name__, str(error)])
        for rank, said in enumerate(told):
            if said is None:
                continue
            if rank == self.rank and error is not None:
                raise error
            kind = getattr(mpitrain.errors, said[0], UserError)
            raise kind(said[1])

    # -- the rest -----------------------------------------------------------------------------------------------------

    def group(self, ranks: Sequence[int], name: str) -> Communicator:
        """A communicator of some of these ranks.

        Collective over its members only; they call `group` in the same order.

        Args:
            ranks: members, as ranks of this communicator, in the order of their new ranks; this rank among them.
            name: of the new axis.
        """
        if self.mode.checked:
            members = tuple(self.ranks[rank] for rank in sorted(ranks))
            lane = self.board.open(f"the making of axis {name}", members)
            lane.enter(1, "group", (len(ranks),), _NOTHING.dtype, -1)
            try:
                self._checks.making(ranks, name, self._block)
            finally:
                lane.leave()
        transport = self.transport.group(tuple(ranks), name)
        return Communicator(name, transport, [self.ranks[r] for r in ranks], self.board, self.mode)

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes this rank has sent so far, by verb, as payload.py counts them.

        With n ranks: all_reduce 2(n-1)/n of the array; reduce_scatter, all_gather and all_to_all (n-1)/n of the larger
        side; broadcast, shift and send the array.  Non-blocking verbs are counted with the others.
        """
        total: dict[str, float] = {}
        for verb, count in self._bytes.items():
            name = LIKE_BLOCKING.get(verb, verb)
            total[name] = total.get(name, 0) + count
        return {verb: round(count) for verb, count in total.items()}

    @property
    def scratch(self) -> int:
        """Bytes of buffers that it keeps between messages, for sums in rank order."""
        return self._sums.held

    def _second(self) -> Route:
        """A second group of the same ranks, for the second halves of sums in flight."""
        return Route(self.transport.group(tuple(range(self.size)), f"{self.name} (second)"), self.mode)

    # -- one place for all messages -----------------------------------------------------------------------------------

    def _call(self, verb: str, x: Any, move: Callable[..., Any], *how: Any, out: Any = None, peer: int = -1) -> Any:
        """Make one message.

        Args:
            verb: its name.
            x: the array this rank brings.
            move: called with x made ready, what makes the array of a result, and `how`; returns the result, which may
                have to be brought to where the caller wants it, or (pending, result).
            how: further arguments.
            out: where the caller wants the result.
            peer: the other rank in a point-to-point message.
        """
        empty: Empty
        if self.size == 1:  # the only place that knows about axes of one rank
            result = unmoved(x, out, verb)
            return Request.done(result) if verb in LIKE_BLOCKING else result
        if type(x) is np.ndarray and (out is None or type(out) is np.ndarray):  # the usual case
            a, empty = ready(x), np.empty
        else:
            a, empty = self._taken_up(x, out)
        if peer < 0:
            self._calls = number = self._calls + 1
            tag = 0
        else:
            tag = how[1]
            number = self._count(verb, peer, tag)
        nbytes = self._payload.bytes(verb, a, how)
        self._bytes[verb] = self._bytes.get(verb, 0) + nbytes
        mode, lane = self.mode, self._lane
        lane.enter(number, verb, shape_of_call(verb, a, how), a.dtype, peer, tag)
        try:
            listeners, witnesses = STEP_LISTENERS.get(), WITNESSES.get()
            began = perf_counter_ns() if witnesses else 0
            info = self._info(number, verb, a, how, peer) if listeners else {}
            if listeners:
                tell(listeners, Event("message", "begin", verb, info))
            if mode.checked:
                self._checks.post(number, verb, a, how, peer)
                if verb not in LIKE_BLOCKING:
                    self._checks.confirm(a, how, self._block)
            if mode.unfinished and peer < 0 and verb not in LIKE_BLOCKING:
                self._sums.post_all(self._block)
            moved = move(a, empty, *how)
            for witness in witnesses:
                witness.message(self, verb, number, began, a, how, peer, nbytes)
            if listeners:
                tell(listeners, Event("message", "end", verb, {**info, "result": moved}))
        finally:
            lane.leave()
        if type(moved) is not tuple:
            return self._delivered(moved, x, out)
        return self._request(moved, number, verb, a, how, peer, x, out)

    def _request(
        self,
        moved: tuple[Pending, Array | None],
        number: int,
        verb: str,
        a: Array,
        how: tuple[Any, ...],
        peer: int,
        x: Any,
        out: Any,
    ) -> Request:
        """What a non-blocking verb returns; apart from `_call`, whose variables no closure then slows down."""
        pending, recv = moved
        requests, key = self.mode.requests, 0
        if self.mode.checked:
            key = self._checks.opened(verb, pending, a, recv, peer, how[1] if peer >= 0 else 0)

        def wait(pending: Pending) -> None:
            self._wait(pending, number, verb, a, how, peer)

        def finish() -> Any:
            if key:
                requests.close(key)
            if recv is not None:
                self._tell_arrival(recv, number, verb, a, how, peer)
            return self._delivered(recv, x, out)

        return Request(pending, finish, wait)

    def _taken_up(self, x: Any, out: Any) -> tuple[Array, Empty]:
        """The array that a message reads, and what makes one that it fills."""
        if isinstance(x, np.ndarray) or (xp := array_module(x)) is np:
            on_host = out is None or isinstance(out, np.ndarray)
            return ready(x), np.empty if on_host else self._pinned(array_module(out)).empty
        if self.transport.takes_device:
            return x if x.flags.c_contiguous else xp.ascontiguousarray(x), xp.empty
        pinned = self._pinned(xp)
        return pinned.download(x), pinned.empty

    def _place(self, dtype: Any, shape: tuple[int, ...], out: Any, like: Any, verb: str) -> tuple[Array, Any]:
        """The array that a message fills, and the one in which its receiver wants it."""
        xp = np if type(out) is np.ndarray else array_module(like if out is None else out)
        if xp is np:
            return target(np.empty(0, dtype), shape, out, np.empty, verb), out
        out = xp.empty(shape, dtype) if out is None else out
        if self.transport.takes_device:
            return target(xp.empty(0, dtype), shape, out, xp.empty, verb), out
        return target(np.empty(0, dtype), shape, out, self._pinned(xp).empty, verb), out

    def _delivered(self, recv: Array | None, x: Any, out: Any) -> Any:
        """A result where the caller wants it: in `out`, else where `x` is."""
        if recv is out or recv is None:
            return recv
        wanted = x if out is None else out
        if type(wanted) is not np.ndarray and isinstance(recv, np.ndarray) and (xp := array_module(wanted)) is not np:
            return self._pinned(xp).upload(recv, out)
        return recv if out is None else deliver(recv, out)

    def _pinned(self, xp: Any) -> Pinned:
        """This rank's page-locked buffers for a device."""
        if self.mode.pinned is None:
            self.mode.pinned = Pinned(xp)
        return self.mode.pinned

    def _tell_arrival(self, recv: Array, number: int, verb: str, a: Array, how: tuple[Any, ...], peer: int) -> None:
        """Tell who listens what a message has brought that did not block."""
        listeners = STEP_LISTENERS.get()
        if listeners:
            info = {**self._info(number, verb, a, how, peer), "result": recv}
            tell(listeners, Event("arrival", "end", verb, info))
        for witness in WITNESSES.get():
            witness.arrival(self, verb, number, how, peer)

    def _wait(self, pending: Pending, number: int, verb: str, a: Array, how: tuple[Any, ...], peer: int) -> None:
        """Block on a message in flight, where the board and listeners see it."""
        shape = shape_of_call(verb, a, how)
        self._lane.enter(number, "wait " + verb, shape, a.dtype, peer, how[1] if peer >= 0 else 0)
        try:
            listeners, witnesses = STEP_LISTENERS.get(), WITNESSES.get()
            began = perf_counter_ns() if witnesses else 0
            if listeners:
                info = self._info(number, verb, a, how, peer)
                tell(listeners, Event("message", "begin", "wait " + verb, info))
                self._block(pending)
                tell(listeners, Event("message", "end", "wait " + verb, info))
            else:
                self._block(pending)
            for witness in witnesses:
                witness.message(self, "wait " + verb, number, began, a, how, peer, 0.0)
        finally:
            self._lane.leave()

    def _in_flight(self, post: Callable[[], Pending], a: Array, kept: bool = True) -> Pending:
        """A non-blocking collective that reads `a`, which (`kept`) nobody writes meanwhile; see `Checks.flying`."""
        return self._checks.flying(post, a, kept) if self.mode.checked else post()

    def _block(self, pending: Pending) -> None:
        """Wait for a message; this rank's sums in order, on all its axes, move on meanwhile.

        MPI moves all messages while it waits for one; the second halves of these sums it does not know.  Without this
        hand a rank that waits for something else could hold up those that wait for its part of a sum.
        """
        unfinished = self.mode.unfinished
        while unfinished and not pending.test():
            for sums in tuple(unfinished):
                sums.advance()
            time.sleep(PAUSE)
        pending.wait()

    def _info(self, number: int, verb: str, a: Array, how: tuple[Any, ...], peer: int) -> dict[str, Any]:
        """What listeners are told.  `site` is a function: call it at "begin" to learn where the message was asked for.

        The op in which a message happens is the innermost one that has begun and not ended.
        """
        return {
            "axis": self.name,
            "size": self.size,
            "ranks": self.ranks,
            "number": number,
            "peer": peer,
            "array": a,
            "how": how,
            "bytes": self._payload.bytes(verb, a, how),
            "site": call_site,
        }

    def _count(self, verb: str, peer: int, tag: int) -> int:
        """The number of this call among the messages to or from this peer with this tag."""
        counts = self._sent if verb in ("send", "isend") else self._received
        counts[peer, tag] = number = counts.get((peer, tag), 0) + 1
        return number

    def _in_order(self, a: Array, op: str) -> bool:
        """Whether this sum is taken in rank order; refuses what nobody can sum."""
        check_sum(self, a.dtype, op)
        if type(a) is not np.ndarray and not self.transport.adds_device:
            return True
        return is_inexact(a.dtype) and (self.mode.deterministic or not is_known(a.dtype))


_NOTHING = np.empty(0, np.uint8)


def _numbers(a: Array, recv: Array) -> tuple[Array, Array]:
    """Both as numbers an MPI can add and compare: truth values as bytes.  One object stays one object."""
    if a.dtype != np.bool_:
        return a, recv
    sent = a.view(np.uint8)
    return sent, sent if recv is a else recv.view(np.uint8)
