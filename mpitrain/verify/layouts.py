"""Layouts as words: `pp2,dp2,tp2,zb-h1,sp` is a pipeline of two stages, each two replicas of two tensor-parallel ranks.

Each word becomes flags of the script.  A new kind of parallelism is a line in one of the tables.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mpitrain.config import CONTEXT_KINDS
from mpitrain.debug.capture import CUT, MADE_AGAIN, SCORES_KEPT
from mpitrain.errors import ConfigError
from mpitrain.options import suggest
from mpitrain.pipeline.schedules import SCHEDULES

AXES = {"pp": "--pp", "dp": "--dp", "ep": "--ep", "cp": "--cp", "tp": "--tp"}
"""Axis -> the flag that gives its number of ranks, from the slowest axis to the fastest."""

PART_OF = {"ep": "dp"}
"""Axis -> the axis of which it is a part: it adds no ranks, and its size divides that one's."""

AXIS_OPS = {"ep": ("all_to_all", "send_off")}
"""Axis -> ops of which a forward that uses the axis calls at least one over it, where the mesh alone does not tell."""


@dataclass(frozen=True)
class Way:
    """A word without a number: one of the ways in which an axis, or the whole model, can work.

    Attributes:
        axis: of which it is a way; empty: of the model, on any ranks.
        flags: what a script gets.
        meaning: in words.
        ops: a forward that works in this way calls at least one of them over the axis; none: it is told otherwise.
        seen: what a step of a model that works in this way is seen to do.
        group: one of the words of a group is always in force; a word without a group is on or off.
        without: axes and words with which it does not go together.
        stale: whether it changes the mathematics, so that one rank's plain training is not what it should equal.
        over: axes of a way of the whole model that does nothing unless it has one of them.
    """

    axis: str
    flags: tuple[str, ...]
    meaning: str
    ops: tuple[str, ...] = ()
    seen: str = ""
    group: str = ""
    without: tuple[str, ...] = ()
    stale: bool = False
    over: tuple[str, ...] = ()


_ATTENTION_OPS = {"ring": ("ring_attention",), "ulysses": ("all_to_all",), "rsa": ("rsa_attention",)}

WAYS = {
    **{
        kind.name: Way(
            "pp",
            ("--schedule", kind.name),
            kind.meaning,
            group="schedule",
            without=("ep", "cp", "sp") if kind.sliced or kind.versions else (),
            stale=kind.versions is not None,
        )
        for kind in SCHEDULES.values()
    },
    "sp": Way("tp", ("--sequence-parallel",), "sequence parallelism", ("all_gather", "reduce_scatter")),
    "overlap": Way("ep", ("--expert-overlap",), "tokens on their way while experts work", ("send_off", "arrive")),
    **{
        kind: Way("cp", ("--cp-attention", kind), f"{kind} attention", _ATTENTION_OPS[kind], group="attention")
        for kind in CONTEXT_KINDS
    },
    "full": Way("", ("--recompute", "full"), "blocks are made again in backward", seen=MADE_AGAIN, group="recompute"),
    "none": Way(
        "",
        ("--recompute", "none"),
        "attention keeps its scores",
        seen=SCORES_KEPT,
        group="recompute",
        without=("cp", "terapipe"),  # where queries and keys come in parts, scores are kept or not whatever is said
    ),
    **{
        f"zero{stage}": Way(
            "",
            ("--zero", str(stage)),
            f"ranks deal out {what}",
            seen=CUT[stage],
            group="ZeRO",
            without=tuple(kind.name for kind in SCHEDULES.values() if kind.versions is not None),
            over=("dp", "cp"),
        )
        for stage, what in ((1, "optimizer state"), (2, "gradients, too"), (3, "weights, too"))
    },
}
"""Word -> what it means.  Those of a schedule are told by the order in which ranks compute."""


@dataclass(frozen=True)
class Count:
    """A word with a number that is no axis: how many of something a way has.

    Attributes:
        way: the way that has them; the word stands beside it.
        option: of the trainer.
        meaning: in words.
    """

    way: str
    option: str
    meaning: str

    @property
    def flag(self) -> str:
        """What a script gets before the number."""
        return f"--{self.option}"


COUNTS = {
    "v": Count("interleaved", "chunks", "stages a rank"),
    "s": Count("terapipe", "slices", "slices a sequence"),
}
"""Letter -> what it counts; where it is not given, the script's own default counts."""

MOST_RANKS = 1024
_NUMBERED = re.compile(r"([a-z]+)([0-9]+)")


@dataclass(frozen=True)
class Layout:
    """Sizes of axes, and ways in which they work.

    Attributes:
        axes: (axis, size), in the order of AXES.
        ways: in the order of WAYS.
        counts: (letter, number), in the order of COUNTS.
        flags: what a script gets.
        ranks: how many it needs.
    """

    axes: tuple[tuple[str, int], ...]
    ways: tuple[str, ...] = ()
    counts: tuple[tuple[str, int], ...] = ()
    flags: tuple[str, ...] = field(init=False, compare=False)
    ranks: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        sizes = [word for axis, size in self.axes for word in (AXES[axis], str(size))]
        object.__setattr__(self, "flags", (*sizes, *self.flags_of(self.ways)))
        object.__setattr__(self, "ranks", math.prod(size for axis, size in self.axes if axis not in PART_OF))

    def flags_of(self, ways: Iterable[str]) -> tuple[str, ...]:
        """What a script gets for some of the ways, with what is counted of them."""
        told = [flag for way in ways for flag in WAYS[way].flags]
        counted = [(COUNTS[letter].flag, str(number)) for letter, number in self.counts if COUNTS[letter].way in ways]
        return (*told, *(word for pair in counted for word in pair))

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> number of ranks on it, of the axes larger than 1."""
        return {axis: size for axis, size in self.axes if size > 1}

    @property
    def simple(self) -> Layout:
        """The same without axes of one rank, and without ways that do nothing on its axes."""
        return self._with(self.sizes, self.ways)

    @property
    def schedule(self) -> str:
        """The word of the schedule; empty where none is given, or nothing is to be put in order."""
        return next((way for way in self.simple.ways if WAYS[way].group == "schedule"), "")

    @property
    def spreads_experts(self) -> bool:
        """Whether it makes sense only for a model that has experts."""
        return "ep" in self.sizes

    @property
    def is_stale(self) -> bool:
        """Whether it should equal a replay of its version tables in place of plain training."""
        return any(WAYS[way].stale for way in self.simple.ways)

    def _with(self, sizes: Mapping[str, int], ways: Iterable[str]) -> Layout:
        """A layout of these axes, and of what belongs to them."""
        kept = tuple(way for way in ways if _is_at_work(WAYS[way], sizes))
        return Layout(tuple(sizes.items()), kept, tuple(pair for pair in self.counts if COUNTS[pair[0]].way in kept))

    def parts(self) -> list[Layout]:
        """The layouts of one axis each that this one is made of, also without what is on or off; never itself.

        A schedule is an order of the same work: its axis stands alone without it, too.  An axis that is a part of
        another stands alone as all of it.  What the model does on any ranks stands alone on one, or beside each axis
        that it needs.
        """
        found: dict[Layout, None] = {}
        for axis, size in self.sizes.items():
            ways = [way for way in self.ways if WAYS[way].axis == axis]
            always = [way for way in ways if WAYS[way].group and WAYS[way].group != "schedule"]
            alone = {PART_OF.get(axis, axis): size, axis: size}
            found[self._with(alone, always)] = None
            found[self._with(alone, ways)] = None
            for way in self.ways:
                if axis in WAYS[way].over:
                    found[self._with(alone, [*always, way])] = None
        for way in self.ways:
            if not WAYS[way].axis and not WAYS[way].over:
                found[self._with({}, [way])] = None
        return [part for part in found if part != self.simple]

    def __str__(self) -> str:
        counts = (f"{letter}{number}" for letter, number in self.counts)
        return ",".join([*(f"{axis}{size}" for axis, size in self.axes), *self.ways, *counts])


def _is_at_work(way: Way, sizes: Mapping[str, int]) -> bool:
    """Whether a way does anything in a layout of these axes."""
    return way.axis in (*sizes, "") and (not way.over or any(axis in sizes for axis in way.over))


def parse(text: str) -> Layout:
    """The layout that a word of the command line stands for.

    Raises:
        ConfigError: naming the word that is wrong and those that are allowed.
    """
    axes: dict[str, int] = {}
    counts: dict[str, int] = {}
    ways: dict[str, str] = {}  # group -> word
    for word in text.split(","):
        found = _NUMBERED.fullmatch(word)
        if word in WAYS:
            group = WAYS[word].group or word
            if group in ways:
                raise ConfigError(f"--layout {text}: {ways[group]} and {word}: only one of such words can be given.")
            ways[group] = word
        elif found and found[1] in (*AXES, *COUNTS):
            name, number = found[1], int(found[2][:6])
            of = axes if name in AXES else counts
            what = "an axis has" if name in AXES else "there are"
            unit = "ranks" if name in AXES else COUNTS[name].meaning
            if name in of:
                raise ConfigError(f"--layout {text}: {name} stands twice; give each axis one size.")
            if not 1 <= number <= MOST_RANKS:
                raise ConfigError(f"--layout {text}: {word}: {what} from 1 to {MOST_RANKS} {unit}.")
            of[name] = number
        else:
            raise ConfigError(f"--layout {text}: {word!r} is no word of a layout.{suggest(word, WAYS)}\n{vocabulary()}")
    for letter, number in counts.items():
        if COUNTS[letter].way not in ways.values():
            way = COUNTS[letter].way
            raise ConfigError(
                f"--layout {text}: {letter}{number} counts {COUNTS[letter].meaning} of {way}: name it, too."
            )
    for word in ways.values():
        axis = WAYS[word].axis
        if axis and axis not in axes:
            raise ConfigError(
                f"--layout {text}: {word} is a way of {axis}, of which this layout names no size: {axis}2."
            )
    for axis, whole in PART_OF.items():
        if axis in axes and axes.get(whole, 1) % axes[axis]:
            raise ConfigError(
                f"--layout {text}: {axis}{axes[axis]} is a part of {whole}, whose size it does not divide: "
                f"{whole}{axes.get(whole, 1)}.  Say {whole}{axes[axis]},{axis}{axes[axis]}."
            )
    layout = Layout(
        tuple((axis, axes[axis]) for axis in AXES if axis in axes),
        tuple(way for way in WAYS if way in ways.values()),
        tuple((letter, counts[letter]) for letter in COUNTS if letter in counts),
    )
    if layout.ranks > MOST_RANKS:
        raise ConfigError(f"--layout {text} needs {layout.ranks} ranks; at most {MOST_RANKS} are allowed.")
    return layout


def vocabulary() -> str:
    """All words, for messages and help."""
    axes = " ".join(f"{axis}N" for axis in AXES if axis not in PART_OF)
    parts = "".join(f", {axis}N (N of the ranks of {whole})" for axis, whole in PART_OF.items())
    groups: dict[str, list[str]] = {}
    for word, way in WAYS.items():
        groups.setdefault(way.group or way.meaning, []).append(word)
    of = {word: f", of {way.axis}" if way.axis else "" for word, way in WAYS.items()}
    ways = "; ".join(f"{' | '.join(words)} ({name}{of[words[0]]})" for name, words in groups.items())
    counts = ", ".join(f"{letter}N ({count.meaning}, of {count.way})" for letter, count in COUNTS.items())
    return f"Words, joined by commas: {axes} (N ranks on an axis){parts};\n{ways};\n{counts}."
