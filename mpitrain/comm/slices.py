"""Arrays that are joined from, or cut into, one slice a rank, as a transport moves them: one block after the other.

    Joined      all-gather        | of 0 | of 1 | of 2 |   joined along dim, on every rank
    Scattered   reduce-scatter    the sum over ranks, cut along dim:   | for 0 | for 1 | for 2 |

Slices may have any lengths, also none; all ranks know all of them.  Along dim 0 blocks follow one another in memory
already and nothing is copied; along another dim they are brought into that order before, or out of it behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from mpitrain.backend import array_module
from mpitrain.comm.page import stable_hash
from mpitrain.comm.transport import Array
from mpitrain.comm.wire import Empty, cut, flat, is_writeable, on_wire, same_memory, share_memory, target

Counts = Sequence[int] | None  # lengths along dim of the ranks' slices; None: all have the same

GATHERS = ("all_gather", "iall_gather")
SLICED = (*GATHERS, "reduce_scatter", "ireduce_scatter")  # verbs whose arguments begin with dim and counts
_LONGEST = 40  # characters of lengths that are told


class Joined:
    """One rank's side of an all-gather.

    Args:
        a: the ready slice of this rank.
        dim: to join along.
        counts: lengths of the slices.
        rank: of this side.
        size: number of ranks.
        out: where the caller wants the result.  If `a` is its own slice of it already, it stays where it is.
        empty: makes the array of the result, if `out` cannot be it.
        verb: named in errors.

    Attributes:
        recv: the result, once the message is complete and `join` was called.
        message: what a transport's `all_gather` takes.
        is_straight: whether blocks arrive where they belong, so that `join` has nothing to do.
    """

    def __init__(
        self, a: Array, dim: int, counts: Counts, rank: int, size: int, out: Any, empty: Empty, verb: str
    ) -> None:
        self._dim = dim
        self._lengths = [a.shape[dim]] * size if counts is None else counts
        shape = _with_length(a.shape, dim, sum(self._lengths))
        elements = _elements(a.shape, dim, self._lengths)
        start = sum(elements[:rank])
        own = slice(start, start + a.size)
        in_rows = prod(a.shape[:dim]) == 1
        in_place = in_rows and _holds(out, shape, own, a)
        self.recv = out if in_place else target(a, shape, out, empty, verb)
        self.is_straight = in_rows and self.recv.dtype == a.dtype
        self._landing = self.recv.reshape(-1) if self.is_straight else array_module(a).empty(self.recv.size, a.dtype)
        self.message: tuple[Any, ...]
        if counts is None:
            self.message = on_wire(a.copy() if in_place else a), on_wire(self._landing)
            return
        if not share_memory(self._landing, a):
            self._landing[own] = a.reshape(-1)
        self.message = None, on_wire(self._landing), elements

    def join(self) -> None:
        """Bring what has arrived into the order, and the dtype, of the result."""
        if self.is_straight:
            return
        start = 0
        for place in cut(self.recv, self._lengths, self._dim):
            place[...] = self._landing[start : start + place.size].reshape(place.shape)
            start += place.size


class Scattered:
    """One rank's side of a reduce-scatter.

    Args:
        a: the ready array.
        dim: to cut along.
        counts: lengths of the slices.
        rank: of this side.
        size: number of ranks.
        out: where the caller wants this rank's slice.
        empty: makes the array of the slice, if `out` cannot be it.
        verb: named in errors.

    Attributes:
        blocks: the summand, flat, one block a rank.
        counts: elements of the blocks.
        recv: the slice, once the message is complete; shares no memory with `blocks`.
    """

    def __init__(
        self, a: Array, dim: int, counts: Counts, rank: int, size: int, out: Any, empty: Empty, verb: str
    ) -> None:
        lengths = [a.shape[dim] // size] * size if counts is None else counts
        self.counts = _elements(a.shape, dim, lengths)
        self.blocks = a.reshape(-1) if prod(a.shape[:dim]) == 1 else flat(cut(a, lengths, dim))
        shape = _with_length(a.shape, dim, lengths[rank])
        self.recv = target(a, shape, out, empty, verb)
        if self.recv is a or not self.recv.size:  # all of the sum goes where its summand is, or none of it
            self.recv = empty(shape, self.recv.dtype)  # also empty arrays must not begin at one place for MPICH


def shape_of_call(verb: str, a: Array, how: Sequence[Any]) -> tuple[int, ...]:
    """The shape by which a call is known: that of this rank's array.

    Of slices of different lengths it is the shape of the whole that they are joined to, which all ranks share.
    """
    return a.shape if verb not in GATHERS or how[1] is None else _with_length(a.shape, how[0], sum(how[1]))


def told_lengths(counts: Sequence[int]) -> str:
    """Lengths as text, different for different ones: `12,0,20`, of many `12,0,20,...7f3a81c2`."""
    text = ",".join(map(str, counts))
    if len(text) <= _LONGEST:
        return text
    number = f",...{stable_hash(text):x}"
    return text[: text.rindex(",", 0, _LONGEST - len(number) + 1)] + number


def _with_length(shape: tuple[int, ...], dim: int, length: int) -> tuple[int, ...]:
    return (*shape[:dim], length, *shape[dim + 1 :])


def _elements(shape: tuple[int, ...], dim: int, lengths: Sequence[int]) -> list[int]:
    """How many elements slices of these lengths have."""
    each = prod(_with_length(shape, dim, 1))
    return [length * each for length in lengths]


def _holds(out: Any, shape: tuple[int, ...], own: slice, a: Array) -> bool:
    """Whether `out` is an array that a transport can fill, of which `a` is this slice."""
    if type(out) is not type(a) or out.shape != shape or not out.flags.c_contiguous:
        return False
    if not is_writeable(out) or not out.dtype.isnative:
        return False
    return same_memory(a.reshape(-1), out.reshape(-1)[own])
