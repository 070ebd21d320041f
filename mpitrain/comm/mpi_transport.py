"""The verbs of a transport in MPI's words.

mpi4py's module comes in as an argument (only mpi.py imports it).  Only buffer calls are used (mpi4py's upper-case
ones), so nothing that arrives is ever unpickled.

An MPI that knows devices takes arrays of CuPy as it takes NumPy's.  It knows no streams: so each verb first waits until
the device has done what the arrays wait for.  Not all of MPI knows devices, where some of it does: Open MPI 4 and 5
read their memory on the host, and die, in sums that do not block (open-mpi/ompi issues 9845 and 12045), and promise
nothing of other collectives that do not.  So device arrays are moved by collectives that block, and from rank to rank,
and it is the door that adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mpitrain.comm.alone import Alone
from mpitrain.comm.chunked import REST_TAG, Several
from mpitrain.comm.in_flight import InFlight, MpiPending, check_size, comm_error
from mpitrain.comm.site import call_site
from mpitrain.comm.staging import settle
from mpitrain.comm.transport import Array, Board, Pending, Transport
from mpitrain.comm.wire import blocks
from mpitrain.errors import CommError

SPREAD_TAG = REST_TAG - 5


class MpiTransport:
    """The verbs of one MPI communicator.

    Attributes:
        takes_device: whether buffers may be arrays of this rank's device.
    """

    kind = "mpi"
    adds_device = False

    def __init__(
        self,
        comm: Any,
        flight: InFlight,
        board: Board,
        ranks: tuple[int, ...],
        hosts: Sequence[int],
        name: str,
        takes_device: bool = False,
    ) -> None:
        """`ranks`: the members as ranks of the world; `hosts`: the number of the host of each rank of the world."""
        self.takes_device = takes_device
        mpi = flight.mpi
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._comm, self._flight, self._board, self._ranks, self._name = comm, flight, board, ranks, name
        self._hosts = hosts
        self._share_host = len({hosts[rank] for rank in ranks}) == 1
        self._mpi = mpi
        self._ops = {"sum": mpi.SUM, "max": mpi.MAX}

    def take_device(self, use: Callable[[], None]) -> None:
        """Let buffers be arrays of this rank's device, here and in groups made later; `use` makes it a thread's own."""
        self.takes_device = True
        self._flight.use_device = use

    # -- collectives

    def all_reduce(self, send: Array, recv: Array, op: str) -> None:
        try:
            self._comm.Allreduce(self._mpi.IN_PLACE if send is recv else send, recv, self._ops[op])
        except self._mpi.Exception as error:
            raise self._failed("all_reduce", error) from None

    def all_gather(self, send: Array | None, recv: Array, counts: Sequence[int] | None = None) -> None:
        settle(send, recv)
        try:
            if counts is None:
                self._comm.Allgather(send, recv)
            elif send is not None:
                self._comm.Allgatherv(send, [recv, list(counts)])
            elif self._share_host:
                self._comm.Alltoallv(*self._hand_out(recv, counts))
            else:
                self._comm.Allgatherv(self._mpi.IN_PLACE, [recv, list(counts)])
        except self._mpi.Exception as error:
            raise self._failed("all_gather", error) from None

    def _hand_out(self, recv: Array, counts: Sequence[int]) -> tuple[Any, Any]:
        """What Alltoallv takes, so that each rank gives its block of recv to each of the others itself.

        Where ranks share a host this takes down to a third of the time of Allgatherv, which in Open MPI passes blocks
        on from neighbour to neighbour: with more ranks than cores each passing waits for a turn of the next one.
        Between hosts passing on is right: the network carries a block once to a host, not once to each rank there.
        """
        rank = self.rank
        starts = [0, *accumulate(counts)]
        takes = [*counts]
        takes[rank] = 0
        gives = [counts[rank]] * self.size
        gives[rank] = 0
        block = recv[starts[rank] : starts[rank + 1]]
        if starts[rank] == 0:  # MPICH refuses two buffers that begin at one place
            recv = recv[counts[rank] :]
            starts = [0, *accumulate(takes)]
        return [block, (gives, [0] * self.size)], [recv, (takes, starts[:-1])]

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int] | None = None) -> None:
        try:
            if counts is None:
                self._comm.Reduce_scatter_block(send, recv, self._mpi.SUM)
            else:
                self._comm.Reduce_scatter(send, recv, list(counts), self._mpi.SUM)
        except self._mpi.Exception as error:
            raise self._failed("reduce_scatter", error) from None

    def all_to_all(
        self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int], own: bool = True
    ) -> None:
        settle(send, recv)
        try:
            self._comm.Alltoallv(self._blocks(send, send_counts, own), self._blocks(recv, recv_counts, own))
        except self._mpi.Exception as error:
            raise self._failed("all_to_all", error) from None

    def _blocks(self, buf: Array, counts: Sequence[int], own: bool) -> Any:
        """A buffer of blocks as Alltoallv takes it; without `own` this rank's block counts nothing."""
        lengths = [*counts]
        if own:
            return [buf, lengths]
        starts = [0, *accumulate(counts)]
        lengths[self.rank] = 0
        return [buf, (lengths, starts[:-1])]

    def broadcast(self, buf: Array, root: int) -> None:
        settle(buf)
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
        settle(buf)
        try:
            self._comm.Send(buf, dest, tag)
        except self._mpi.Exception as error:
            raise self._failed(f"send to rank {dest}", error) from None

    def recv(self, buf: Array, source: int, tag: int) -> None:
        settle(buf)
        status = self._mpi.Status()
        try:
            self._comm.Recv(buf, source, tag, status)
        except self._mpi.Exception as error:
            raise self._failed(f"recv from rank {source}", error) from None
        check_size(self._mpi, status, buf.nbytes)

    # -- non-blocking

    def isend(self, buf: Array, dest: int, tag: int) -> Pending:
        settle(buf)
        try:
            return MpiPending(self._flight, self._comm.Isend(buf, dest, tag), (buf,))
        except self._mpi.Exception as error:
            raise self._failed(f"isend to rank {dest}", error) from None

    def irecv(self, buf: Array, source: int, tag: int) -> Pending:
        settle(buf)
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

    def iall_gather(self, send: Array | None, recv: Array, counts: Sequence[int] | None = None) -> Pending:
        if type(recv) is not np.ndarray:
            lengths = [recv.size // self.size] * self.size if counts is None else counts
            places = blocks(recv, lengths)
            return self._spread([places[self.rank] if send is None else send] * self.size, places, send is not None)
        try:
            if counts is None:
                request = self._comm.Iallgather(send, recv)
            else:
                request = self._comm.Iallgatherv(self._mpi.IN_PLACE if send is None else send, [recv, list(counts)])
        except self._mpi.Exception as error:
            raise self._failed("iall_gather", error) from None
        return MpiPending(self._flight, request, (send, recv))

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int] | None = None) -> Pending:
        try:
            if counts is None:
                request = self._comm.Ireduce_scatter_block(send, recv, self._mpi.SUM)
            else:
                request = self._comm.Ireduce_scatter(send, recv, list(counts), self._mpi.SUM)
        except self._mpi.Exception as error:
            raise self._failed("ireduce_scatter", error) from None
        return MpiPending(self._flight, request, (send, recv))

    def iall_to_all(
        self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int], own: bool = True
    ) -> Pending:
        if type(recv) is not np.ndarray:
            return self._spread(blocks(send, send_counts), blocks(recv, recv_counts), own)
        try:
            request = self._comm.Ialltoallv(self._blocks(send, send_counts, own), self._blocks(recv, recv_counts, own))
        except self._mpi.Exception as error:
            raise self._failed("iall_to_all", error) from None
        return MpiPending(self._flight, request, (send, recv))

    def _spread(self, gifts: Sequence[Array], places: Sequence[Array], own: bool) -> Pending:
        """Blocks of device memory from each rank to each, `own` ones too."""
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        parts = [self.irecv(places[rank], rank, SPREAD_TAG) for rank in others if places[rank].size]
        parts += [self.isend(gifts[rank], rank, SPREAD_TAG) for rank in others if gifts[rank].size]
        if own:
            places[self.rank].reshape(-1)[...] = gifts[self.rank].reshape(-1)
        return Several(parts)

    # -- groups

    def group(self, ranks: tuple[int, ...], name: str) -> Transport:
        if len(ranks) == 1:
            return Alone()
        members = tuple(self._ranks[rank] for rank in ranks)
        lane = self._board.open(f"the making of axis {name}", members)
        everyone = self._comm.Get_group()
        some = everyone.Incl(ranks)
        lane.enter(1, "group", (len(ranks),), np.dtype(np.int64), -1)
        lane.place(site := call_site(), hash(site))
        try:
            comm = self._comm.Create_group(some)
        except self._mpi.Exception as error:
            raise self._failed(f"the making of axis {name}", error) from None
        finally:
            lane.leave()
            some.Free()
            everyone.Free()
        return MpiTransport(comm, self._flight, self._board, members, self._hosts, name, self.takes_device)

    def close(self) -> None:
        if self._comm != self._mpi.COMM_NULL and not self._mpi.Is_finalized():
            self._comm.Free()

    def _failed(self, what: str, error: Exception) -> CommError:
        return comm_error(f"{what} on {self._name}", error)
