"""How a value lies across the ranks of an axis, and which part of a full tensor a rank holds.

Four states of a value across one axis, each with the state of its gradient (its dual):

    Invariant   same on every rank, counted once                           gradient Invariant
    Replicate   same on every rank, each rank uses its own copy            gradient Partial
    Partial     the true value is the sum over the ranks                   gradient Replicate
    Shard(d)    rank i holds slice i of dim d                              gradient Shard(d)

A parameter carries a `Spec`: its state on each *atomic* axis (`pp edp ep cp tp`).  What it does not name has the axis'
default: on edp, ep and cp the ranks see different data, so the parameter is Replicate there; on tp they see the same
data, so it is Invariant; on pp it is Local, since it exists on one stage only.  Initialisation, the gradient sum, the
norm, the optimizer and checkpoints all read this one spec.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mpitrain.errors import StateError

ATOMIC_AXES = ("pp", "edp", "ep", "cp", "tp")
MERGED_AXES = {"dp": ("edp", "ep")}
DATA_AXES = ("edp", "ep", "cp")
"""The axes whose ranks see different data: what is counted or measured by token or by row is summed over all three."""


@dataclass(frozen=True)
class State:
    """One way in which a value can lie across an axis; `dim` is the tensor dim that is cut, None unless it is."""

    name: str
    dim: int | None = None

    def __str__(self) -> str:
        return self.name if self.dim is None else f"{self.name}({self.dim})"


def Shard(dim: int) -> State:
    """Rank i of the axis holds slice i along `dim` of the full tensor."""
    return State("Shard", dim)


INVARIANT = State("Invariant")
REPLICATE = State("Replicate")
PARTIAL = State("Partial")
LOCAL = State("Local")  # exists on one rank of the axis only: a stage's parameter on pp

DEFAULTS: Mapping[str, State] = {"pp": LOCAL, "edp": REPLICATE, "ep": REPLICATE, "cp": REPLICATE, "tp": INVARIANT}


def dual(state: State) -> State:
    """The state of the gradient of a value that is in `state`."""
    if state == REPLICATE:
        return PARTIAL
    if state == PARTIAL:
        return REPLICATE
    return state


class Spec:
    """The state of a parameter on each atomic axis; what is not named has the axis' default.

    Args:
        states: axis name -> state.  `dp` is short for both edp and ep.  `ends` names the pair {first, last stage}
            and replaces the Local of pp: `{"ends": REPLICATE}` is a tied embedding.

    Raises:
        StateError: an axis that does not exist, or Partial (a parameter is a value, never a summand).
    """

    __slots__ = ("_states",)

    def __init__(self, states: Mapping[str, State] | None = None) -> None:
        named: dict[str, State] = {}
        for axis, state in (states or {}).items():
            if axis != "ends" and axis not in ATOMIC_AXES and axis not in MERGED_AXES:
                known = " ".join((*ATOMIC_AXES, *MERGED_AXES, "ends"))
                raise StateError(f"a parameter names axis {axis!r}; known axes: {known}")
            if state == PARTIAL:
                raise StateError(f"a parameter cannot be Partial (axis {axis}): only gradients and activations are")
            for atom in MERGED_AXES.get(axis, (axis,)):
                named[atom] = state
        self._states = named

    def state(self, axis: str) -> State:
        """The state on one atomic axis (or on `ends`, where it is Local unless named)."""
        return self._states.get(axis, DEFAULTS.get(axis, LOCAL))

    @property
    def tied(self) -> bool:
        """True for a parameter that the first and the last stage both hold."""
        return self.state("ends") == REPLICATE

    def replicate_axes(self) -> tuple[str, ...]:
        """The axes over whose merge the gradient is summed: the one rule."""
        return tuple(axis for axis in ATOMIC_AXES if self.state(axis) == REPLICATE)

    def shared_axes(self) -> tuple[str, ...]:
        """The axes along which all ranks hold the same values: Replicate or Invariant."""
        return tuple(axis for axis in ATOMIC_AXES if self.state(axis) in (REPLICATE, INVARIANT))

    def shard_dims(self) -> dict[str, int]:
        """Axis -> tensor dim, for every axis over which the parameter is cut, in the order of ATOMIC_AXES."""
        states = {axis: self.state(axis) for axis in ATOMIC_AXES}
        return {axis: state.dim for axis, state in states.items() if state.dim is not None}

    def norm_axes(self) -> tuple[str, ...]:
        """The axes over which squares are summed for the norm: Shard or Local; elsewhere a value counts once."""
        return tuple(axis for axis in ATOMIC_AXES if self.state(axis).dim is not None or self.state(axis) == LOCAL)

    def without(self, dim: int) -> Spec:
        """The spec of a tensor that lacks a dim of this one: of a sum over it that every rank has.

        Along the axes that cut that dim all ranks hold the same then, as they do by default.
        """
        states = {axis: state for axis, state in self._states.items() if state.dim != dim}
        later = {axis: Shard(s.dim - 1) for axis, s in states.items() if s.dim is not None and s.dim > dim}
        return Spec({**states, **later})

    def by_rows(self, axes: Iterable[str]) -> Spec:
        """The spec of this rank's rows of a tensor that is dealt out over these axes, beside how it is cut already."""
        return Spec({**self._states, **dict.fromkeys(axes, Shard(0))})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self._states == other._states

    def __hash__(self) -> int:
        return hash(frozenset(self._states.items()))

    def __repr__(self) -> str:
        inner = ", ".join(f"{axis}: {state}" for axis, state in self._states.items())
        return f"Spec({inner})"


def cut(length: int, parts: int, index: int) -> tuple[int, int]:
    """Part `index` of `length` cut into `parts`: ceil(length / parts) each, the last ones shorter or empty.

    Returns:
        (start, stop) with 0 <= start <= stop <= length; the parts join without gap.
    """
    step = -(-length // parts)
    return min(index * step, length), min((index + 1) * step, length)


def slab(
    full_shape: tuple[int, ...], spec: Spec, coords: Mapping[str, int], sizes: Mapping[str, int]
) -> tuple[slice, ...]:
    """The rectangle of the full tensor that the rank at `coords` holds.

    Args:
        full_shape: shape of the unsharded tensor.
        spec: where it is cut.  Several axes may cut the same dim: the earlier one in ATOMIC_AXES cuts first.
        coords: axis -> this rank's index on it; axes that are not named count as index 0.
        sizes: axis -> number of ranks on it; axes that are not named count as 1.

    Returns:
        One slice a dim, with explicit start and stop.
    """
    starts = [0] * len(full_shape)
    stops = list(full_shape)
    for axis, dim in spec.shard_dims().items():
        low, high = cut(stops[dim] - starts[dim], sizes.get(axis, 1), coords.get(axis, 0))
        starts[dim], stops[dim] = starts[dim] + low, starts[dim] + high
    return tuple(slice(start, stop) for start, stop in zip(starts, stops, strict=True))


def slab_shape(rectangle: tuple[slice, ...]) -> tuple[int, ...]:
    """The shape of a rectangle of explicit slices."""
    return tuple(part.stop - part.start for part in rectangle)
