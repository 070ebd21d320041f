"""The transport of one rank: everything arrives where it is.

An axis of size 1 and a world of one hold it.  The door never asks it to move anything (a communicator of size 1 answers
by itself), but it keeps the promises of a transport, so a group of one can be used raw too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpitrain.comm.transport import Array, Pending, Transport
from mpitrain.errors import CommError


class _Done:
    """A message that was complete when it started."""

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Alone:
    """A group of one rank."""

    rank = 0
    size = 1
    kind = "alone"
    takes_device = adds_device = False

    def _copy(self, send: Array, recv: Array) -> None:
        if recv is not send:
            np.copyto(recv.reshape(-1), send.reshape(-1))

    def all_reduce(self, send: Array, recv: Array, op: str) -> None:
        self._copy(send, recv)

    def all_gather(self, send: Array | None, recv: Array, counts: Sequence[int] | None = None) -> None:
        if send is not None:
            self._copy(send, recv)

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int] | None = None) -> None:
        self._copy(send, recv)

    def all_to_all(
        self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int], own: bool = True
    ) -> None:
        if own:
            self._copy(send, recv)

    def broadcast(self, buf: Array, root: int) -> None:
        pass

    def barrier(self) -> None:
        pass

    def send(self, buf: Array, dest: int, tag: int) -> None:
        raise CommError("a rank that is alone has nobody to send to")

    def recv(self, buf: Array, source: int, tag: int) -> None:
        raise CommError("a rank that is alone has nobody to receive from")

    def isend(self, buf: Array, dest: int, tag: int) -> Pending:
        raise CommError("a rank that is alone has nobody to send to")

    def irecv(self, buf: Array, source: int, tag: int) -> Pending:
        raise CommError("a rank that is alone has nobody to receive from")

    def iall_reduce(self, send: Array, recv: Array, op: str) -> Pending:
        self._copy(send, recv)
        return _Done()

    def iall_gather(self, send: Array | None, recv: Array, counts: Sequence[int] | None = None) -> Pending:
        self.all_gather(send, recv, counts)
        return _Done()

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int] | None = None) -> Pending:
        self._copy(send, recv)
        return _Done()

    def iall_to_all(
        self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int], own: bool = True
    ) -> Pending:
        self.all_to_all(send, send_counts, recv, recv_counts, own)
        return _Done()

    def group(self, ranks: tuple[int, ...], name: str) -> Transport:
        return Alone()

    def close(self) -> None:
        pass
