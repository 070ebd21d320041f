"""Layouts as words: `dp2,tp2,sp` is two replicas of two tensor-parallel ranks with sequence parallelism.

Each word becomes flags of the script.  A new kind of parallelism is a line in one of the two tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from mpitrain.config import CONTEXT_KINDS
from mpitrain.errors import ConfigError
from mpitrain.options import suggest

AXES = {"dp": "--dp", "cp": "--cp", "tp": "--tp"}
"""Axis -> the flag that gives its number of ranks, from the slowest axis to the fastest."""


@dataclass(frozen=True)
class Way:
    """A word without a number: one of the ways in which an axis can work.

    Attributes:
        axis: of which it is a way.
        flags: what a script gets.
        meaning: in words.
        ops: a forward that works in this way calls at least one of them over the axis.
        group: one of the words of a group is always in force; a word without a group is on or off.
    """

    axis: str
    flags: tuple[str, ...]
    meaning: str
    ops: tuple[str, ...]
    group: str = ""


_ATTENTION_OPS = {"ring": ("ring_attention",), "ulysses": ("all_to_all",), "rsa": ("rsa_attention",)}

WAYS = {
    "sp": Way("tp", ("--sequence-parallel",), "sequence parallelism", ("all_gather", "reduce_scatter")),
    **{
        kind: Way("cp", ("--cp-attention", kind), f"{kind} attention", _ATTENTION_OPS[kind], "attention")
        for kind in CONTEXT_KINDS
    },
}

MOST_RANKS = 1024
_AXIS = re.compile(r"([a-z]+)([0-9]+)")


@dataclass(frozen=True)
class Layout:
    """Sizes of axes, and ways in which they work.

    Attributes:
        axes: (axis, size), in the order of AXES.
        ways: in the order of WAYS.
        flags: what a script gets.
        ranks: how many it needs.
    """

    axes: tuple[tuple[str, int], ...]
    ways: tuple[str, ...] = ()
    flags: tuple[str, ...] = field(init=False, compare=False)
    ranks: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        flags: list[str] = []
        ranks = 1
        for axis, size in self.axes:
            flags += [AXES[axis], str(size)]
            ranks *= size
        for way in self.ways:
            flags += WAYS[way].flags
        object.__setattr__(self, "flags", tuple(flags))
        object.__setattr__(self, "ranks", ranks)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> number of ranks on it, of the axes larger than 1."""
        return {axis: size for axis, size in self.axes if size > 1}

    @property
    def simple(self) -> Layout:
        """The same without axes of one rank, and without ways of axes that it does not have."""
        return Layout(tuple(self.sizes.items()), tuple(way for way in self.ways if WAYS[way].axis in self.sizes))

    def parts(self) -> list[Layout]:
        """The layouts of one axis each that this one is made of, also without what is on or off; never itself."""
        found: dict[Layout, None] = {}
        for axis in self.sizes.items():
            ways = [way for way in self.ways if WAYS[way].axis == axis[0]]
            found[Layout((axis,), tuple(way for way in ways if WAYS[way].group))] = None
            found[Layout((axis,), tuple(ways))] = None
        return [part for part in found if part != self.simple]

    def __str__(self) -> str:
        return ",".join([*(f"{axis}{size}" for axis, size in self.axes), *self.ways])


def parse(text: str) -> Layout:
    """The layout that a word of the command line stands for.

    Raises:
        ConfigError: naming the word that is wrong and those that are allowed.
    """
    axes: dict[str, int] = {}
    ways: dict[str, str] = {}  # group -> word
    for word in text.split(","):
        found = _AXIS.fullmatch(word)
        if found and found[1] in AXES:
            axis, size = found[1], int(found[2][:6])
            if axis in axes:
                raise ConfigError(f"--layout {text}: {axis} stands twice; give each axis one size.")
            if not 1 <= size <= MOST_RANKS:
                raise ConfigError(f"--layout {text}: {word}: an axis has from 1 to {MOST_RANKS} ranks.")
            axes[axis] = size
        elif word in WAYS:
            group = WAYS[word].group or word
            if group in ways:
                raise ConfigError(f"--layout {text}: {ways[group]} and {word}: only one of such words can be given.")
            ways[group] = word
        else:
            raise ConfigError(f"--layout {text}: {word!r} is no word of a layout.{suggest(word, WAYS)}\n{vocabulary()}")
    layout = Layout(
        tuple((axis, axes[axis]) for axis in AXES if axis in axes), tuple(way for way in WAYS if way in ways.values())
    )
    if layout.ranks > MOST_RANKS:
        raise ConfigError(f"--layout {text} needs {layout.ranks} ranks; at most {MOST_RANKS} are allowed.")
    return layout


def vocabulary() -> str:
    """All words, for messages and help."""
    axes = " ".join(f"{axis}N" for axis in AXES)
    ways = ", ".join(f"{word} ({way.meaning}, of {way.axis})" for word, way in WAYS.items())
    return f"Words, joined by commas: {axes} (N ranks on an axis); {ways}."


def all_layouts(ranks: int) -> Iterator[Layout]:
    """Every factorisation of a number of ranks over the axes, with every way of each axis.

    Raises:
        ConfigError: the number is out of range.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise ConfigError(f"--all {ranks}: must be a whole number of ranks from 1 to {MOST_RANKS}.")
    if ranks == 1:
        yield Layout((("dp", 1),))
        return
    for sizes in _factorisations(ranks, len(AXES)):
        axes = tuple((axis, size) for axis, size in zip(AXES, sizes, strict=True) if size > 1)
        for ways in product(*(_choices(axis) for axis, _ in axes)):
            chosen = {way for some in ways for way in some}
            yield Layout(axes, tuple(way for way in WAYS if way in chosen))


def _choices(axis: str) -> list[tuple[str, ...]]:
    """The ways of one axis: each word of a group, and with each of them every other word on and off."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for word, way in WAYS.items():
        if way.axis == axis:
            groups.setdefault(way.group or word, [] if way.group else [()]).append((word,))
    return [tuple(word for words in choice for word in words) for choice in product(*groups.values())]


def _factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All tuples of so many factors whose product is the number, in order."""
    if parts == 1:
        yield (number,)
        return
    for first in range(number, 0, -1):
        if number % first == 0:
            for rest in _factorisations(number // first, parts - 1):
                yield (first, *rest)
