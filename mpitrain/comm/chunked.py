"""Messages of any length over a transport whose counts are limited.

MPI counts elements in 32 bits: Open MPI 5.0 refuses larger counts, others wrap around.  `Chunked` cuts a message into
pieces of at most `Mode.limit` elements.  The door takes this way only for messages that need it, so cutting may copy.

    all_reduce, broadcast, send, recv     consecutive slices, no copy
    all_gather, reduce_scatter            slices of every block, through a buffer
    all_to_all                            long blocks in slices from rank to rank, the others in one message, through
                                          buffers.  Both ends of a block know its length, so nothing needs to be agreed:
                                          a rank without long blocks makes that one message by itself
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from mpitrain.backend import array_module
from mpitrain.comm.transport import Array, Mode, Pending, Transport
from mpitrain.comm.wire import blocks, flat

REST_TAG = 32767


class Several:
    """Several messages in flight that are complete together; `finish` then unpacks, once."""

    def __init__(self, parts: list[Pending], finish: Callable[[], None] | None = None) -> None:
        self.parts = parts
        self._finish = finish

    def test(self) -> bool:
        """True once all are complete."""
        self.parts = [part for part in self.parts if not part.test()]
        if self.parts:
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Block until all are complete."""
        for part in self.parts:
            part.wait()
        self.parts = []
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


class Route:
    """The way for a message: the transport itself, or `Chunked` where the message is too long for it."""

    def __init__(self, transport: Transport, mode: Mode) -> None:
        self.transport = transport
        self._chunked = Chunked(transport, mode)
        self._mode = mode

    def __call__(self, elements: int) -> Transport:
        """The transport for buffers of at most so many elements."""
        return self.transport if elements <= self._mode.limit else self._chunked


class Chunked:
    """A transport without limit on counts, made of one that has it.  Verbs as in `Transport`."""

    def __init__(self, transport: Transport, mode: Mode) -> None:
        self._transport = transport
        self._mode = mode
        self.rank, self.size, self.kind = transport.rank, transport.size, transport.kind

    @property
    def takes_device(self) -> bool:
        """As the transport does."""
        return self._transport.takes_device

    @property
    def adds_device(self) -> bool:
        """As the transport does."""
        return self._transport.adds_device

    def _slices(self, count: int, blocks: int = 1) -> Iterator[slice]:
        """Cut 0 ... count so that `blocks` pieces of one length stay below the limit."""
        step = max(1, self._mode.limit // blocks)
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))

    def all_reduce(self, send: Array, recv: Array, op: str) -> None:
        """Slice by slice."""
        for a, b in self._pairs(send, recv):
            self._transport.all_reduce(a, b, op)

    def iall_reduce(self, send: Array, recv: Array, op: str) -> Several:
        """Every slice at once."""
        return Several([self._transport.iall_reduce(a, b, op) for a, b in self._pairs(send, recv)])

    def _pairs(self, send: Array, recv: Array) -> Iterator[tuple[Array, Array]]:
        """Slices of both; the same object twice where the message is in place."""
        source, sink = send.reshape(-1), recv.reshape(-1)
        for piece in self._slices(source.size):
            a = source[piece]
            yield a, a if send is recv else sink[piece]

    def all_gather(self, send: Array | None, recv: Array, counts: Sequence[int] | None = None) -> None:
        """Slices of every block."""
        self.iall_gather(send, recv, counts).wait()

    def iall_gather(self, send: Array | None, recv: Array, counts: Sequence[int] | None = None) -> Several:
        """Slices of every block."""
        size, sink = self._transport.size, recv.reshape(-1)
        lengths = [sink.size // size] * size if counts is None else list(counts)
        starts = [0, *accumulate(lengths)]
        source = sink[starts[self.rank] : starts[self.rank + 1]] if send is None else send.reshape(-1)
        parts: list[Pending] = []
        landed: list[tuple[Array, list[slice]]] = []
        for piece in self._slices(max(lengths), size):
            spans = [
                slice(s + min(piece.start, n), s + min(piece.stop, n)) for s, n in zip(starts, lengths, strict=False)
            ]
            now = [span.stop - span.start for span in spans]
            buffer = array_module(recv).empty(sum(now), recv.dtype)
            parts.append(self._transport.iall_gather(source[piece], buffer, now))
            landed.append((buffer, spans))

        def spread() -> None:
            for buffer, spans in landed:
                at = 0
                for span in spans:
                    length = span.stop - span.start
                    sink[span] = buffer[at : at + length]
                    at += length

        return Several(parts, spread)

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int] | None = None) -> None:
        """Slices of every block."""
        for part in self._block_slices(send, recv, counts):
            self._transport.reduce_scatter(*part)

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int] | None = None) -> Several:
        """Slices of every block, all at once."""
        return Several([self._transport.ireduce_scatter(*part) for part in self._block_slices(send, recv, counts)])

    def _block_slices(
        self, send: Array, recv: Array, counts: Sequence[int] | None
    ) -> Iterator[tuple[Array, Array, list[int]]]:
        """Slice by slice of every block: what a reduce-scatter takes."""
        size, sink = self._transport.size, recv.reshape(-1)
        lengths = [sink.size] * size if counts is None else counts
        summands = blocks(send, lengths)
        for piece in self._slices(max(lengths), size):
            parts = [block[piece] for block in summands]
            yield flat(parts), sink[piece], [part.size for part in parts]

    def all_to_all(
        self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int], own: bool = True
    ) -> None:
        """Long blocks in slices, the others together."""
        long, short, spread = self._sorted_by_length(send, send_counts, recv, recv_counts, own)
        self._transport.all_to_all(*short)  # MPI takes it for no part of one that does not block
        Several(long, spread).wait()

    def iall_to_all(
        self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int], own: bool = True
    ) -> Several:
        """Long blocks in slices, the others together."""
        long, short, spread = self._sorted_by_length(send, send_counts, recv, recv_counts, own)
        return Several([*long, self._transport.iall_to_all(*short)], spread)

    def _sorted_by_length(
        self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int], own: bool
    ) -> tuple[list[Pending], tuple[Array, list[int], Array, list[int]], Callable[[], None]]:
        """The slices of long blocks in flight; the all-to-all of the others; what brings these to their places."""
        gifts, places = blocks(send, send_counts), blocks(recv, recv_counts)
        if own:
            places[self.rank][...] = gifts[self.rank]
        most = self._mode.limit // self.size
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        long: list[Pending] = []
        for peer in others:
            if places[peer].size > most:
                long += self.irecv(places[peer], peer, REST_TAG).parts
        for peer in others:
            if gifts[peer].size > most:
                long += self.isend(gifts[peer], peer, REST_TAG).parts

        def is_short(rank: int, block: Array) -> bool:
            return rank != self.rank and block.size <= most

        given = [block if is_short(rank, block) else block[:0] for rank, block in enumerate(gifts)]
        taken = [place if is_short(rank, place) else place[:0] for rank, place in enumerate(places)]
        counts = [place.size for place in taken]
        landing = array_module(recv).empty(sum(counts), recv.dtype)

        def spread() -> None:
            for place, arrived in zip(taken, blocks(landing, counts), strict=True):
                place[...] = arrived

        return long, (flat(given), [block.size for block in given], landing, counts), spread

    def broadcast(self, buf: Array, root: int) -> None:
        """Slice by slice."""
        sink = buf.reshape(-1)
        for piece in self._slices(sink.size):
            self._transport.broadcast(sink[piece], root)

    def barrier(self) -> None:
        """As it is."""
        self._transport.barrier()

    def group(self, ranks: tuple[int, ...], name: str) -> Transport:
        """Another group without limit."""
        return Chunked(self._transport.group(ranks, name), self._mode)

    def close(self) -> None:
        """As it is."""
        self._transport.close()

    def send(self, buf: Array, dest: int, tag: int) -> None:
        """Slice by slice."""
        source = buf.reshape(-1)
        for piece in self._slices(source.size):
            self._transport.send(source[piece], dest, tag)

    def recv(self, buf: Array, source: int, tag: int) -> None:
        """Slice by slice."""
        sink = buf.reshape(-1)
        for piece in self._slices(sink.size):
            self._transport.recv(sink[piece], source, tag)

    def isend(self, buf: Array, dest: int, tag: int) -> Several:
        """All slices at once: one pair's messages of one tag arrive in order."""
        source = buf.reshape(-1)
        return Several([self._transport.isend(source[piece], dest, tag) for piece in self._slices(source.size)])

    def irecv(self, buf: Array, source: int, tag: int) -> Several:
        """All slices at once."""
        sink = buf.reshape(-1)
        return Several([self._transport.irecv(sink[piece], source, tag) for piece in self._slices(sink.size)])
