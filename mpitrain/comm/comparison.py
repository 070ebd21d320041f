"""Fingerprints on their way, and what is said when they differ.

    Comparison     of a collective: those of all members arrive
    BlockLengths   of an all-to-all with uneven blocks: their lengths arrive after that
    Header         of a message between two: the sender's arrives at the receiver

Both are `Pending`s which are complete when the calls are known to fit each other; if they do not, `test` and `wait`
raise a `CollectiveMismatch`, each time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np

from mpitrain.comm.call_order import CallOrder
from mpitrain.comm.fingerprint import Fingerprint, differ, judge, tell_apart
from mpitrain.comm.path import common_words, left, second_line
from mpitrain.comm.places import told
from mpitrain.comm.transport import Array, Pending
from mpitrain.errors import CollectiveMismatch


class AxisCalls:
    """What the comparisons of one axis have in common.

    Args:
        name: of the axis.
        ranks: of the world, in axis order.

    Attributes:
        open: comparisons of which fingerprints are still missing, in the order of the calls.
        last: the last collective call that all members made, as the first of them made it.
        alike: the last that they made in the same place.
        received: rank of the axis -> the last message from it since then that fitted, and its tag.
    """

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name = name
        self.ranks = ranks
        self.open: deque[Comparison] = deque()
        self.last: Fingerprint | None = None
        self.alike: Fingerprint | None = None
        self.received: dict[int, tuple[Fingerprint, int]] = {}
        self._order = CallOrder()

    def compare(self, prints: Sequence[Fingerprint]) -> None:
        """Compare the fingerprints of all members that are not equal.

        Raises:
            CollectiveMismatch: the calls do not fit each other, or have been made in another order.
        """
        first = prints[0]
        if differ(prints):
            self.refuse(first, tell_apart(prints, self.ranks), judge(prints, self.ranks))
        swap = self._order.swap(first.kind, int(first.number), [int(p.place, 16) for p in prints])
        if swap is not None:
            one, other = self.ranks[swap.one], self.ranks[swap.other]
            self.refuse(
                first,
                f"{tell_apart(prints, self.ranks)}.\n"
                f"  Since call {swap.first} ranks {one} and {other} have made the same calls in another order, "
                "as if two that look alike were swapped.\n"
                "  If that is meant, make this call in one line for all ranks.",
                judge(prints, self.ranks),
                self.alike.in_words(self.name) if self.alike else "",
            )
        self.met(first, alike=len({p.place for p in prints}) == 1)

    def compare_blocks(self, call: Comparison, rows: Array, i: int, j: int) -> None:
        """Of an all-to-all: is the block that each sends to each the one that is expected?

        Args:
            call: the calls, which fit each other otherwise.
            rows: one a member: its shape, the lengths of the blocks that it sends, and of those that it receives.
            i: dim to join along.
            j: dim to cut along.

        Raises:
            CollectiveMismatch: naming the first block that is not.
        """
        n = len(self.ranks)
        shapes, sent, received = np.split(rows, (rows.shape[1] - 2 * n, rows.shape[1] - n), axis=1)
        blocks = np.stack([shapes] * n, axis=1)  # from, to, dim
        places = np.stack([shapes] * n, axis=0)
        if i != j:
            places[..., j] = sent.diagonal()
        blocks[..., j], places[..., i] = sent, received.T
        for source, dest in np.argwhere((blocks != places).any(axis=2)):
            a, b = self.ranks[source], self.ranks[dest]
            self.refuse(
                call.mine,
                f"rank {a} sends {tuple(blocks[source, dest].tolist())} to rank {b}, "
                f"which expects {tuple(places[source, dest].tolist())}: "
                f"rank {a} {call.prints[source].told(True)}; rank {b} {call.prints[dest].told(True)}",
                judge(call.prints, self.ranks) or _odd_one(blocks != places, self.ranks),
                call.before.in_words(self.name) if call.before else "",
            )

    def met(self, call: Fingerprint, alike: bool = True) -> None:
        """Note a collective call that all members have made; `alike`: in the same place."""
        self.last = call
        if alike:
            self.alike = call
        self.received.clear()

    def refuse(self, call: Fingerprint, text: str, who: str, last: str | None = None) -> NoReturn:
        """Raise the mismatch of a call.

        Args:
            call: of this rank.
            text: the calls of all.
            who: left the path, as a sentence; "" where nobody can know.
            last: their last common call, "" where none is known; None: that of the axis.
        """
        if last is None and self.last is not None:
            last = self.last.in_words(self.name)
        common = common_words(last)
        raise CollectiveMismatch(f"on axis {self.name}, call {call.number}: {text}{second_line(who, common)}")

    def refuse_making(self, name: str, prints: Sequence[Fingerprint], ranks: Sequence[int]) -> NoReturn:
        """Raise the mismatch of the makings of one group, of these ranks, that has another order on some of them."""
        calls = told([(rank, f"of {p.how} at {p.site}") for rank, p in zip(ranks, prints, strict=True)])
        common = common_words(self.last and self.last.in_words(self.name))
        text = f"the making of axis {name}: {calls}{second_line(judge(prints, ranks), common)}"
        raise CollectiveMismatch(text)


def _odd_one(differs: Array, ranks: Sequence[int]) -> str:
    """Of blocks that do not fit, from a rank to another: the only one that all of them have in common."""
    n = len(ranks)
    wrong = {(int(a), int(b)) for a, b, _ in np.argwhere(differs)}
    odd = [rank for rank in range(n) if all(rank in pair for pair in wrong)]
    return left([ranks[odd[0]]], "it alone counts otherwise") if n > 2 and len(odd) == 1 else ""


class Comparison:
    """The fingerprints of one collective call.

    Attributes:
        mine: this rank's.
        prints: all members', once they have been compared and are not equal.
        is_uneven: whether blocks must be compared, too (of an all-to-all).
        before: the last common call before it.
    """

    def __init__(self, axis_calls: AxisCalls, mine: Fingerprint, rows: Array, arrive: Pending) -> None:
        """`rows`: one fingerprint a member, complete when `arrive` is."""
        self.mine = mine
        self.prints: list[Fingerprint] = []
        self.is_uneven = False
        self.before: Fingerprint | None = None
        self._calls = axis_calls
        self._rows = rows
        self._arrive = arrive
        self._done = False
        self._error: CollectiveMismatch | None = None
        axis_calls.open.append(self)

    def test(self) -> bool:
        """True once all members are known to make this call; earlier calls of the axis are compared first."""
        calls = self._calls.open
        while not self._done and calls[0]._arrive.test():
            calls.popleft()._compare()
        return self._result()

    def wait(self) -> None:
        """Block until all members are known to make this call."""
        calls = self._calls.open
        while not self._done:
            calls[0]._arrive.wait()
            calls.popleft()._compare()
        self._result()

    def _result(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._done

    def _compare(self) -> None:
        self._done = True
        packed = self._rows.tobytes()
        size = len(packed) // len(self._rows)
        self.before = self._calls.last
        if packed == packed[:size] * len(self._rows) and self.mine.even:
            self._calls.met(self.mine)
            return
        self.prints = [Fingerprint.unpack(packed[at : at + size]) for at in range(0, len(packed), size)]
        self.is_uneven = not all(p.even for p in self.prints) or len({p.shape for p in self.prints}) > 1
        try:
            self._calls.compare(self.prints)
        except CollectiveMismatch as error:
            self._error = error
            raise


class BlockLengths:
    """The lengths of the blocks of an all-to-all, which the members tell each other where they are uneven.

    They are told when the fingerprints are known to fit: so all members know whether they are, and of how many dims.
    """

    def __init__(
        self,
        axis_calls: AxisCalls,
        call: Comparison,
        dims: tuple[int, int],
        gather: Callable[[], tuple[Array, Pending]],
    ) -> None:
        """`dims`: to join and to cut along; `gather`: tells this member's lengths, gives those of all on their way."""
        self._calls = axis_calls
        self._call = call
        self._dims = dims
        self._gather = gather
        self._rows: Array | None = None
        self._arrive: Pending
        self._done = False

    def test(self) -> bool:
        """True once each block is known to be the one that is expected."""
        if not self._done and self._call.test():
            self._tell()
            if not self._done and self._arrive.test():
                self._compare()
        return self._done

    def wait(self) -> None:
        """Block until each block is known to be the one that is expected."""
        if not self._done:
            self._call.wait()
            self._tell()
        if not self._done:
            self._arrive.wait()
            self._compare()

    def _tell(self) -> None:
        if not self._call.is_uneven:
            self._done = True
        elif self._rows is None:
            self._rows, self._arrive = self._gather()

    def _compare(self) -> None:
        assert self._rows is not None
        self._calls.compare_blocks(self._call, self._rows, *self._dims)
        self._done = True


class Header:
    """The sender's fingerprint of a message."""

    def __init__(
        self, axis_calls: AxisCalls, mine: Fingerprint, theirs: Array, arrives: Pending, ways: tuple[int, int], tag: int
    ) -> None:
        """`theirs` is filled when `arrives` is complete; `ways`: sender and receiver, as ranks of the axis."""
        self._calls = axis_calls
        self._mine = mine
        self._theirs = theirs
        self._arrives = arrives
        self._peer, self._tag = ways[0], tag
        self._source, self._dest = (axis_calls.ranks[rank] for rank in ways)
        self._done = False

    def test(self) -> bool:
        """True once the message is known to be the one that is expected."""
        if not self._done and self._arrives.test():
            self._compare()
        return self._done

    def wait(self) -> None:
        """Block until the message is known to be the one that is expected."""
        if not self._done:
            self._arrives.wait()
            self._compare()

    def _compare(self) -> None:
        mine, theirs = self._mine, Fingerprint.unpack(self._theirs.tobytes())
        if (mine.number, mine.shape, mine.dtype) != (theirs.number, theirs.shape, theirs.dtype):
            number = f" (call {theirs.number})" if mine.number != theirs.number else ""
            tag = f" tag {self._tag}" if self._tag else ""
            before = self._calls.received.get(self._peer)
            self._calls.refuse(
                mine,
                f"rank {self._source} {theirs.verb} {theirs.shape} {theirs.dtype} to rank {self._dest}{tag}"
                f"{number} at {theirs.site}; "
                f"rank {self._dest} {mine.verb} {mine.shape} {mine.dtype} from rank {self._source}{tag}"
                f" at {mine.site}",
                judge([theirs, mine], [self._source, self._dest]),
                before[0].in_words(self._calls.name, self._peer, before[1]) if before else None,
            )
        self._calls.received[self._peer] = mine, self._tag
        self._done = True
