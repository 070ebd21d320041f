"""Where to look: what the first difference, replicas and runs with one axis alone say of a layout that differs.

    factor      2 everywhere over an axis of size 2: doubled; 1/2: averaged, or one of two parts
    replicas    ranks that share a value and differ: along which axis
    alone       the layouts of one axis each: those that differ hold the fault
    states      the line at which the rules of states are broken, if they are

Each but the last is a hint that names axes.  The suspect is the axis on which they agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from mpitrain.verify.judge import Finding
from mpitrain.verify.layouts import PART_OF, WAYS, Layout
from mpitrain.verify.routed import CHOICES, NEAR_TIE

CLOSE = 1e-6  # of a factor to the number that it is taken for
FEW = 2  # choices that may have fallen otherwise by rounding
OWN_PARTS = {"dp": "mesh.dp.rank, mesh.dp.size", "cp": "positions=model.positions_here"}
"""Axis over which targets are counted -> what gives each of its ranks its own part of a batch."""
_SHOWN = {"edp": "dp"}
"""Axis of the mesh -> what it is called in layouts, if otherwise."""


class Hint(NamedTuple):
    """A label, what there is to say, and the axes that it points at."""

    label: str
    text: str
    axes: tuple[str, ...] = ()


Alone = Sequence[tuple[Layout, str]]


def hints(finding: Finding, layout: Layout, alone: Alone = (), state_error: str = "") -> list[Hint]:
    """All that can be said of the first difference of a layout.

    Args:
        finding: the first difference.
        layout: that has it.
        alone: the layouts of one axis each that were tried, and what came of them: "equal", "differs", "failed" or
            "refused".
        state_error: what the check of states says.

    Returns:
        Hints in the order in which they are printed; the last one is the suspect, if there is any.
    """
    if finding.kind == "step":
        found = [Hint("first", finding.problem)]
    else:
        found = [Hint("first", f"step {finding.step}, {finding.what}{_where(finding)}")]
    if finding.difference is not None and not finding.difference.ok:
        d = finding.difference
        at = f" at {list(d.at)}" if d.at else ""
        found.append(Hint("error", f"{d.error:.3g}{at}, allowed {d.bound:.3g}: {d.why}"))
        found += _of_factor(finding, layout.sizes)
    if finding.problem and finding.kind != "step":
        axes = tuple(dict.fromkeys(_SHOWN.get(axis, axis) for axis in finding.split.axes)) if finding.split else ()
        along = f", along {' and '.join(axes)}" if axes else ""
        along += " (the two stages that share it)" * ("pp" in axes)
        found.append(Hint("replicas" if finding.split else "problem", finding.problem + along, axes))
    if alone:
        text = ", ".join(f"{part} {word}" for part, word in alone)
        accused = dict.fromkeys(_axis(part, alone) for part in _guilty(alone) if part.sizes)
        found.append(Hint("alone", text, tuple(accused)))
    if state_error:
        found.append(Hint("states", state_error))
    suspect = _suspect(found, layout, alone)
    return [*found, Hint("suspect", suspect)] if suspect else found


def _guilty(alone: Alone) -> list[Layout]:
    return [part for part, word in alone if word in ("differs", "failed")]


def _axis(part: Layout, alone: Alone) -> str:
    """The axis that a guilty part accuses: of an axis and its part the part, unless the axis is guilty without it."""
    *_, axis = part.sizes
    plain = [tuple(other.sizes) for other in _guilty(alone) if not other.ways]
    return PART_OF[axis] if axis in PART_OF and (PART_OF[axis],) in plain else axis


def _where(finding: Finding) -> str:
    """On which ranks, if not on all."""
    if not finding.ranks:
        return ""
    many = "s" if len(finding.ranks) > 1 else ""
    return f" (only the part{many} of rank{many} {' '.join(map(str, finding.ranks))})"


def _of_factor(finding: Finding, sizes: Mapping[str, int]) -> list[Hint]:
    """What one common factor means."""
    assert finding.difference is not None
    factor = finding.difference.factor
    if finding.kind == CHOICES and finding.difference.error <= FEW:
        return [Hint("how", NEAR_TIE)]
    if math.isnan(factor):
        if math.isnan(finding.difference.error):
            return [Hint("how", "not a number: NaN, or infinity minus infinity")]
        return [Hint("how", f"{finding.difference.ratio:.6g} times the value there, other factors elsewhere")]
    if factor == 0:
        return [Hint("how", "zero everywhere: never computed, or never sent")]
    if finding.kind == "targets":
        sizes = {axis: size for axis, size in sizes.items() if axis in OWN_PARTS}
    for number, (over, axes) in _counts(sizes).items():
        if finding.kind == "targets" and _close(factor, number):
            names = (" and " if math.prod(sizes[axis] for axis in axes) == number else " or ").join(axes)
            ways = "; ".join(OWN_PARTS[axis] for axis in axes)
            text = f"the ranks of {names} counted the same targets: each rank must get its own part ({ways})"
            return [Hint("how", text, axes)]
        if _close(factor, number):
            how = "doubled" if number == 2 else "summed or counted as often"
            return [Hint("how", f"{number} times the value everywhere: {how} {over}", axes)]
        if _close(factor, 1 / number):
            text = f"1/{number} of the value everywhere: not summed, or averaged, {over}"
            return [Hint("how", text, axes)]
        if finding.kind == "norm" and _close(factor**2, number):
            text = f"the root of {number} times the value: everything counted {number} times {over}"
            return [Hint("how", text, axes)]
    if _close(factor, -1):
        return [Hint("how", "the sign is turned everywhere")]
    return [Hint("how", f"{factor:.9g} times the value everywhere")]


def _counts(sizes: Mapping[str, int]) -> dict[int, tuple[str, tuple[str, ...]]]:
    """How often something may be counted in a layout: number -> over what, and the axes."""
    found: dict[int, tuple[str, tuple[str, ...]]] = {}
    sizes = _with_parts(sizes)
    for size in sizes.values():
        axes = tuple(axis for axis, other in sizes.items() if other == size)
        found[size] = (f"over an axis of size {size} ({' or '.join(axes)})", tuple(_SHOWN.get(a, a) for a in axes))
    for count in range(2, len(sizes) + 1):
        for several in combinations(sizes, count):
            number = math.prod(sizes[axis] for axis in several)
            if any(of in several and {axis, f"e{of}"}.intersection(several) for axis, of in PART_OF.items()):
                continue  # an axis and its part are no two axes
            found.setdefault(number, (f"over axes whose sizes multiply to {number}", tuple(sizes)))
    if "pp" in sizes:
        found.setdefault(2, ("over the two ends of pp", ("pp",)))
    return found


def _with_parts(sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes, with what is left of an axis beside its part: dp over ep is edp."""
    found = dict(sizes)
    for axis, whole in PART_OF.items():
        if 1 < sizes.get(axis, 1) < sizes.get(whole, 1):
            found[f"e{whole}"] = sizes[whole] // sizes[axis]
    return found


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= CLOSE * abs(b)


def _suspect(found: Sequence[Hint], layout: Layout, alone: Alone) -> str:
    """The axis on which the hints agree, as text; empty where nothing points anywhere."""
    if not layout.sizes and layout.ways:
        return WAYS[layout.ways[0]].meaning
    if len(layout.sizes) == 1 and not alone:
        return next(iter(layout.sizes))
    guilty = _guilty(alone)
    if guilty:
        plain = {tuple(part.sizes) for part in guilty if not part.ways}
        names = [str(p) if p.ways and tuple(p.sizes) not in plain else _axis(p, alone) for p in guilty]
        return " and ".join(dict.fromkeys(names))
    if alone and all(word == "equal" for _, word in alone):
        ways = [way for way in layout.ways if WAYS[way].axis in layout.sizes]
        of_model = [way for way in layout.ways if not WAYS[way].axis]
        sizes = [(axis, size) for axis, size in layout.sizes.items() if axis not in PART_OF]
        whole = next((axis for axis, of in PART_OF.items() if [(of, layout.sizes.get(axis))] == sizes), "")
        if whole and not of_model:  # it is all of the layout, and the axis of which it is a part is equal
            meant = " and ".join(WAYS[way].meaning for way in ways)
            return f"{meant} on {whole}" if ways else whole
        if len(layout.sizes) == 1 and not of_model:
            what = f"schedule {layout.schedule}" if layout.schedule else WAYS[ways[0]].meaning
            return f"{what} on {next(iter(layout.sizes))}"
        return f"{' and '.join([*layout.sizes, *of_model])} together: each alone is equal"
    axes = [set(hint.axes) for hint in found if hint.axes]
    if not axes:
        return ""
    common = set.intersection(*axes) or axes[-1]
    return " or ".join(axis for axis in layout.sizes if axis in common)
