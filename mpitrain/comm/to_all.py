"""An all-to-all of arrays as a transport moves it: blocks of elements, one for each rank, one after the other.

    x, cut along j    | to 0 | to 1 | to 2 |   ->   | from 0 | from 1 | from 2 |   joined along i

Along dim 0 blocks follow one another in memory already, and nothing is copied.  Along another dim they are brought into
that order before, and out of it behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from mpitrain.backend import array_module
from mpitrain.comm.transport import Array
from mpitrain.comm.wire import Empty, blocks, cut, flat, on_wire


class Blocks:
    """One rank's side of the message.

    Args:
        a: the ready array.
        i: dim to join along.
        j: dim to cut along.
        sent: lengths along j of the blocks for each rank.
        received: lengths along i of the blocks from each rank.
        rank: of this side.
        empty: makes the array of the result.

    Attributes:
        recv: the result, once the message is complete and `join` was called.
        message: what a transport's `all_to_all` takes.
        elements: of the longest block, for each rank: what the message's way is chosen by.
    """

    def __init__(
        self, a: Array, i: int, j: int, sent: Sequence[int], received: Sequence[int], rank: int, empty: Empty
    ) -> None:
        shape = list(a.shape)
        if i != j:
            shape[j] = sent[rank]
        shape[i] = sum(received)
        self.recv = empty(tuple(shape), a.dtype)
        self._i, self._received = i, received
        self._landing = self.recv if i == 0 else array_module(a).empty(self.recv.size, a.dtype)
        each_sent = prod(a.shape[:j] + a.shape[j + 1 :])  # elements of a block of length 1
        each_received = prod(shape[:i] + shape[i + 1 :])
        self._counts = [count * each_received for count in received]
        counts = [count * each_sent for count in sent]
        source = a if j == 0 else flat(cut(a, sent, j))
        self.message = on_wire(source), counts, on_wire(self._landing), self._counts
        self.elements = max(max(counts), max(self._counts)) * len(sent)

    def join(self) -> None:
        """Bring what has arrived into the order of the result."""
        if self._i:
            i, shape = self._i, self.recv.shape
            pieces = zip(blocks(self._landing, self._counts), self._received, strict=True)
            parts = [piece.reshape((*shape[:i], length, *shape[i + 1 :])) for piece, length in pieces]
            array_module(self.recv).concatenate(parts, axis=i, out=self.recv)
