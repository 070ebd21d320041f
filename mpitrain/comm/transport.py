"""What a means of transport must do: the raw verbs of one group of ranks, and nothing else.

`Communicator` is the one door through which every message of the library goes.  It checks, converts, cuts and counts;
a transport only moves.  So a transport is short, and there are several: MPI, threads of one process, a world of one,
a recording, a wrapper that delays.

    Communicator                    contiguity, dtypes, staging, chunks, order of sums, numbers, bytes, events
        Lane (of a Board)           who waits where, for reports and time limits
        Transport                   bytes from rank to rank

What the door promises to a transport: arrays are C-contiguous NumPy arrays in host memory, in native byte order and of
a *wire dtype* (bool, integer, float32, float64, complex; never float16 or bfloat16: those arrive as uint16), and every
buffer holds at most `Mode.limit` elements.  A transport that `takes_device` arrays is given both: all buffers of a call
lie on the host, or all on this rank's device.  Shapes are of no interest: elements are counted in C order.  All members
call the collectives of one group in the same order; several non-blocking ones may be in flight.

What a transport promises to the door: it fills exactly the receive buffers it was given, keeps no reference to any
buffer after the call (after `Pending` completion) and writes into no send buffer.  `send` and `recv` of one call may
be the *same object* where the text says *in place*; otherwise they do not overlap.

What a transport that takes device arrays promises: what the rank's current stream was given before the call comes
before the message reads *and writes* its buffers, and what it is given later comes after the message, once the verb has
returned (of a `Pending`: `wait` has returned, or `test` was true).  The host need not have waited for either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpitrain.comm.open_requests import OpenRequests
from mpitrain.errors import CommError, UserError

if TYPE_CHECKING:
    from mpitrain.comm.staging import Pinned

Array = NDArray[Any]
DType = np.dtype[Any]


class Pending(Protocol):
    """A message in flight, started by one of the `i...` verbs of a transport."""

    def test(self) -> bool:
        """True once the message is complete; never blocks.  Stays true, and may be asked again."""
        ...

    def wait(self) -> None:
        """Block until the message is complete; returns at once if it is.  May be called again.

        Raises:
            CommError: the message cannot complete (a partner left, sizes differ).
        """
        ...


class Transport(Protocol):
    """The raw verbs of one group of ranks.  `rank` numbers the members 0 ... size-1.

    Errors: whatever goes wrong underneath (a partner that left, a message of another size) is a `CommError`.
    """

    rank: int
    size: int
    kind: str  # "mpi", "local" or "alone"

    @property
    def takes_device(self) -> bool:
        """Whether buffers may be arrays of this rank's device."""
        ...

    @property
    def adds_device(self) -> bool:
        """Whether they may be in sums, too; else the door has them moved, and adds them up on the device."""
        ...

    # -- collectives: every member calls them, in the same order

    def all_reduce(self, send: Array, recv: Array, op: str) -> None:
        """Fill recv with the "sum" or "max" of `send` over the ranks; same count and dtype.  May be in place."""
        ...

    def all_gather(self, send: Array | None, recv: Array, counts: Sequence[int] | None = None) -> None:
        """Fill recv with the blocks of ranks 0 ... size-1, one after the other.

        Without `counts` all blocks have send.size elements and recv holds size * send.size; with `counts` (one number
        per rank, some may be 0) rank i gives counts[i] elements, and recv holds their sum.  Then `send` may be None, on
        all ranks: each rank's block stands in its place in recv already.
        """
        ...

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int] | None = None) -> None:
        """Fill recv with block `rank` of the sum over the ranks of `send`.

        Without `counts` all of its size blocks have recv.size elements; with `counts` (one number per rank, some may be
        0) block i has counts[i].
        """
        ...

    def all_to_all(
        self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int], own: bool = True
    ) -> None:
        """Block i of `send` (send_counts[i] elements) goes to rank i; block i of `recv` comes from rank i.

        Blocks follow one another without gaps; counts may be 0.  What rank i calls send_counts[j], rank j calls
        recv_counts[i].  With `own` False (on all ranks) the block of a rank for itself is not copied: its place in recv
        stays as it is.
        """
        ...

    def broadcast(self, buf: Array, root: int) -> None:
        """Copy buf of rank `root` into buf of every rank."""
        ...

    def barrier(self) -> None:
        """Return when every member has called it."""
        ...

    # -- from one rank to another, never to itself; tags are 0 ... 32767; one pair's messages of one tag stay in order

    def send(self, buf: Array, dest: int, tag: int) -> None:
        """Send; may block until the receiver has posted its receive (so two crossed sends may hang)."""
        ...

    def recv(self, buf: Array, source: int, tag: int) -> None:
        """Receive exactly buf.size elements of buf.dtype.

        Raises:
            CommError: the message that arrives has another number of bytes.
        """
        ...

    # -- non-blocking: the buffers belong to the message until it is complete

    def isend(self, buf: Array, dest: int, tag: int) -> Pending:
        """`send` that returns at once."""
        ...

    def irecv(self, buf: Array, source: int, tag: int) -> Pending:
        """`recv` that returns at once."""
        ...

    def iall_reduce(self, send: Array, recv: Array, op: str) -> Pending:
        """`all_reduce` that returns at once.  May be in place."""
        ...

    def iall_gather(self, send: Array | None, recv: Array, counts: Sequence[int] | None = None) -> Pending:
        """`all_gather` that returns at once."""
        ...

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int] | None = None) -> Pending:
        """`reduce_scatter` that returns at once."""
        ...

    def iall_to_all(
        self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int], own: bool = True
    ) -> Pending:
        """`all_to_all` that returns at once."""
        ...

    # -- groups

    def group(self, ranks: tuple[int, ...], name: str) -> Transport:
        """The transport of a new group, whose messages never meet those of another group.

        Collective over the members of the new group only: they call it with the same `ranks` and `name`, in the same
        order as their other calls of `group`; nobody else takes part.  The same ranks and name may come again and give
        another group.  A group of one rank costs no message: `Alone()` does.

        Args:
            ranks: members as ranks of *this* group, in the order of their new ranks; contains this rank.
            name: of the axis, for reports and for the library's own names.
        """
        ...

    def close(self) -> None:
        """Give back what the group holds; its messages must be complete.  Local, may be called again."""
        ...


class Lane(Protocol):
    """One communicator's line on the flight board of its rank: which call this rank is in.

    The door calls `enter` and `leave` around every message of more than one rank, so both must be cheap (2 us in all).
    Neither the call site nor any text is passed: whoever reports looks at the waiting thread's frames
    (`mpitrain.comm.site.site_of(sys._current_frames()[ident])`).  Checked mode knows the place of each call, and
    tells it by `place`.
    """

    def enter(self, number: int, verb: str, shape: tuple[int, ...], dtype: DType, peer: int, tag: int = 0) -> None:
        """This rank enters a call.

        Args:
            number: counts from 1.  Collectives: the calls on this communicator, the same number on all members.
                Point-to-point: the messages of this direction with this peer and tag: the n-th send to `peer`, the n-th
                receive from it.  A `wait` for an earlier non-blocking call enters again with the number of that call,
                so numbers may come twice and go back: the calls entered so far are the largest number seen.
            verb: "all_reduce", "iall_reduce", "send", "irecv", ...; while waiting for a non-blocking call its verb with
                "wait " in front ("wait iall_reduce").  `isend` and `wait isend` count as sends, and so on.
            shape: of the array that this rank brings (receives: that it expects; slices of different lengths: of the
                whole that they are joined to, the same on all members).
            dtype: of that array.
            peer: the other's rank on this communicator in a point-to-point call, -1 in a collective.
            tag: of a point-to-point call.
        """
        ...

    def place(self, site: str, way: int) -> bool:
        """In checked mode: where the call stands that has just been entered.

        Args:
            site: in the program.
            way: a number for the call, equal where the same thing is done in the same place again.

        Returns:
            Whether this rank comes to it from its call before as it never did, though it goes known ways (path.py).
        """
        ...

    def leave(self) -> None:
        """The call that was entered last has returned, or failed."""
        ...


class AtEnd(Protocol):
    """What a rank that has ended well leaves undone."""

    def __call__(self, all_have_ended: bool) -> UserError | None:
        """What that is; None: nothing.

        Args:
            all_have_ended: whether all ranks have, so that nobody receives any more.
        """
        ...


class Board(Protocol):
    """A rank's flight board: hands each communicator its lane.

    Attributes:
        limit: seconds after which waiting is a hang.
        run_folder: where boards of several hosts can be read by each other; None: nowhere.
        step: the step that the rank is in, counted from 1, for reports; 0 before the first.
        at_end: asked when the rank has ended well: what it has left undone, or None.
    """

    limit: float
    run_folder: str | None
    step: int
    at_end: AtEnd | None

    def open(self, axis: str, ranks: tuple[int, ...]) -> Lane:
        """The lane of the communicator named `axis` whose members are the world's `ranks`."""
        ...

    def unreceived(self) -> CommError | None:
        """Of a rank that has ended, as all have: messages that it has sent and nobody has received.

        Where transports do not tell: MPI calls a short message complete when it has taken it.
        """
        ...


class NoBoard:
    """The board of a rank that nobody waits for; it is its own lane."""

    limit = 300.0
    run_folder: str | None = None
    step = 0
    at_end: AtEnd | None = None

    def open(self, axis: str, ranks: tuple[int, ...]) -> Lane:
        """Itself."""
        return self

    def unreceived(self) -> CommError | None:
        """None."""
        return None

    def enter(self, number: int, verb: str, shape: tuple[int, ...], dtype: DType, peer: int, tag: int = 0) -> None:
        """Note nothing."""

    def place(self, site: str, way: int) -> bool:
        """Note nothing."""
        return False

    def leave(self) -> None:
        """Note nothing."""


class Unfinished(Protocol):
    """Messages that were started in parts, of which the later ones are still to be posted."""

    def advance(self) -> None:
        """Post what can be posted; never blocks."""
        ...


@dataclass
class Mode:
    """What a world and all communicators cut from it have in common.

    Attributes:
        deterministic: sums are taken in rank order (the same bits on every transport).
        checked: ranks compare their calls before they exchange data (checked.py): because `asked` for, or because of
            `holders`, who want it for a while.
        limit: no buffer handed to a transport holds more elements.  MPI counts are 32-bit (Open MPI 5.0 refuses larger
            ones), and some libraries compute bytes in 32 bits; cutting at 2**27 elements costs nothing.
        unfinished: what of this rank's messages in flight needs a hand (`advance`) to move on while the rank waits for
            another one.
        requests: of this rank that nobody has waited for, as far as they were made in checked mode.
        pinned: page-locked buffers for device arrays that go through the host; None before the first.
        within: of the op that this rank is in, and of its states, what is to stand behind a call in a report; "" if
            nobody has told.
    """

    deterministic: bool = False
    checked: bool = False
    limit: int = 2**27
    unfinished: list[Unfinished] = field(default_factory=list)
    asked: bool = False
    holders: int = 0
    requests: OpenRequests = field(default_factory=OpenRequests)
    pinned: Pinned | None = None
    within: str = ""

    def hold(self, more: int) -> None:
        """One holder of checked mode more, or one fewer."""
        self.holders += more
        self.checked = self.asked or self.holders > 0

    def ask(self, on: bool) -> None:
        """Switch checked mode on, or leave it to the holders."""
        self.asked = on
        self.hold(0)
