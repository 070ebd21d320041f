"""What of the values on a tape can still be seen.

A tape holds what backward needs, not what ops made: most values are gone as soon as nobody uses them.  Here stands for
each value who may still have its array: a tensor that is alive, or a node that saved it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from mpitrain.autograd.inner import Sketch
from mpitrain.autograd.node import Node
from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array

Pass = tuple[Any, ...]
"""Which pass a tape belongs to, the same on ranks of one program: the step and the action in which it began, and which
of the tapes that began there; outside of actions which of those alone.
"""


class Walk(NamedTuple):
    """How far a tape was walked back.

    at: the node that is walked, or was last, by its place; ended: whether its op is over; where: the step and action.
    """

    at: int
    ended: bool
    where: Pass


class _Book:
    """The values of one tape: slot -> who may have it."""

    def __init__(self, of: Pass) -> None:
        self.of = of
        self.tensors: dict[int, weakref.ref[Tensor]] = {}
        self.saved: dict[int, tuple[int, int]] = {}  # the node that saved it, by its place, and the place in there
        self.kept: dict[int, Array] = {}
        self.walk: Walk | None = None


class Slots:
    """The values of all tapes of a rank that are alive.

    Attributes:
        keep: whether arrays are kept from here on until their tape goes, so that all of them can be seen.
    """

    def __init__(self) -> None:
        self.keep = False
        self._books: WeakKeyDictionary[Tape, _Book] = WeakKeyDictionary()
        self._step = -1
        self._begun: dict[Pass, int] = {}  # tapes, by the action of this step

    def enter(self, tape: Tape, step: int, action: str) -> None:
        """A tape records or is walked, in this action of a step; "" outside of any."""
        if tape in self._books:
            return
        if action and step != self._step:
            self._step = step
            self._begun.clear()
        where = (step, action) if action else ()
        self._begun[where] = self._begun.get(where, 0) + 1
        self._books[tape] = _Book((*where, self._begun[where]))

    def note(self, info: Mapping[str, Any]) -> None:
        """An op has made values."""
        outputs = info["outputs"]
        tape = outputs[0].tape if outputs else None
        if tape is None or isinstance(tape, Sketch) or tape not in self._books:
            return
        book, node = self._books[tape], tape.nodes[-1]
        for t in outputs:
            book.tensors[t.slot] = weakref.ref(t)
            if self.keep:
                book.kept[t.slot] = t.data
        if tape.policy is not None or info["saved"] is None:
            return  # what waits under a policy is not the array itself
        values = [
            (slot, x.data) for slot, x in zip(node.inputs, info["tensors"], strict=False) if isinstance(x, Tensor)
        ]
        values += [(t.slot, t.data) for t in outputs]
        for place, array in enumerate(info["saved"]):
            for slot, data in values:
                if slot >= 0 and data is array:
                    book.saved.setdefault(slot, (len(tape.nodes) - 1, place))

    def walk(self, tape: Tape, node: Node, ended: bool, where: Pass) -> None:
        """A node of a tape is walked, or was."""
        book = self._books.get(tape)
        if book is None:
            return
        before = book.walk
        below = len(tape) if before is None or before.where != where else before.at + 1
        at = next((place for place in range(below - 1, -1, -1) if tape.nodes[place] is node), None)
        if at is not None:
            book.walk = Walk(at, ended, where)

    def walked(self, tape: Tape) -> Walk | None:
        """How far a tape was walked back; None: not yet."""
        book = self._books.get(tape)
        return None if book is None else book.walk

    def pass_of(self, tape: Tape) -> Pass:
        """Which pass it belongs to."""
        book = self._books.get(tape)
        return () if book is None else book.of

    def tapes(self) -> list[Tape]:
        """Those that are alive, the oldest first."""
        return list(self._books)

    def array(self, tape: Tape, slot: int) -> Array | None:
        """The array of a value; None where it is gone."""
        leaf = tape.leaf(slot)
        if leaf is not None:
            return leaf.data
        book = self._books.get(tape)
        if book is None:
            return None
        if slot in book.kept:
            return book.kept[slot]
        t = book.tensors[slot]() if slot in book.tensors else None
        if t is not None:
            return t.data
        if slot not in book.saved:
            return None
        at, place = book.saved[slot]
        node = tape.nodes[at]
        return None if node.saved is None else tape.saved_of(node)[place]
