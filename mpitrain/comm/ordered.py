"""Sums in rank order: the same bits on every transport, and halves summed in float32.

An MPI adds in whatever order suits its algorithm, which changes with the library, the message length and the number of
ranks; floating-point sums change with it.  Here every element is ((x0 + x1) + x2) + ... over the ranks, however the
buffer is cut into messages:

    up to 64 KiB     all-gather, then every rank adds up everything
    above            each rank receives its slice from everyone (all-to-all), adds it up, and all gather the results

The second is what a ring all-reduce sends too, 2(n-1)/n of the buffer; a rank's own part stays where it is, and the sum
is made in its place in the result.  A reduce-scatter is its first half, with slices of whatever lengths.

float16 and bfloat16 always go this way, as bits, and are added in float32 and rounded once: no MPI is asked whether it
knows them.  Device arrays that go to the transport as they are, are added up there, to the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpitrain.backend import Pool, array_module, is_half
from mpitrain.comm.chunked import Route, Several
from mpitrain.comm.transport import Array, Pending, Transport, Unfinished
from mpitrain.comm.wire import on_wire

SMALL = 64 * 1024  # bytes: below, latency counts and one message is better than two
SLICE = 2 * 1024 * 1024  # bytes of a rank's slice that a blocking sum takes at a time, so that its scratch stays small
MOST_SLICES = 8  # more ranks take smaller slices, for the same reason


def fold(rows: Sequence[Array], into: Array, op: str, pool: Pool, scratch: int = 0) -> None:
    """Fill `into` with rows[0] + rows[1] + ... (or their maximum), in this order.

    Args:
        rows: two or more of one length.
        into: as long, of the rows' dtype, or float32 where rows are halves.  May be one of the rows.
        op: "sum" or "max".
        pool: where float32 scratch comes from.
        scratch: 0 or 1: the row in which sums may be kept on the way.

    A sum of halves that leaves their range becomes inf, which is what overflow detection looks for.
    """
    xp = np if type(into) is np.ndarray else array_module(into)
    ufunc = xp.add if op == "sum" else xp.maximum
    with np.errstate(over="ignore", invalid="ignore"):
        if not is_half(rows[0].dtype):
            total = rows[0]
            for row in rows[1:-1]:
                total = ufunc(total, row, out=rows[scratch])
            ufunc(total, rows[-1], out=into)
            return
        total = into if into.dtype == np.float32 else pool.take(into.shape, np.float32)
        total[...] = rows[0]
        for row in rows[1:]:
            ufunc(total, row.astype(np.float32), out=total)
        if total is not into:
            into[...] = total
            pool.give(total)


class OrderedSums:
    """The sums in rank order of one communicator, and the queue of those in flight.

    Args:
        route: the way of messages.
        second: makes the way of a second group of the same ranks.  Second halves of non-blocking sums run there, posted
            strictly in the order of the first halves: each rank may post them whenever it finds the time, and they
            still match.
        unfinished: where this object stands while its queue is not empty, so that whoever waits can `advance` it.
    """

    def __init__(self, route: Route, second: Callable[[], Route], unfinished: list[Unfinished]) -> None:
        self.route = route
        self._unfinished = unfinished
        self.rank, self.size = route.transport.rank, route.transport.size
        self._pools: dict[Any, Pool] = {}  # by array module
        self._make_second = second
        self._second: Route | None = None
        self._queue: deque[InFlight] = deque()

    def pool_of(self, a: Array) -> Pool:
        """Where scratch for this array comes from."""
        xp = np if type(a) is np.ndarray else array_module(a)
        pool = self._pools.get(xp)
        if pool is None:
            pool = self._pools[xp] = Pool(xp)
        return pool

    @property
    def held(self) -> int:
        """Bytes of scratch in nobody's use."""
        return sum(pool.held for pool in self._pools.values())

    def all_reduce(self, a: Array, into: Array, op: str) -> None:
        """Sum of `a` over the ranks; flat arrays, may be in place."""
        if a.nbytes <= SMALL:
            pool = self.pool_of(a)
            rows = pool.take((self.size, a.size), a.dtype)
            self.route(rows.size).all_gather(on_wire(a), on_wire(rows))
            fold(rows, into, op, pool)
            pool.give(rows)
            return
        step = SLICE * min(self.size, MOST_SLICES) // a.itemsize
        for start in range(0, a.size, step):
            self._segment(a[start : start + step], into[start : start + step], op)

    def _segment(self, a: Array, into: Array, op: str) -> None:
        counts, own = self.slices(a.size)
        rows = self.pool_of(a).take((self.size, counts[self.rank]), a.dtype)
        transport = self.route(a.size + self.size)
        transport.all_to_all(on_wire(a), counts, on_wire(rows), [counts[self.rank]] * self.size, own=False)
        self.fold(rows, a[own], into[own], op)
        transport.all_gather(None, on_wire(into), counts)

    def reduce_scatter(self, blocks: Array, counts: Sequence[int], into: Array) -> None:
        """This rank's block of the sum; flat arrays, block i of `blocks` has counts[i] elements.

        Scratch: this rank's block, once for each rank.
        """
        rows, route, own = self._rows_of(blocks, counts)
        route.all_to_all(on_wire(blocks), counts, on_wire(rows), [counts[self.rank]] * self.size, own=False)
        self.fold(rows, own, into, "sum")

    def ireduce_scatter(self, blocks: Array, counts: Sequence[int], into: Array) -> Pending:
        """`reduce_scatter` that returns at once: all that is left to do when its message has arrived is to add up."""
        rows, route, own = self._rows_of(blocks, counts)
        arrives = route.iall_to_all(on_wire(blocks), counts, on_wire(rows), [counts[self.rank]] * self.size, own=False)
        return Several([arrives], partial(self.fold, rows, own, into, "sum"))

    def _rows_of(self, blocks: Array, counts: Sequence[int]) -> tuple[Array, Transport, Array]:
        """Where this rank's blocks of the others arrive, their way, and its own one."""
        start = sum(counts[: self.rank])
        rows = self.pool_of(blocks).take((self.size, counts[self.rank]), blocks.dtype)
        return rows, self.route(max(counts) * self.size), blocks[start : start + counts[self.rank]]

    def iall_reduce(self, a: Array, into: Array, op: str) -> InFlight:
        """`all_reduce` that returns when its first half is under way."""
        if a.nbytes > SMALL:
            self.second()  # made here, where all ranks pass
        flight = InFlight(self, a, into, op)
        if not self._queue:
            self._unfinished.append(self)
        self._queue.append(flight)
        self.advance()
        return flight

    def advance(self) -> None:
        """Post every second half whose first half has arrived, in order; never blocks."""
        while self._queue and self._queue[0].first.test():
            self._queue.popleft().turn()
            if not self._queue:
                self._unfinished.remove(self)

    def post_all(self, block: Callable[[Pending], None]) -> None:
        """Post all second halves: before this rank may stay long in another collective of the communicator.

        Args:
            block: how to wait for a first half.
        """
        while self._queue:
            block(self._queue[0].first)
            self.advance()

    def first(self) -> Pending:
        """The oldest first half in flight."""
        return self._queue[0].first

    def second(self) -> Route:
        """The second group's way."""
        if self._second is None:
            self._second = self._make_second()
        return self._second

    def slices(self, count: int) -> tuple[list[int], slice]:
        """How many of `count` elements each rank adds up, and which this one."""
        each = -(-count // self.size)
        start = min(self.rank * each, count)
        return [min(each, max(0, count - rank * each)) for rank in range(self.size)], slice(start, start + each)

    def fold(self, rows: Array, own: Array, into: Array, op: str) -> None:
        """Add up what has come from the others and this rank's own part, and give `rows` back to the pool."""
        parts = [*rows]
        parts[self.rank] = own
        pool = self.pool_of(rows)
        fold(parts, into, op, pool, scratch=0 if self.rank else 1)
        pool.give(rows)


class InFlight:
    """A sum in rank order that is under way: a `Pending`."""

    def __init__(self, sums: OrderedSums, a: Array, into: Array, op: str) -> None:
        self._sums, self._into, self._op = sums, into, op
        self._a = a  # belongs to the message until its first half is complete
        self.second: Pending | None = None
        if a.nbytes <= SMALL:
            self._rows = sums.pool_of(a).take((sums.size, a.size), a.dtype)
            self.first = sums.route(self._rows.size).iall_gather(on_wire(a), on_wire(self._rows))
        else:
            self._counts, self._own = sums.slices(a.size)
            mine = self._counts[sums.rank]
            self._rows = sums.pool_of(a).take((sums.size, mine), a.dtype)
            transport = sums.route(a.size + sums.size)
            self.first = transport.iall_to_all(
                on_wire(a), self._counts, on_wire(self._rows), [mine] * sums.size, own=False
            )

    def turn(self) -> None:
        """The first half has arrived: add up, and post the second half."""
        sums, into = self._sums, self._into
        if self._a.nbytes <= SMALL:
            pool = sums.pool_of(into)
            fold(self._rows, into, self._op, pool)
            pool.give(self._rows)
            self.second = Several([])
        else:
            sums.fold(self._rows, self._a[self._own], into[self._own], self._op)
            self.second = sums.second()(into.size).iall_gather(None, on_wire(into), self._counts)

    def test(self) -> bool:
        """True once the sum stands in `into`."""
        self._sums.advance()
        return self.second is not None and self.second.test()

    def wait(self) -> None:
        """Block until the sum stands in `into`."""
        while self.second is None:
            self._sums.first().wait()
            self._sums.advance()
        self.second.wait()
