"""Sums of ranks, added up to those of whole values.

    slices                          all sums add up
    summands                        linear sums add up; squares only tell how large rounding may be
    the same on all ranks           it counts once; other bytes on one of them are a finding of their own
    picked by each rank, unknown    nobody can say: left out

A parameter is held in rectangles of the full tensor: each rectangle counts once, and together they are all of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mpitrain.debug.digests.following import CUT, SAME, SUMMANDS, UNKNOWN

Key = tuple[str, int, str, str, int, int]
"""Kind ("F" values, "B" gradients), stage, path, name, count, index."""
Name = tuple[str, str, str, int, int]
"""The same on all layouts: without the stage."""
Coords = Mapping[str, int]


class Split(NamedTuple):
    """Ranks that should hold the same and do not: along which axis, and those that differ from the others."""

    axis: str
    odd: tuple[int, ...]
    others: tuple[int, ...]


class Part(NamedTuple):
    """What some ranks hold of a value together.

    elements, plain, size, squares, rows, columns, both: as of `mpitrain.debug.digests.sums`; size is None where the
    squares are those of summands.  crc: None where several were added up.
    """

    elements: int
    plain: float
    size: float | None
    squares: float
    rows: float | None
    columns: float | None
    both: float | None
    crc: int | None
    split: Split | None
    ranks: tuple[int, ...]

    @property
    def linear(self) -> dict[str, float]:
        """The linear sums that are known, by name."""
        found = {"plain": self.plain, "rows": self.rows, "columns": self.columns, "both": self.both}
        return {name: value for name, value in found.items() if value is not None}


class Whole(NamedTuple):
    """A value of a step: its sums, how the op is called here and where, and where in the program it stands."""

    of: Part
    title: str
    site: str
    stage: int
    place: int
    passes: int


class Seen(NamedTuple):
    """A value on one rank: its coords, what was noted of it, its numbers."""

    rank: int
    coords: Coords
    stage: int
    about: Sequence[Any]
    numbers: Sequence[Any]


def number(value: Any) -> float | None:
    """A number of a file: what is not finite stands there by its name."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.get(value) if isinstance(value, str) else None


def part_of(numbers: Sequence[Any], rank: int) -> Part | None:
    """What one rank holds; None where the numbers are none."""
    elements, *values = numbers[:7]
    plain, size, squares, rows, columns, both = (number(value) for value in values)
    crc = numbers[7] if len(numbers) > 7 else None
    if plain is None or squares is None or type(elements) is not int or type(crc) not in (int, type(None)):
        return None
    return Part(elements, plain, size, squares, rows, columns, both, crc, None, (rank,))


def wholes(seen: Mapping[Key, list[Seen]], sizes: Mapping[str, int]) -> dict[Name, Whole]:
    """The values of a step, by name.

    Args:
        seen: on all ranks.
        sizes: of the axes.

    A value that cannot be added up is left out, and so is one whose name two stages have.
    """
    stages: dict[tuple[str, str], set[int]] = {}
    for _, stage, path, name, _, _ in seen:
        stages.setdefault((path, name), set()).add(stage)
    found = {}
    for (kind, stage, path, name, count, index), ranks in seen.items():
        if len(stages[path, name]) > 1:
            continue
        whole = _whole(ranks, sizes)
        if whole is not None:
            found[kind, path, name, count, index] = whole._replace(stage=stage)
    return found


def _whole(ranks: Sequence[Seen], sizes: Mapping[str, int]) -> Whole | None:
    title, site, place, lies = ranks[0].about
    if any(each.about[3] != lies for each in ranks[1:]):
        return None
    parts: dict[tuple[tuple[str, int], ...], Part] = {}
    for each in ranks:
        part = part_of(each.numbers, each.rank)
        if part is None:
            return None
        parts[tuple((axis, each.coords.get(axis, 0)) for axis in lies)] = part
    order = {SAME: 0, UNKNOWN: 1, CUT: 2, SUMMANDS: 3}
    if any(word not in order for axis, word in lies.items() if sizes.get(axis, 1) > 1):
        return None
    for axis in sorted(lies, key=lambda axis: order.get(lies[axis], 0)):
        groups: dict[tuple[tuple[str, int], ...], list[Part]] = {}
        for coords, part in sorted(parts.items()):
            groups.setdefault(tuple(pair for pair in coords if pair[0] != axis), []).append(part)
        parts = {}
        for coords, group in groups.items():
            joined = _joined(group, lies[axis], axis) if len(group) == sizes.get(axis, 1) else None
            if joined is None:
                return None
            parts[coords] = joined
    (of,) = parts.values()
    passes = ranks[0].numbers[8]
    return Whole(of, title, site, ranks[0].stage, place, passes if type(passes) is int else 0)


def _joined(group: Sequence[Part], word: str, axis: str) -> Part | None:
    """What the ranks of an axis hold together; None: nobody can say."""
    first = group[0]
    if len(group) == 1:
        return first
    split = next((part.split for part in group if part.split is not None), None)
    if word in (SAME, UNKNOWN):
        crcs = [part.crc for part in group]
        if len(set(crcs)) > 1:
            if word == UNKNOWN:
                return None
            most = Counter(crcs).most_common(1)[0][0]
            odd = tuple(r for part in group if part.crc != most for r in part.ranks)
            split = split or Split(axis, odd, tuple(r for part in group if part.crc == most for r in part.ranks))
            first = next(part for part in group if part.crc == most)
        return first._replace(split=split, ranks=tuple(rank for part in group for rank in part.ranks))
    counts = {part.elements for part in group}
    if word == SUMMANDS and len(counts) > 1:
        return None
    return Part(
        sum(part.elements for part in group) if word == CUT else first.elements,
        math.fsum(part.plain for part in group),
        _sum(part.size for part in group) if word == CUT else None,
        math.fsum(part.squares for part in group),
        _sum(part.rows for part in group),
        _sum(part.columns for part in group),
        _sum(part.both for part in group),
        None,
        split,
        tuple(rank for part in group for rank in part.ranks),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total


# ---------------------------------------------------------------------------------------------------------- parameters


class Tensor(NamedTuple):
    """A parameter, or what an optimizer keeps of it: its sums, its exact hash if it has one, or what is wrong."""

    of: Part
    exact: int | None
    problem: str = ""


Held = tuple[int, Sequence[Sequence[Any]], Sequence[Sequence[Any]]]
"""Rank, its slabs (name, full shape, rectangle), the numbers of each."""


def tensors(held: Iterable[Held], has_hash: bool = False) -> dict[str, Tensor]:
    """The tensors of one kind, from the slabs of all ranks.

    Args:
        held: of each rank.
        has_hash: whether the last number is an exact hash, which adds up, and not a checksum of the slab.
    """
    of: dict[str, dict[tuple[tuple[int, int], ...], list[tuple[int, Sequence[Any]]]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, slabs, numbers in held:
        for (name, shape, rectangle), told in zip(slabs, numbers, strict=False):
            shapes.setdefault(name, tuple(shape))
            key = tuple((start, stop) for start, stop in rectangle)
            if isinstance(told, list) and len(told) == 8:
                of.setdefault(name, {}).setdefault(key, []).append((rank, told))
    found = {}
    for name, rectangles in of.items():
        parts, hashes, split = [], 0, None
        for holders in rectangles.values():
            same = [part for rank, told in holders if (part := part_of(told, rank)) is not None]
            joined = _joined(same, SAME, "") if same else None
            if joined is None:
                break
            split = split or joined.split
            parts.append(joined)
            hashes += joined.crc or 0
        else:
            whole = _joined(parts, CUT, "") if len(parts) > 1 else parts[0]
            assert whole is not None
            elements = math.prod(shapes[name])
            problem = (
                "" if whole.elements == elements else f"ranks hold {whole.elements:,} of its {elements:,} elements"
            )
            found[name] = Tensor(whole._replace(split=split), hashes % (1 << 64) if has_hash else None, problem)
    return found
