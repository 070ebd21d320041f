"""The verbs of a transport in MPI's words.

mpi4py's module comes in as an argument (only mpi.py imports it).  Only buffer calls are used (mpi4py's upper-case
ones), so nothing that arrives is ever unpickled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from mpitrain.comm.alone import Alone
from mpitrain.comm.transport import Array, Board, Pending, Transport
from mpitrain.errors import CommError


class MpiPending:
    """A request of MPI, with the buffers that belong to it."""

    __slots__ = ("_buffers", "_expected", "_flight", "_request", "_status")

    def __init__(self, flight: InFlight, request: Any, buffers: tuple[Any, ...], expected: int = -1) -> None:
        """`expected`: bytes that a receive must bring, -1 for other messages."""
        self._flight = flight
        self._request = request
        self._buffers = buffers
        self._expected = expected
        self._status = flight.mpi.Status() if expected >= 0 else None
        flight.add(self)

    def test(self) -> bool:
        if self._request is None:
            return True
        try:
            done = self._request.Test(self._status)
        except self._flight.mpi.Exception as error:
            raise self._failed(error) from None
        if done:
            self._completed()
        return bool(done)

    def wait(self) -> None:
        if self._request is None:
            return
        try:
            self._request.Wait(self._status)
        except self._flight.mpi.Exception as error:
            raise self._failed(error) from None
        self._completed()

    def _completed(self) -> None:
        self._request, self._buffers = None, ()
        self._flight.discard(self)
        if self._status is not None:
            _check_size(self._flight.mpi, self._status, self._expected)

    def _failed(self, error: Exception) -> CommError:
        self._request, self._buffers = None, ()
        self._flight.discard(self)
        return _comm_error("a message in flight", error)


class InFlight:
    """All messages in flight of this process.

    It keeps their buffers alive even if nobody keeps the request, and wakes the helper thread, if there is one.
    """

    def __init__(self, mpi: ModuleType) -> None:
        self.mpi = mpi
        self._messages: set[MpiPending] = set()
        self._wake: threading.Event | None = None
        self._driver: threading.Thread | None = None
        self._stopped = False
        self._sweep_at = 256

    def add(self, message: MpiPending) -> None:
        messages = self._messages
        messages.add(message)
        if self._wake is not None:
            self._wake.set()
        if len(messages) >= self._sweep_at:  # requests that were dropped: nobody else will ever ask for them
            for old in list(messages):
                old.test()
            self._sweep_at = max(256, 2 * len(messages))

    def discard(self, message: MpiPending) -> None:
        self._messages.discard(message)

    def drive(self, comm: Any, pause: float = 0.0005) -> None:
        """Start the helper thread: while a message is in flight it looks into MPI, which moves all of them."""
        wake = self._wake = threading.Event()

        def run() -> None:
            while not self._stopped:
                wake.wait()
                wake.clear()
                while self._messages and not self._stopped:
                    comm.Iprobe(self.mpi.ANY_SOURCE, self.mpi.ANY_TAG)
                    time.sleep(pause)

        self._driver = threading.Thread(target=run, name="mpitrain-progress", daemon=True)
        self._driver.start()

    def stop(self) -> None:
        """End the helper thread; before MPI is left."""
        self._stopped = True
        if self._wake is not None and self._driver is not None:
            self._wake.set()
            self._driver.join(timeout=2.0)


class MpiTransport:
    """The verbs of one MPI communicator."""

    kind = "mpi"

    def __init__(self, comm: Any, flight: InFlight, board: Board, ranks: tuple[int, ...], name: str) -> None:
        """`ranks`: the members as ranks of the world."""
        mpi = flight.mpi
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._comm, self._flight, self._board, self._ranks, self._name = comm, flight, board, ranks, name
        self._mpi = mpi
        self._ops = {"sum": mpi.SUM, "max": mpi.MAX}

    # -- collectives

    def all_reduce(self, send: Array, recv: Array, op: str) -> None:
        try:
            self._comm.Allreduce(self._mpi.IN_PLACE if send is recv else send, recv, self._ops[op])
        except self._mpi.Exception as error:
            raise self._failed("all_reduce", error) from None

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int] | None = None) -> None:
        try:
            if counts is None:
                self._comm.Allgather(send, recv)
            else:
                self._comm.Allgatherv(send, [recv, list(counts)])
        except self._mpi.Exception as error:
            raise self._failed("all_gather", error) from None

    def reduce_scatter(self, send: Array, recv: Array) -> None:
        try:
            self._comm.Reduce_scatter_block(send, recv, self._mpi.SUM)
        except self._mpi.Exception as error:
            raise self._failed("reduce_scatter", error) from None

    def all_to_all(self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int]) -> None:
        try:
            self._comm.Alltoallv([send, list(send_counts)], [recv, list(recv_counts)])
        except self._mpi.Exception as error:
            raise self._failed("all_to_all", error) from None

    def broadcast(self, buf: Array, root: int) -> None:
        try:
            self._comm.Bcast(buf, root)
        except self._mpi.Exception as error:
            raise self._failed("broadcast", error) from None

    def barrier(self) -> None:
        try:
            self._comm.Barrier()
        except self._mpi.Exception as error:
            raise self._failed("barrier", error) from None

    # -- from one rank to another

    def send(self, buf: Array, dest: int, tag: int) -> None:
        try:
            self._comm.Send(buf, dest, tag)
        except self._mpi.Exception as error:
            raise self._failed(f"send to rank {dest}", error) from None

    def recv(self, buf: Array, source: int, tag: int) -> None:
        status = self._mpi.Status()
        try:
            self._comm.Recv(buf, source, tag, status)
        except self._mpi.Exception as error:
            raise self._failed(f"recv from rank {source}", error) from None
        _check_size(self._mpi, status, buf.nbytes)

    # -- non-blocking

    def isend(self, buf: Array, dest: int, tag: int) -> Pending:
        try:
            return MpiPending(self._flight, self._comm.Isend(buf, dest, tag), (buf,))
        except self._mpi.Exception as error:
            raise self._failed(f"isend to rank {dest}", error) from None

    def irecv(self, buf: Array, source: int, tag: int) -> Pending:
        try:
            return MpiPending(self._flight, self._comm.Irecv(buf, source, tag), (buf,), buf.nbytes)
        except self._mpi.Exception as error:
            raise self._failed(f"irecv from rank {source}", error) from None

    def iall_reduce(self, send: Array, recv: Array, op: str) -> Pending:
        try:
            request = self._comm.Iallreduce(self._mpi.IN_PLACE if send is recv else send, recv, self._ops[op])
        except self._mpi.Exception as error:
            raise self._failed("iall_reduce", error) from None
        return MpiPending(self._flight, request, (send, recv))

    def iall_gather(self, send: Array, recv: Array, counts: Sequence[int] | None = None) -> Pending:
        try:
            if counts is None:
                request = self._comm.Iallgather(send, recv)
            else:
                request = self._comm.Iallgatherv(send, [recv, list(counts)])
        except self._mpi.Exception as error:
            raise self._failed("iall_gather", error) from None
        return MpiPending(self._flight, request, (send, recv))

    def iall_to_all(self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int]) -> Pending:
        try:
            request = self._comm.Ialltoallv([send, list(send_counts)], [recv, list(recv_counts)])
        except self._mpi.Exception as error:
            raise self._failed("iall_to_all", error) from None
        return MpiPending(self._flight, request, (send, recv))

    # -- groups

    def group(self, ranks: tuple[int, ...], name: str) -> Transport:
        if len(ranks) == 1:
            return Alone()
        members = tuple(self._ranks[rank] for rank in ranks)
        lane = self._board.open(f"the making of axis {name}", members)
        everyone = self._comm.Get_group()
        some = everyone.Incl(ranks)
        lane.enter(1, "group", (len(ranks),), np.dtype(np.int64), -1)
        try:
            comm = self._comm.Create_group(some)
        except self._mpi.Exception as error:
            raise self._failed(f"the making of axis {name}", error) from None
        finally:
            lane.leave()
            some.Free()
            everyone.Free()
        return MpiTransport(comm, self._flight, self._board, members, name)

    def close(self) -> None:
        if self._comm != self._mpi.COMM_NULL and not self._mpi.Is_finalized():
            self._comm.Free()

    def _failed(self, what: str, error: Exception) -> CommError:
        return _comm_error(f"{what} on {self._name}", error)


def _check_size(mpi: ModuleType, status: Any, expected: int) -> None:
    found = status.Get_count(mpi.BYTE)
    if found != expected:
        raise CommError(f"a message from rank {status.source} has {found} bytes; this rank expects {expected}")


def _comm_error(what: str, error: Exception) -> CommError:
    return CommError(f"{what}: MPI says: {str(error).splitlines()[0]}")
