"""Every layout of so many ranks, with every way of each axis.

2 ranks    pp2 in each schedule, dp2, cp2 in each kind of attention, tp2 with and without sequence parallelism;
           once more, as few as show it beside everything: dp2,ep2; blocks made again; scores kept; each stage of ZeRO
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

from mpitrain.errors import ConfigError
from mpitrain.verify.layouts import AXES, MOST_RANKS, PART_OF, WAYS, Layout


def all_layouts(ranks: int) -> Iterator[Layout]:
    """Every factorisation of a number of ranks over the axes, with every way of each axis that goes with the others.

    Behind them some once more with experts spread over all of dp and over a part of it, and with what the model can do
    on any ranks: as few as show it beside every axis and, where axes are combined, every way.  What changes the
    mathematics is left out.

    Raises:
        ConfigError: the number is out of range.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise ConfigError(f"--all {ranks}: must be a whole number of ranks from 1 to {MOST_RANKS}.")
    if ranks == 1:
        yield Layout((("dp", 1),))
        return
    found = list(_of_axes(ranks))
    yield from found
    last_first = found[::-1]  # the first ones have more stages than models have blocks
    dp_first = sorted(last_first, key=lambda layout: [*layout.sizes] != ["dp"])
    part = list(_few(dp_first, _over_a_part_of_dp, with_ways=False))  # where a rank has several experts
    spread = [*_few(dp_first, _over_dp), *part, *(_with(layout, "overlap") for layout in part)]
    yield from spread
    for word, way in WAYS.items():
        if not way.axis:
            yield from _few([*(_first_of(way.over, last_first)), *spread], partial(_also, word))


def _few(
    layouts: Iterable[Layout], change: Callable[[Layout], Layout | None], with_ways: bool = True
) -> Iterator[Layout]:
    """The layouts, changed, that show beside the change an axis, or where axes are combined a way, for the first time.

    Args:
        layouts: which.
        change: makes another layout of one; None: the two do not go together.
        with_ways: whether ways count.
    """
    shown: set[str] = set()
    for layout in layouts:
        shows = {*layout.sizes, *(layout.ways if with_ways and len(layout.sizes) > 1 else ())}
        changed = None if shows <= shown else change(layout)
        if changed is not None:
            shown |= shows
            yield changed


def _first_of(axes: tuple[str, ...], layouts: Iterable[Layout]) -> list[Layout]:
    """The layouts, those that have the first of some axes before the others, and those that have no other first."""
    return sorted(layouts, key=lambda layout: (axes[:1] != (*layout.sizes,), {*axes[:1]}.isdisjoint(layout.sizes)))


def _also(word: str, layout: Layout) -> Layout | None:
    """The layout with one way more."""
    way, has = WAYS[word], {*layout.sizes, *layout.ways}
    return None if has.intersection(way.without) or (way.over and has.isdisjoint(way.over)) else _with(layout, word)


def _with(layout: Layout, word: str) -> Layout:
    return replace(layout, ways=tuple(way for way in WAYS if way in (*layout.ways, word)))


def _over_dp(layout: Layout) -> Layout | None:
    """The layout with experts spread over all of dp."""
    return _spread(layout, layout.sizes.get("dp", 1))


def _over_a_part_of_dp(layout: Layout) -> Layout | None:
    """The layout with experts spread over a part of dp, the smallest that is one."""
    dp = layout.sizes.get("dp", 1)
    return _spread(layout, next((ep for ep in range(2, dp) if dp % ep == 0), 1))


def _spread(layout: Layout, ep: int) -> Layout | None:
    if ep == 1 or any("ep" in WAYS[way].without for way in layout.ways):
        return None
    sizes = {**layout.sizes, "ep": ep}
    return replace(layout, axes=tuple((axis, sizes[axis]) for axis in AXES if axis in sizes))


def _of_axes(ranks: int) -> Iterator[Layout]:
    """The layouts of so many ranks and of ways of their axes."""
    names = [axis for axis in AXES if axis not in PART_OF]
    for sizes in _factorisations(ranks, len(names)):
        axes = tuple((axis, size) for axis, size in zip(names, sizes, strict=True) if size > 1)
        for ways in product(*(_choices(axis) for axis, _ in axes)):
            chosen = {way for some in ways for way in some}
            words = {axis for axis, _ in axes} | chosen
            if not any(words.intersection(WAYS[way].without) for way in chosen):
                yield Layout(axes, tuple(way for way in WAYS if way in chosen))


def _choices(axis: str) -> list[tuple[str, ...]]:
    """The ways of one axis: each word of a group, and with each of them every other word on and off."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for word, way in WAYS.items():
        if way.axis == axis and not way.stale:
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
