"""Which op is which: names that hold on every layout.

An op is known by the part of the model that it happens in, by its name, and by how many of that name came before it in
that part in this pass.  The same op has other names on other layouts (attention over cut sequences is attention), and
some layouts have ops that others lack: so ops of a part are counted by name, not by place.

A part that is made again in backward counts once more as it did at first.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from mpitrain.autograd.function import Function
from mpitrain.autograd.inner import Sketch
from mpitrain.autograd.node import Node
from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor

ALIKE: Mapping[str, str] = MappingProxyType(
    {
        "slice_attention": "attention",
        "all_reduce": "sum over ranks",
        "reduce_scatter": "sum over ranks",
        "sum_everywhere": "sum over ranks",
        "copy": "to all ranks",
        "all_gather": "to all ranks",
    }
)
"""Ops that do on some layouts what another one does on others -> what they are called together."""


class Which(NamedTuple):
    """One op of a pass.

    stage: of the model; path: of the part; name: that it has on every layout; nth: how many of that name came before it
    in that part; title: what it is called here; site: where it was called; place: its number in its pass.
    """

    stage: int
    path: str
    name: str
    nth: int
    title: str
    site: str
    place: int


def name_of(function: type[Function]) -> str:
    """What an op is called on every layout."""
    title = (function.like or function).title()
    return ALIKE.get(title, title)


Counts = dict[tuple[str, str], int]


class Pass:
    """Counts the ops of forward passes, and knows those of backward again."""

    def __init__(self) -> None:
        self._stage = 0
        self._place = 0
        self._counts: Counts = {}
        self._places: dict[tuple[int, str, str, int], int] = {}
        self._again: Counts | None = None  # while a part is made again
        self._made: weakref.WeakKeyDictionary[Tape, dict[int, Which]] = weakref.WeakKeyDictionary()  # by slot
        self._before: weakref.WeakKeyDictionary[Node, Counts] = weakref.WeakKeyDictionary()
        self._begun: list[Counts] = []  # what was counted before the recomputed parts that run

    def begin(self, stage: int) -> None:
        """A forward pass of a stage begins."""
        self._stage, self._place = stage, 0
        self._counts, self._again = {}, None
        self._begun.clear()

    def made(self, function: type[Function], path: str, outputs: tuple[Tensor, ...], site: str, again: bool) -> Which:
        """An op has ended; `again`: in a second forward."""
        counts = self._again if again and self._again is not None else self._counts
        name = name_of(function)
        count = counts.get((path, name), 0)
        counts[path, name] = count + 1
        if not again:
            self._places[self._stage, path, name, count] = self._place
            self._place += 1
        place = self._places.get((self._stage, path, name, count), self._place)
        which = Which(self._stage, path, name, count, function.title(), site, place)
        self._note(outputs, which)
        return which

    def _note(self, outputs: tuple[Tensor, ...], which: Which) -> None:
        tape = outputs[0].tape if outputs else None
        if tape is not None and not isinstance(tape, Sketch):
            self._made.setdefault(tape, {})[outputs[0].slot] = which

    def walked(self, tape: Tape, node: Node) -> Which | None:
        """The op whose backward this is; None: it was recorded when nobody counted."""
        return self._made.get(tape, {}).get(node.outputs[0])

    # -- parts that are made again ------------------------------------------------------------------------------------

    def part_begins(self) -> None:
        """A recomputed part runs for the first time."""
        self._begun.append(dict(self._again if self._again is not None else self._counts))

    def part_ends(self, outputs: tuple[Any, ...]) -> None:
        """It has run, and is a node now."""
        before = self._begun.pop() if self._begun else {}
        if outputs and outputs[0].tape is not None and outputs[0].tape.nodes:
            self._before[outputs[0].tape.nodes[-1]] = before

    def part_begins_again(self, node: Node, stage: int) -> bool:
        """It runs for the second time.

        Returns:
            Whether its first time was counted.
        """
        before = self._before.get(node)
        self._again = None if before is None else dict(before)
        self._stage = stage
        return before is not None

    def part_ended_again(self) -> None:
        """It has run for the second time."""
        self._again = None
