"""What waits for backward waits elsewhere: saved arrays leave for a store during forward, and come back in time.

    forward    saved    a b c | d e f | g h i | j k l |              groups of neighbouring arrays, of so many bytes
               leaves           a b c   d e f   g h i                a group goes when `distance` later ones are full
    EVICT      leaves                                   j k l        the rest of it, where other work comes before B
    FETCH      returns                                  j k l        begun so many actions before B
    backward   used                                   | l k j | i h g | f e d | c b a
               returns                                  i h g   f e d   c b a           `distance` groups ahead

So a tape holds at most distance + 1 groups, in either direction, and what the I/O thread has not written yet.  Which
arrays move, and when, follows from their sizes and the schedule alone.

An `Offload` is a policy for the tapes of an executor: each tape gets a policy of its own (`begin`), with a slot of the
store, which is free again when the tape is gone.  What is encoded by another policy (Gist) moves as it is encoded.

Source: Rajbhandari et al. 2021, ZeRO-Infinity, arXiv:2104.07857, section 5.2.3 (there checkpoints to host memory).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpitrain.autograd.node import Node
from mpitrain.autograd.recompute import recomputing
from mpitrain.backend import Array, array_module
from mpitrain.memory.policy import Keep, Policy, Stash
from mpitrain.memory.store import Region, Store

LEAST = 4096
"""Bytes of the smallest array that moves: below, the call costs more than the memory is worth."""

ALIGNED = 64
"""Bytes of whose multiples arrays begin in a slot, so that vectors of any dtype may be read in place."""

REGION = "activations"


def region_of(slots: int, slot_bytes: int) -> Region:
    """What an `Offload` needs of a store."""
    return Region(REGION, slots * slot_bytes, np.uint8)


class Offload(Policy):
    """Gives each tape a policy that moves what it saves.

    Args:
        store: has the region `region_of(slots, slot_bytes)`.
        slots: tapes that are in flight at once.
        slot_bytes: that a tape may have elsewhere, each array rounded up to a multiple of `ALIGNED`; what is beyond
            stays here.
        group: bytes of arrays that leave and return together.
        distance: groups that are fetched ahead of their use, and full ones that do not leave yet.
        inner: how arrays are written that move, and those that do not.
    """

    def __init__(
        self,
        store: Store,
        *,
        slots: int,
        slot_bytes: int,
        group: int = 2**22,
        distance: int = 1,
        inner: Policy | None = None,
    ) -> None:
        self.store = store
        self.slot_bytes = slot_bytes
        self.group = group
        self.distance = distance
        self.inner = Keep() if inner is None else inner
        self._free = list(range(slots))[::-1]

    def begin(self) -> OfTape:
        """The policy of one tape, which must not share it."""
        slot = self._free.pop() if self._free else None
        policy = OfTape(self, self.inner.begin(), slot)
        if slot is not None:
            weakref.finalize(policy, self._free.append, slot).atexit = False
        return policy


class _Group:
    """Arrays that leave and return together.

    Attributes:
        stashes: what they are the parts of; those that nobody waits for any more are gone.
        nbytes: of the arrays.
        stop: where in the store the last one ends.
        is_here: whether they have not left, or are back.
    """

    def __init__(self, start: int) -> None:
        self.stashes: list[weakref.ref[Stash]] = []
        self.nbytes = 0
        self.stop = start
        self.is_here = True


class _Part:
    """Where an array of a stash lies in the slot, and how it looks."""

    __slots__ = ("dtype", "shape", "span", "strides")

    def __init__(self, array: Array, offset: int) -> None:
        self.span = offset, offset + array.nbytes
        self.shape, self.dtype, self.strides = array.shape, array.dtype, array.strides

    def of(self, raw: Array) -> Array:
        """The array again, in these bytes."""
        flat = raw.view(self.dtype)
        if _is_plain(self.shape, self.strides, self.dtype):
            return flat.reshape(self.shape)
        xp = array_module(raw)
        return xp.lib.stride_tricks.as_strided(flat, self.shape, self.strides)


class OfTape(Policy):
    """The policy of one tape: what it saves leaves group by group, and returns group by group.

    Args:
        offload: sizes, and the store.
        inner: how arrays are written.
        slot: of the store; None: nothing moves.
    """

    def __init__(self, offload: Offload, inner: Policy, slot: int | None) -> None:
        self._store = offload.store
        self._inner = inner
        self._group_bytes, self._distance = offload.group, offload.distance
        self._base = (slot or 0) * offload.slot_bytes
        self._end = self._base + (offload.slot_bytes if slot is not None else 0)
        self._groups: list[_Group] = [_Group(self._base)]
        self._places: weakref.WeakKeyDictionary[Stash, tuple[int, list[_Part | Array]]] = weakref.WeakKeyDictionary()
        self._going_back = False

    # -- forward ------------------------------------------------------------------------------------------------------

    def pack(self, node: Node, place: int, array: Array) -> Stash:
        stash = self._inner.pack(node, place, array)
        self._enter(stash)
        return stash

    def share(self, node: Node, place: int, array: Array, stash: Stash) -> Stash:
        parts = stash.parts
        known = self._inner.share(node, place, array, stash)
        if known is not stash or known.parts is not parts:  # it is written otherwise now: what has left is stale
            self._places.pop(known, None)
            self._enter(known)
        return known

    def _enter(self, stash: Stash) -> None:
        """Have a stash leave with the group that is being filled."""
        moving = [part for part in stash.parts if _moves(part)]
        group = self._groups[-1]
        if not moving or self._going_back or recomputing():
            return  # it is too small, or wanted at once
        if group.stop + sum(_rounded(part.nbytes) for part in moving) > self._end:
            return
        parts: list[_Part | Array] = []
        for part in stash.parts:
            if not any(part is other for other in moving):
                parts.append(part)
                continue
            parts.append(_Part(part, group.stop))
            group.stop += _rounded(part.nbytes)
            group.nbytes += part.nbytes
        self._places[stash] = len(self._groups) - 1, parts
        group.stashes.append(weakref.ref(stash))
        if group.nbytes >= self._group_bytes:
            self._groups.append(_Group(group.stop))
            leaves = len(self._groups) - 2 - self._distance
            if leaves >= 0:
                self._evict(self._groups[leaves])

    def evict(self) -> None:
        """Have all leave that is still here: other work comes before its backward."""
        for group in self._groups:
            self._evict(group)

    def _evict(self, group: _Group) -> None:
        if not group.is_here:
            return
        group.is_here = False
        leaving: list[tuple[int, Array]] = []
        for stash, parts in self._waiting(group):
            pairs = zip(parts, stash.parts, strict=True)
            leaving += [(where.span[0], _bytes(part)) for where, part in pairs if isinstance(where, _Part)]
            stash.parts = ()
        if leaving:
            self._store.put_each(REGION, leaving)

    # -- backward -----------------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Begin to bring back what backward uses first."""
        self._going_back = True
        self._ahead(len(self._groups))

    def unpack(self, node: Node, place: int, stash: Stash) -> Array:
        self._going_back = True
        found = self._places.get(stash)
        if found is not None:
            number = found[0]
            if not self._groups[number].is_here:
                self._bring(self._groups[number])
            self._ahead(number)
        return self._inner.unpack(node, place, stash)

    def _ahead(self, number: int) -> None:
        """Begin to bring back the groups before one."""
        for group in self._groups[max(0, number - self._distance) : number]:
            if not group.is_here:
                self._store.prefetch_each(REGION, self._spans(group))

    def _bring(self, group: _Group) -> None:
        found = iter(self._store.get_each(REGION, self._spans(group)))
        group.is_here = True
        for stash, parts in self._waiting(group):
            stash.parts = tuple([part.of(next(found)) if isinstance(part, _Part) else part for part in parts])

    def _spans(self, group: _Group) -> list[tuple[int, int]]:
        """What is to return of a group."""
        return [part.span for _, parts in self._waiting(group) for part in parts if isinstance(part, _Part)]

    def _waiting(self, group: _Group) -> Iterator[tuple[Stash, Sequence[_Part | Array]]]:
        """The stashes of a group that are still waited for, and what they are made of."""
        for stash in (reference() for reference in group.stashes):
            if stash is not None and stash in self._places:
                yield stash, self._places[stash][1]


def _moves(part: Any) -> bool:
    """Whether an array is worth moving: not small, and in memory that goes when it goes."""
    if part.nbytes < LEAST:
        return False
    base: Any = getattr(part, "base", None)
    while hasattr(getattr(base, "base", None), "nbytes"):
        base = base.base
    if base is not None and getattr(base, "nbytes", part.nbytes) != part.nbytes:
        return False  # a piece of something else, which stays for others
    return _is_dense(part)


def _is_dense(array: Array) -> bool:
    """Whether its elements fill a piece of memory, in whatever order of dims."""
    return bool(array.flags.c_contiguous or array.flags.f_contiguous or _dense_transpose(array) is not None)


def _dense_transpose(array: Array) -> Array | None:
    """The same memory with its dims in the order in which they lie; None where there are holes."""
    order = sorted(range(array.ndim), key=lambda dim: -array.strides[dim])
    turned = array.transpose(order)
    return turned if turned.flags.c_contiguous else None


def _bytes(array: Array) -> Array:
    """The memory of an array as a vector of bytes."""
    turned = array if array.flags.c_contiguous else _dense_transpose(array)
    assert turned is not None
    return turned.reshape(-1).view(np.uint8)


def _is_plain(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> bool:
    """Whether these strides are those of a C-contiguous array."""
    step = dtype.itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != step:
            return False
        step *= length
    return True


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
