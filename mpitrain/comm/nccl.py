"""The verbs of a transport in NCCL's words: arrays of devices from device to device, beside another transport.

NCCL moves memory of NVIDIA's devices over whatever links them, and adds it up on the way.  It knows devices only: so
arrays of the host, barriers and the making of groups stay with the transport beneath.  From one rank to another both
kinds mix (nccl_channels.py); in a collective all ranks bring one kind.

Every group has a stream of its own, tied to the rank's by events on both sides: a message begins when the device has
come to where the host was when it asked for it, and what the host asks for afterwards waits for it on the device.  The
host itself waits for nothing, so messages and computation overlap without a hand.  What follows from that: a partner
that never comes is noticed where the host next waits for the device, at the end of the step, not in the call.

NCCL's own communicators are made when a group is, and their members connected: they are all there, in the same order.
Made or connected by the first message, which is what NCCL does by itself, ranks could wait for each other for ever.

Source: NCCL's user guide, "Using NCCL"; CuPy's bindings, `cupy.cuda.nccl`.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpitrain.comm.chunked import Several
from mpitrain.comm.mistakes import MAX_TAG
from mpitrain.comm.nccl_channels import Channels
from mpitrain.comm.nccl_line import Rank, bindings, on_host, unique_id
from mpitrain.comm.together import together
from mpitrain.comm.transport import Array, Pending, Transport
from mpitrain.comm.wire import blocks
from mpitrain.comm.world import World
from mpitrain.device import Device
from mpitrain.errors import CommError, DeviceError
from mpitrain.recording.outside import heard

ID_BYTES = 128  # of a communicator's name, NCCL_UNIQUE_ID_BYTES
EAGER = "NCCL_RUNTIME_CONNECT"  # 0: the members of a communicator connect for collectives when it is made


def agree(world: World, device: Device) -> str:
    """Whether NCCL can go between the devices of all ranks.  Collective over the world.

    Returns:
        What it is: `NCCL 2.28.3`.

    Raises:
        DeviceError: NCCL is not installed on some rank, or ranks share a device; on every rank, before NCCL begins.
    """
    found = world.exchange(heard("its host and device", lambda: [world.host, device.identity]))
    shared = max(Counter(tuple(one) for one in found if one[1]).values(), default=1)
    library = together(world, lambda: heard("its NCCL", lambda: _checked(max(shared, device.ranks))))
    assert library is not None
    return library


def connect(world: World, device: Device) -> NcclTransport:
    """NCCL between the devices of all ranks, that have agreed.  Collective, before any group of them is made.

    Args:
        world: all ranks, over whose transport ids, host arrays and barriers go.
        device: of this rank.

    Cost: NCCL looks for links and opens them; each group made later takes a part of that again, and some memory of
    the device.  Not measured.
    """
    os.environ.setdefault(EAGER, "0")
    return NcclTransport(Rank(world.transport, device, bindings(), world.mode, "world"))


def _checked(ranks: int) -> str:
    """What NCCL is, if it loads and takes so many ranks a device."""
    nccl = bindings()
    if not nccl.available:
        raise DeviceError(
            "--device-messages nccl: NCCL does not load.  python -m pip install nvidia-nccl-cu13 (cu12 beside a CuPy"
            " for CUDA 12)\nbrings it; or take --device-messages auto."
        )
    if ranks > 1:
        raise DeviceError(
            f"--device-messages nccl: {ranks} ranks share one device, and NCCL takes one rank a device.\n"
            "Start as many ranks as there are devices, or take --device-messages staged."
        )
    return version(nccl)


def installed() -> str:
    """`NCCL 2.28.3`; "" where it does not load."""
    nccl = bindings()
    return version(nccl) if nccl.available else ""


def version(nccl: Any) -> str:
    """`NCCL 2.28.3`."""
    number = int(nccl.get_version())
    return f"NCCL {number // 10000}.{number // 100 % 100}.{number % 100}"


class Posted:
    """A message on a stream of NCCL's."""

    def __init__(self, rank: Rank, done: Any, buffers: tuple[Any, ...]) -> None:
        self._rank, self._done, self._buffers = rank, done, buffers

    def test(self) -> bool:
        """True once it is complete."""
        if self._buffers and not self._done.done:
            return False
        self._buffers = ()
        return True

    def wait(self) -> None:
        """Have the rank's stream wait for it."""
        if self._buffers:
            self._rank.follow(self._done)
            self._buffers = ()


class NcclTransport:
    """The verbs of one group of ranks with a device each.  Collective over the group.

    Args:
        me: this rank, with the transport beneath of the same ranks.

    Attributes:
        library: "NCCL 2.28.3".
    """

    takes_device = adds_device = True

    def __init__(self, me: Rank) -> None:
        self._me, self._beneath = me, me.beneath
        self.rank, self.size, self.kind = me.beneath.rank, me.beneath.size, me.beneath.kind
        self._xp = xp = me.device.xp
        self._nccl = nccl = me.nccl
        self.library = version(nccl)
        with self._refusing("the making of it"):
            identity = np.frombuffer(unique_id(nccl) if self.rank == 0 else bytes(ID_BYTES), np.uint8).copy()
            self._beneath.broadcast(identity, 0)
            self._comm = nccl.NcclCommunicator(self.size, identity.tobytes(), self.rank)
        self._stream = xp.cuda.Stream(non_blocking=True)
        self._channels = Channels(me)
        self._closed = False
        ones = [1] * self.size  # a greeting from each to each, for which they connect
        self.all_to_all(xp.zeros(self.size, np.uint8), ones, xp.zeros(self.size, np.uint8), ones)

    # -- collectives

    def all_reduce(self, send: Array, recv: Array, op: str) -> None:
        self.iall_reduce(send, recv, op).wait()

    def iall_reduce(self, send: Array, recv: Array, op: str) -> Pending:
        if on_host(recv):
            return self._beneath.iall_reduce(send, recv, op)
        summand, total, finish = self._summable(send, recv)

        def call(stream: int) -> None:
            how = self._sum_type(summand), self._op(op), stream
            if summand.size:
                self._comm.allReduce(_at(summand), _at(total), _numbers_in(summand), *how)

        return self._post("all_reduce", call, summand, total, finish=finish)

    def all_gather(self, send: Array | None, recv: Array, counts: Sequence[int] | None = None) -> None:
        self.iall_gather(send, recv, counts).wait()

    def iall_gather(self, send: Array | None, recv: Array, counts: Sequence[int] | None = None) -> Pending:
        if on_host(recv):
            return self._beneath.iall_gather(send, recv, counts)

        def call(stream: int) -> None:
            if counts is None:
                assert send is not None
                if send.size:
                    self._comm.allGather(_at(send), _at(recv), send.nbytes, self._nccl.NCCL_UINT8, stream)
                return
            with self._group():
                for rank, block in enumerate(blocks(recv, counts)):
                    source = send if rank == self.rank and send is not None else block
                    if block.size:
                        how = block.nbytes, self._nccl.NCCL_UINT8, rank, stream
                        self._comm.broadcast(_at(source), _at(block), *how)

        return self._post("all_gather", call, send, recv)

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int] | None = None) -> None:
        self.ireduce_scatter(send, recv, counts).wait()

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int] | None = None) -> Pending:
        if on_host(send):
            return self._beneath.ireduce_scatter(send, recv, counts)
        summand, total, finish = self._summable(send, recv)

        def call(stream: int) -> None:
            how = self._sum_type(summand), self._nccl.NCCL_SUM
            if counts is None:
                if total.size:
                    self._comm.reduceScatter(_at(summand), _at(total), _numbers_in(total), *how, stream)
                return
            with self._group():
                for rank, block in enumerate(blocks(summand, counts)):
                    if block.size:
                        into = total if rank == self.rank else block  # of the others nothing is written
                        self._comm.reduce(_at(block), _at(into), _numbers_in(block), *how, rank, stream)

        return self._post("reduce_scatter", call, summand, total, finish=finish)

    def all_to_all(
        self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int], own: bool = True
    ) -> None:
        self.iall_to_all(send, send_counts, recv, recv_counts, own).wait()

    def iall_to_all(
        self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int], own: bool = True
    ) -> Pending:
        if on_host(recv):
            return self._beneath.iall_to_all(send, send_counts, recv, recv_counts, own)
        gifts, places = blocks(send, send_counts), blocks(recv, recv_counts)
        if own:
            places[self.rank][...] = gifts[self.rank]

        def call(stream: int) -> None:
            with self._group():
                for rank in range(self.size):
                    if rank == self.rank:
                        continue
                    if gifts[rank].size:
                        self._comm.send(_at(gifts[rank]), gifts[rank].nbytes, self._nccl.NCCL_UINT8, rank, stream)
                    if places[rank].size:
                        self._comm.recv(_at(places[rank]), places[rank].nbytes, self._nccl.NCCL_UINT8, rank, stream)

        return self._post("all_to_all", call, send, recv)

    def broadcast(self, buf: Array, root: int) -> None:
        if on_host(buf):
            self._beneath.broadcast(buf, root)
            return

        def call(stream: int) -> None:
            if buf.size:
                self._comm.broadcast(_at(buf), _at(buf), buf.nbytes, self._nccl.NCCL_UINT8, root, stream)

        self._post("broadcast", call, buf).wait()

    def barrier(self) -> None:
        self._beneath.barrier()

    # -- from one rank to another

    def send(self, buf: Array, dest: int, tag: int) -> None:
        if on_host(buf) and tag > MAX_TAG:
            self._beneath.send(buf, dest, tag)
        else:
            self._channels.isend(buf, dest, tag)

    def recv(self, buf: Array, source: int, tag: int) -> None:
        if on_host(buf) and tag > MAX_TAG:
            self._beneath.recv(buf, source, tag)
        else:
            self._channels.irecv(buf, source, tag).wait()

    def isend(self, buf: Array, dest: int, tag: int) -> Pending:
        if on_host(buf) and tag > MAX_TAG:  # the door's own: of one kind at both ends
            return self._beneath.isend(buf, dest, tag)
        return self._channels.isend(buf, dest, tag)

    def irecv(self, buf: Array, source: int, tag: int) -> Pending:
        if on_host(buf) and tag > MAX_TAG:
            return self._beneath.irecv(buf, source, tag)
        return self._channels.irecv(buf, source, tag)

    # -- groups

    def group(self, ranks: tuple[int, ...], name: str) -> Transport:
        beneath = self._beneath.group(ranks, name)
        return beneath if beneath.size == 1 else NcclTransport(replace(self._me, beneath=beneath, name=name))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._channels.close()
            self._stream.synchronize()
            self._comm.destroy()
        self._beneath.close()

    # -- underneath

    def _post(
        self,
        verb: str,
        call: Callable[[int], None],
        *buffers: Array | None,
        finish: Callable[[], None] | None = None,
    ) -> Pending:
        """Put a call on the group's stream, behind what the rank's stream has been given."""
        self._stream.wait_event(self._me.mark())
        with self._refusing(verb):
            call(self._stream.ptr)
        posted = Posted(self._me, self._me.mark(self._stream), buffers)
        return posted if finish is None else Several([posted], finish)

    def _summable(self, send: Array, recv: Array) -> tuple[Array, Array, Callable[[], None] | None]:
        """Summand and sum in numbers that NCCL can add, and what brings the sum to where it is wanted.

        It knows no whole numbers of 16 bits: those are added in 32, of which the low half is the same.
        """
        if send.dtype.kind not in "iu" or send.dtype.itemsize != 2:
            return send, recv, None
        wide = send.astype(np.int32)
        total = wide if recv.size == send.size else self._xp.empty(recv.shape, np.int32)

        def finish() -> None:
            recv[...] = total.reshape(recv.shape).astype(recv.dtype)

        return wide, total, finish

    def _sum_type(self, x: Array) -> int:
        kinds = {"c": "FLOAT", "f": "FLOAT", "i": "INT", "u": "UINT", "b": "UINT"}
        kind = kinds[x.dtype.kind]
        bits = 8 * x.dtype.itemsize // (2 if x.dtype.kind == "c" else 1)
        return int(getattr(self._nccl, f"NCCL_{kind}{bits}"))

    def _op(self, op: str) -> int:
        return int(self._nccl.NCCL_SUM if op == "sum" else self._nccl.NCCL_MAX)

    @contextlib.contextmanager
    def _group(self) -> Iterator[None]:
        """Calls that NCCL begins together: none of them waits for another."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    @contextlib.contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._nccl.NcclError as error:
            raise CommError(f"{what} on {self._me.name}: {self.library} says {str(error).splitlines()[0]}") from error


def _at(x: Any) -> int:
    """The address of an array on its device."""
    return int(x.data.ptr)


def _numbers_in(x: Array) -> int:
    """How many real numbers an array holds."""
    return x.size * (2 if x.dtype.kind == "c" else 1)
