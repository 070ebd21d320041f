"""Hops around a ring of ranks: blocks that every rank sees, and sums that follow them.

    hop            0     1     2     3
    block of       r    r-1   r-2   r-3        what rank r computes with; the next block travels meanwhile
    sum for              r    r-1   r-2   r-3  leaves rank r when it has added its summand; one hop more brings it home

What a rank will receive it asks for before it computes or waits, so no send can be left without its receiver.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mpitrain.backend import Array, array_module
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.request import Request

FORWARD, BACKWARD, GRADIENT = range(3)
"""What a message carries: keys and values, the same again, their gradients."""


def tag(hop: int, what: int) -> int:
    """The tag of a message: its own for each hop and each load, so that no two that may be in flight are confused."""
    return 3 * hop + what


def neighbours(axis: Communicator) -> tuple[int, int]:
    """The rank from which messages come, and the one to which they go."""
    return (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size


def around(axis: Communicator, block: Array, what: int) -> Iterator[tuple[int, Array]]:
    """Pass blocks around the ring; each rank sees those of all ranks, its own first.

    The next block is on its way before the caller gets to compute with this one.

    Args:
        axis: the ring.
        block: this rank's; contiguous, and overwritten from the second hop on.
        what: it carries, for the tag.

    Yields:
        (rank whose block it is, the block); the array is the caller's until it asks for the next.

    Cost: size - 1 messages of block.nbytes; the memory of two blocks.
    """
    left, right = neighbours(axis)
    spare = array_module(block).empty_like(block)
    for hop in range(axis.size):
        if hop == axis.size - 1:
            yield (axis.rank - hop) % axis.size, block
            return
        arrives = axis.irecv(block.shape, block.dtype, left, tag(hop, what), out=spare)
        leaves = axis.isend(block, right, tag(hop, what))
        yield (axis.rank - hop) % axis.size, block
        leaves.wait()
        arrives.wait()
        block, spare = spare, block


class Sums:
    """The gradients of keys and values on their way: the sum for a block follows it around, one hop behind.

    Every rank adds its summand and passes the sum on.  A sum arrives while its block is computed, and leaves while the
    next one is.

    Args:
        xp: numpy, or cupy.
        axis: the ring.
        shape: of a block.
        dtype: of the sums: at least float32.

    Cost: size messages of a block in this dtype; the memory of two.
    """

    def __init__(self, xp: Any, axis: Communicator, shape: tuple[int, ...], dtype: Any) -> None:
        self.axis = axis
        self.left, self.right = neighbours(axis)
        self.total, self.spare = xp.zeros(shape, dtype), xp.zeros(shape, dtype)
        self.arrives: Request | None = None
        self.leaves: Request | None = None
        self.hop = 0

    def expect(self) -> None:
        """Ask for the sum for the block that is computed next; that for one's own begins here, with nothing."""
        if self.hop == 0:
            return
        self.total, self.spare = self.spare, self.total  # the spare one is leaving
        self.arrives = self.axis.irecv(
            self.total.shape, self.total.dtype, self.left, tag(self.hop - 1, GRADIENT), out=self.total
        )

    def pass_on(self, summands: Sequence[tuple[slice, Array]] = ()) -> None:
        """Add this rank's summands, each for some of the keys, and send the sum on."""
        if self.arrives is not None:
            self.arrives.wait()
        for keys, summand in summands:
            self.total[..., keys, :] += summand
        if self.leaves is not None:  # since the last hop; its buffer is needed in the next one
            self.leaves.wait()
        self.leaves = self.axis.isend(self.total, self.right, tag(self.hop, GRADIENT))
        self.hop += 1

    def home(self) -> Array:
        """The sum for one's own keys and values over all ranks, after the last hop."""
        self.expect()
        assert self.arrives is not None
        assert self.leaves is not None
        self.arrives.wait()
        self.leaves.wait()
        return self.total
