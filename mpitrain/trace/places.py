"""Where ranks stand: the layout of a run, and the place of a rank on it, as short texts."""

from __future__ import annotations

from mpitrain.trace.known import Known, Lane
from mpitrain.trace.words import plain


def layout_of(known: Known) -> str:
    """`pp 2 x dp 2 x tp 2`: the axes that have more than one rank; empty where the run does not say."""
    return " x ".join(f"{name} {n}" for name, (_, n) in _axes(known).items())


def place_of(known: Known, lane: Lane) -> str:
    """`pp0 dp1 tp0`; empty where the run does not say."""
    coords = lane.rank.facts.get("coords")
    if not isinstance(coords, dict):
        return ""
    return " ".join(
        f"{name}{coords[axis]}" for name, (axis, _) in _axes(known).items() if type(coords.get(axis)) is int
    )


def _axes(known: Known) -> dict[str, tuple[str, int]]:
    """Name -> (axis, ranks); without experts the replicas are simply dp."""
    sizes = known.fact("layout", dict)
    found = [(axis, n) for axis, n in list(sizes.items())[:8] if type(n) is int and 1 < n < 1 << 20]
    return {"dp" if axis == "edp" and sizes.get("ep", 1) == 1 else plain(axis, 8): (axis, n) for axis, n in found}
