"""One value as each rank holds it, and with whom it should be the same.

Ranks that must hold the same bits have the same `group`, which is what they share by the value's states: the rectangle
of the full tensor, and their places on all axes along which it may differ.  They are compared at the same `moment`
alone: a rank that has not made the update yet holds other weights, and rightly so.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from mpitrain.backend import Array
from mpitrain.comm.mesh import Mesh
from mpitrain.spec import Spec, State


class Found(NamedTuple):
    """What one rank has.

    rank: of the world; array: the value, None where it is not here, and why; full: shape of the whole of which it is a
    part, () where that is not known; part: `[0:24, 48:96]` of it, "" for all; state: `dp Replicate, tp Shard(1)`;
    group, moment: see above, a group of None has one member; when: the moment in words; note: what else is to be said.
    """

    rank: int
    array: Array | None
    why: str = ""
    full: tuple[int, ...] = ()
    part: str = ""
    state: str = ""
    group: Hashable = None
    moment: Hashable = None
    when: str = ""
    note: str = ""


Bounds = tuple[tuple[int, int], ...]


def bounds(rectangle: Sequence[slice]) -> Bounds:
    """Explicit slices as something that can be compared and be a key."""
    return tuple((part.start, part.stop) for part in rectangle)


def part_text(rectangle: Sequence[slice], full: Sequence[int]) -> str:
    """`[0:24, 48:96]`, with `:` for whole dims; "" for all of the tensor."""
    if all((part.start, part.stop) == (0, length) for part, length in zip(rectangle, full, strict=True)):
        return ""
    texts = [
        ":" if (part.start, part.stop) == (0, length) else f"{part.start}:{part.stop}"
        for part, length in zip(rectangle, full, strict=True)
    ]
    return f"[{', '.join(texts)}]"


def group_of(mesh: Mesh | None, rectangle: Sequence[slice], spec: Spec, apart: Collection[str] = ()) -> Hashable:
    """Who holds the same part of a parameter, of its gradient or of its moments.

    Args:
        mesh: the layout; None: not known, then the rectangle tells alone, and nothing where there are axes apart.
        rectangle: this rank's.
        spec: of the tensor.
        apart: axes along which it may differ all the same.
    """
    if mesh is None:
        return None if apart else bounds(rectangle)
    same = {*spec.shared_axes(), *(["pp"] if spec.tied else [])} - set(apart)
    return bounds(rectangle), places(mesh, same)


def places(mesh: Mesh, same: Collection[str]) -> Hashable:
    """This rank's places on all axes but those along which a value is the same."""
    return tuple((axis, at) for axis, at in mesh.coords.items() if axis not in same)


def states_text(mesh: Mesh | None, states: Mapping[str, State | str]) -> str:
    """`dp Replicate, tp Shard(1)`: of axes with more than one rank; of all where they are not known."""
    shown = {axis: state for axis, state in states.items() if mesh is None or mesh.sizes[axis] > 1}
    is_dp = mesh is None or mesh.sizes["ep"] == 1
    return ", ".join(f"{'dp' if axis == 'edp' and is_dp else axis} {state}" for axis, state in shown.items())


def of_spec(mesh: Mesh | None, spec: Spec) -> dict[str, Any]:
    """The states of a parameter that are of interest: on a stage of a pipeline it is alone, unless it is tied.

    Without a layout those that cut it.
    """
    axes = ("edp", "ep", "cp", "tp") if mesh is not None else tuple(spec.shard_dims())
    states: dict[str, Any] = {axis: spec.state(axis) for axis in axes}
    if spec.tied and mesh is not None:
        states["pp"] = "tied"
    return states
