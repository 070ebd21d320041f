"""Ranks that should hold the same, and do not: who differs from whom, in how many elements, where first, how far.

Bits are compared, not numbers: what is computed alike is alike to the last bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.backend import Array, to_host
from mpitrain.comm.places import named
from mpitrain.debug.compare import compare
from mpitrain.debug.console.found import Found


class Alike(NamedTuple):
    """What ranks are told apart by: those of one class hold the same bits of the same thing.

    found: the first of them; ranks: all of them.
    """

    found: Found
    ranks: tuple[int, ...]


def classes(found: Sequence[Found]) -> list[Alike]:
    """Ranks of one group whose bits are the same, in the order of the first of them."""
    by: dict[Hashable, list[Found]] = {}
    for each in found:
        key: Hashable = (each.why, each.state, each.part) if each.array is None else _bits(each.array)
        alone = each.rank if each.array is not None and each.group is None else None
        by.setdefault((each.group, each.moment, each.when, each.note, alone, key), []).append(each)
    return [Alike(those[0], tuple(each.rank for each in those)) for those in by.values()]


def differences(found: Sequence[Found]) -> list[str]:
    """A line for each class of ranks that hold something else than most of their group, at the same moment."""
    lines = []
    for group in _groups(found):
        alike = _by_bits(group)
        if len(alike) < 2:
            continue
        usual = max(alike, key=lambda each: len(each.ranks))  # of several as large the first
        for odd in alike:
            if odd is not usual:
                verb = "differ" if len(odd.ranks) > 1 else "differs"
                gap = gap_text(odd.found.array, usual.found.array)
                lines.append(f"{named(odd.ranks)} {verb} from {named(usual.ranks)} {gap}")
    return lines


def agreements(found: Sequence[Found]) -> list[tuple[int, ...]]:
    """The groups of two and more ranks that hold the same, as they should."""
    return [each[0].ranks for group in _groups(found) if len(each := _by_bits(group)) == 1 and len(each[0].ranks) > 1]


def elsewhere(found: Sequence[Found]) -> list[str]:
    """A line for each group whose ranks stand at different moments, so that they were not all compared."""
    lines = []
    by: dict[Hashable, dict[Hashable, list[Found]]] = {}
    for each in found:
        if each.array is not None and each.group is not None:
            by.setdefault(each.group, {}).setdefault(each.moment, []).append(each)
    for moments in by.values():
        if len(moments) > 1:
            parts = [f"{named([each.rank for each in those])} {those[0].when}" for those in moments.values()]
            lines.append(f"not compared: {'; '.join(parts)}")
    return list(dict.fromkeys(lines))


def gap_text(odd: Array, usual: Array) -> str:
    """How far two arrays are apart: `in 12 of 16,384 elements, first at [3, 17]: 0.125 against 0.25`."""
    a, b = (np.asarray(to_host(array)) for array in (odd, usual))
    if a.shape != b.shape:
        return f"in shape: {a.shape} against {b.shape}"
    if a.dtype != b.dtype:
        return f"in dtype: {a.dtype} against {b.dtype}"
    wide_a, wide_b = (x if x.dtype.kind in "iub" else x.astype(np.float64) for x in (a, b))
    with np.errstate(all="ignore"):
        unequal = (wide_a != wide_b) & ~((wide_a != wide_a) & (wide_b != wide_b))
        count = int(np.count_nonzero(unequal))
        if not count:
            return "in bits only: in signs of zeros, or kinds of NaN"
        gap = np.abs(wide_a.astype(np.float64) - wide_b.astype(np.float64))
    first = _at(unequal.argmax(), a.shape)
    largest = _at(np.where(unequal, np.nan_to_num(gap, nan=np.inf, posinf=np.inf), -1.0).argmax(), a.shape)
    text = f"in {count:,} of {a.size:,} element{'s' * (a.size != 1)}"
    if a.ndim:
        text += f", first at {list(first)}"
    text += f": {_pair(a[first], b[first])}"
    if largest != first:
        text += f"; most at {list(largest)}: {_pair(a[largest], b[largest])}"
    text += f", |d| {gap[largest]:.3g}"
    factor = _factor(wide_a, wide_b) if count > 1 else math.nan
    return text if math.isnan(factor) else f"{text}; all of it by the factor {factor:.6g}"


def _factor(a: np.ndarray, b: np.ndarray) -> float:
    if a.dtype.kind in "iub" or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan
    [found] = compare({"": a}, {"": b}, 0.0)
    return found.factor


def _groups(found: Sequence[Found]) -> list[list[Found]]:
    """Ranks that can be compared."""
    by: dict[Hashable, list[Found]] = {}
    for each in found:
        if each.array is not None and each.group is not None:
            by.setdefault((each.group, each.moment), []).append(each)
    return list(by.values())


def _by_bits(group: Sequence[Found]) -> list[Alike]:
    by: dict[bytes, list[Found]] = {}
    for each in group:
        assert each.array is not None
        by.setdefault(_bits(each.array), []).append(each)
    return [Alike(those[0], tuple(each.rank for each in those)) for those in by.values()]


def _bits(array: Array) -> bytes:
    host = np.ascontiguousarray(to_host(array))
    head = f"{array.shape} {host.dtype}".encode()
    return hashlib.blake2b(host.reshape(-1).view(np.uint8).data, digest_size=16).digest() + head


def _at(flat: np.integer, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(flat), shape))


def _pair(a: object, b: object) -> str:
    """Two numbers with as many digits as tell them apart."""
    x, y = float(a), float(b)  # type: ignore[arg-type]
    for digits in (6, 9, 17):
        texts = f"{x:.{digits}g}", f"{y:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return f"{texts[0]} against {texts[1]}"
