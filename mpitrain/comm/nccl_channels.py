"""Messages from one rank to another over NCCL, which knows neither tags nor messages that come before they are asked
for, and can stop for ever where two ranks send to each other first.

Each direction of a pair has a channel: a communicator of two, a stream, and a thread at either end.  Before a message
leaves, its sender says so over the transport beneath: a note of its tag and size.  Notes arrive in the order of the
messages, so the receiver knows what comes next, and puts it where it was asked for, or keeps it until it is.

    sender                                        receiver
    copy the array; note --- transport beneath -> note: whose receive is it?
    thread: send the copy ---------- NCCL ------> thread: receive into its array, or into one that waits

The copy, at the speed of the device's own memory, makes every send complete at once: nothing that a rank computes ever
waits for a receiver.  The threads make the communicators, each of which waits for the other end's, so a rank itself
never waits in NCCL.  But a large message occupies a part of the sender's device until it is received: who waits for the
whole device, and not for a stream, waits for the receivers, too.

Arrays of the host go the same way, with a note first and NCCL left out: so what one rank sends from its host another
may receive on its device, and the other way round.  They are copied, too: a rank takes up notes while it waits for a
message from that sender, not while it waits for others, and no sender may have to wait for that.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial

import numpy as np

from mpitrain.comm.chunked import REST_TAG
from mpitrain.comm.nccl_line import Job, Line, Rank, failed, on_host, unique_id
from mpitrain.comm.transport import Array, Pending
from mpitrain.errors import CommError

NOTE_TAG = REST_TAG - 7
FACTS = 3  # numbers at the beginning of a note: tag, bytes, whether they are the host's
NOTE = FACTS + 16  # and the channel's name, 128 bytes


class Sent:
    """A send, which is complete: what was to be sent is copied."""

    def test(self) -> bool:
        """True."""
        return True

    def wait(self) -> None:
        """Nothing."""


class Outgoing:
    """The sending end of a channel."""

    def __init__(self, rank: Rank, peer: int) -> None:
        self._rank, self._peer = rank, peer
        self._identity = unique_id(rank.nccl)
        self._line: Line | None = None
        self._under_way: deque[tuple[Pending, Array | None]] = deque()  # with what nobody else keeps

    def isend(self, buf: Array, tag: int) -> Pending:
        """Send a copy of an array."""
        beneath, is_host = self._rank.beneath, on_host(buf)
        note = np.empty(NOTE, np.int64)
        note[:FACTS] = tag, buf.nbytes, is_host
        note[FACTS:] = np.frombuffer(self._identity, np.int64)
        copy = buf.copy()
        self._under_way.append((beneath.isend(note, self._peer, NOTE_TAG), note))
        if is_host:
            self._under_way.append((beneath.isend(copy, self._peer, tag), copy))
        elif copy.nbytes:
            job = Job(self._rank, copy, self._rank.mark())
            self._under_way.append((job, None))
            if self._line is None:
                self._line = Line(self._rank, self._identity, 0)
            self._line.put(job)
        return Sent()

    def let_go(self) -> None:
        """Keep nothing of messages that have left.

        Raises:
            CommError: one has not, and will not.
        """
        if self._line is not None and self._line.error is not None:
            raise failed(self._rank, self._line.error)
        while self._under_way and self._under_way[0][0].test():
            self._under_way.popleft()

    def close(self) -> None:
        """End it when all has left."""
        for pending, kept in self._under_way:
            if kept is not None:
                pending.wait()
        if self._line is not None:
            self._line.close()
        self._under_way.clear()


Bringing = Callable[["Received"], tuple[Pending, Array]]  # begins an announced message; gives it and where it lands


class Incoming:
    """The receiving end of a channel."""

    def __init__(self, rank: Rank, peer: int) -> None:
        self._rank, self.peer = rank, peer
        self._line: Line | None = None
        self._note = np.empty(NOTE, np.int64)
        self.note: Pending | None = None  # the next one, while some receive waits for its message
        self._asked: dict[int, deque[Received]] = defaultdict(deque)  # by tag
        self._waiting = 0  # of those
        self._early: dict[int, deque[Bringing]] = defaultdict(deque)  # messages that nobody had asked for yet

    def irecv(self, buf: Array, tag: int) -> Received:
        """Receive into an array."""
        receive = Received(self._rank, self, buf)
        if self._early[tag]:
            receive.begin(*self._early[tag].popleft()(receive))
        else:
            self._asked[tag].append(receive)
            self._waiting += 1
            self.advance()
        return receive

    def advance(self) -> None:
        """Take up all messages that are announced; never blocks."""
        while self._waiting:
            if self.note is None:
                self.note = self._rank.beneath.irecv(self._note, self.peer, NOTE_TAG)
            if not self.note.test():
                return
            self.note = None
            tag, nbytes, is_host = self._note[:FACTS].tolist()
            self._take_up(tag, nbytes, bool(is_host))

    def _take_up(self, tag: int, nbytes: int, is_host: bool) -> None:
        receive = self._asked[tag].popleft() if self._asked[tag] else None
        bring: Bringing
        if is_host:
            bring = partial(self._over_host, tag, nbytes)
        else:
            over_nccl = self._over_nccl(nbytes, receive)  # at once: NCCL wants to receive in the order of sends
            bring = lambda _: over_nccl  # noqa: E731
        if receive is None:
            self._early[tag].append(bring)
        else:
            self._waiting -= 1
            receive.begin(*bring(receive))

    def _over_host(self, tag: int, nbytes: int, receive: Received) -> tuple[Pending, Array]:
        buf = receive.buf
        landing = buf if on_host(buf) and buf.nbytes == nbytes else np.empty(nbytes, np.uint8)
        return self._rank.beneath.irecv(landing, self.peer, tag), landing

    def _over_nccl(self, nbytes: int, receive: Received | None) -> tuple[Pending, Array]:
        if receive is not None and not on_host(receive.buf) and receive.buf.nbytes == nbytes:
            landing, ready = receive.buf, receive.ready
        else:
            landing, ready = self._rank.device.xp.empty(nbytes, np.uint8), self._rank.mark()
        if not nbytes:
            return Sent(), landing
        if self._line is None:
            self._line = Line(self._rank, self._note[FACTS:].tobytes(), 1)
        job = Job(self._rank, landing, ready)
        self._line.put(job)
        return job, landing

    def close(self) -> None:
        """End it."""
        if self._line is not None:
            self._line.close()


class Received:
    """A receive under way: a `Pending`.

    Args:
        rank: that receives.
        channel: by which the message comes.
        buf: that it fills.
    """

    def __init__(self, rank: Rank, channel: Incoming, buf: Array) -> None:
        self.buf = buf
        self.ready = None if on_host(buf) else rank.mark()
        self._rank, self._channel = rank, channel
        self._message: Pending | None = None
        self._landing: Array | None = None
        self._complete = False

    def begin(self, message: Pending, landing: Array) -> None:
        """Its message is announced, and lands in the array of the receive or in one of its own."""
        self._message, self._landing = message, landing

    def test(self) -> bool:
        """True once the message is there."""
        if self._complete:
            return True
        self._channel.advance()
        if self._message is None or not self._message.test():
            return False
        self._finish()
        return True

    def wait(self) -> None:
        """Have the rank's stream wait for the message; the host waits until its sender has told of it."""
        if self._complete:
            return
        self._channel.advance()
        while self._message is None:
            assert self._channel.note is not None
            self._channel.note.wait()
            self._channel.advance()
        self._message.wait()
        self._finish()

    def _finish(self) -> None:
        buf, landing = self.buf, self._landing
        assert landing is not None
        if landing.nbytes != buf.nbytes:
            raise CommError(
                f"recv from rank {self._channel.peer} on {self._rank.name}: the message has {landing.nbytes} bytes,"
                f" the array {buf.nbytes}"
            )
        if landing is not buf and buf.nbytes:
            numbers = landing.view(buf.dtype).reshape(buf.shape)
            if on_host(buf):
                buf[...] = numbers.get()  # type: ignore[attr-defined]  # of the device
            else:
                buf[...] = self._rank.device.xp.asarray(numbers)
        self._complete = True
        self._message = self._landing = None


class Channels:
    """Those of one rank in a group."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._to: dict[int, Outgoing] = {}
        self._from: dict[int, Incoming] = {}

    def isend(self, buf: Array, dest: int, tag: int) -> Pending:
        """As of `Transport`; complete at once."""
        self._let_go()
        if dest not in self._to:
            self._to[dest] = Outgoing(self._rank, dest)
        return self._to[dest].isend(buf, tag)

    def irecv(self, buf: Array, source: int, tag: int) -> Pending:
        """As of `Transport`."""
        self._let_go()
        if source not in self._from:
            self._from[source] = Incoming(self._rank, source)
        return self._from[source].irecv(buf, tag)

    def _let_go(self) -> None:
        for outgoing in self._to.values():
            outgoing.let_go()

    def close(self) -> None:
        """End all."""
        for outgoing in self._to.values():
            outgoing.close()
        for incoming in self._from.values():
            incoming.close()
