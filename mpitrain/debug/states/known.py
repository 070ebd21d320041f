"""What is known of a value: its state on each axis, and where it got it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import Array, to_host
from mpitrain.nn.parameter import Parameter
from mpitrain.spec import INVARIANT, PARTIAL, REPLICATE, Shard, State

DATA_AXES = ("edp", "ep")


class Place(NamedTuple):
    """One call of an op: its name, the user's line, the module."""

    op: str
    site: str
    path: str

    def __str__(self) -> str:
        return f"{self.op} at {self.site}"


@dataclass(slots=True)
class Known:
    """What is known of one value.

    states: axis -> the states that it may be in (one, but for some reshapes); axes that are not named: nothing known.
    origins: axis -> where it got into that state: an op, the name of a parameter, a part of the batch.
    made: the op that made it, None for what came from outside.
    own: axes where it is Replicate, but each rank may have picked a part of its own.
    version: of a parameter, when its digest was last taken.
    """

    states: dict[str, tuple[State, ...]]
    origins: Mapping[str, Place | str]
    made: Place | None = None
    own: frozenset[str] = frozenset()
    version: int = -1

    def is_same(self, axis: str) -> bool:
        """Whether all ranks of the axis must hold the same bits."""
        states = self.states.get(axis, ())
        if axis in self.own or not states:
            return False
        return all(state in (INVARIANT, REPLICATE) for state in states)

    def has_same_gradient(self, axis: str) -> bool:
        """Whether the gradient must be the same: its state is the dual, so Invariant or Replicate."""
        states = self.states.get(axis, ())
        return bool(states) and all(state in (INVARIANT, PARTIAL) for state in states)

    def shape(self, shape: tuple[int, ...]) -> str:
        """A shape as all ranks print it: without the lengths of dims that are cut, which may be uneven."""
        cut = {state.dim for states in self.states.values() for state in states}
        lengths = ["_" if dim in cut else str(length) for dim, length in enumerate(shape)]
        return f"({', '.join(lengths)}{',' * (len(shape) == 1)})"

    def on(self, axis: str) -> str:
        """The state on an axis as text."""
        return " or ".join(map(str, self.states[axis])) if axis in self.states else "constant"


def of_parameter(p: Parameter, axes: Iterable[str]) -> Known:
    """A parameter is what its spec says."""
    return Known({axis: (p.spec.state(axis),) for axis in axes}, dict.fromkeys(axes, p.name))


def outside(states: Mapping[str, State], name: str) -> Known:
    """A value that no op made, in states that somebody vouches for."""
    return Known({axis: (state,) for axis, state in states.items()}, dict.fromkeys(states, name))


SHAPES: Mapping[str, Mapping[str, int]] = {
    "positions": {"cp": 0},
    "documents": {"data": 0},
}
"""Arrays of a batch that are not (samples,) or (samples, tokens, ...): which of their dims is cut over which axes."""


class BatchArrays:
    """The arrays of one micro-batch, found again where a model uses them.

    A model may hand on the array itself, or the same numbers on a device or in another dtype.

    Args:
        batch: a dataclass, mapping or other object with arrays.
        axes: the axes of interest.
    """

    def __init__(self, batch: Any, axes: Iterable[str]) -> None:
        self._arrays: list[tuple[Array, Known]] = []
        for name, array in _arrays_of(batch):
            cut = SHAPES.get(name, {"data": 0, "cp": 1})
            states = {}
            for axis in axes:
                dim = cut.get("data" if axis in DATA_AXES else axis)
                states[axis] = INVARIANT if dim is None or dim >= array.ndim else Shard(dim)
            self.add(array, outside(states, f"the batch's {name}"))

    def add(self, array: Array, known: Known) -> None:
        """Know one more array."""
        self._arrays.append((array, known))

    def find(self, array: Array) -> Known | None:
        """What is known of an array that a model uses; None: it is none of these, or may be several."""
        for mine, known in self._arrays:
            if mine is array:
                return known
        alike = [known for mine, known in self._arrays if _has_the_numbers(array, mine)]
        if not alike or any(known.states != alike[0].states for known in alike):
            return None
        self.add(array, alike[0])
        return alike[0]


def _arrays_of(batch: Any) -> list[tuple[str, Array]]:
    if is_dataclass(batch):
        items = {field.name: getattr(batch, field.name) for field in fields(batch)}
    else:
        items = dict(batch) if isinstance(batch, Mapping) else dict(getattr(batch, "__dict__", {}))
    return [(name, x) for name, x in items.items() if getattr(x, "ndim", 0) > 0 and hasattr(x, "dtype")]


def _has_the_numbers(array: Array, mine: Array) -> bool:
    """Whether an array holds those of the batch's array, rounded to its own dtype."""
    if array.shape != mine.shape or (array.dtype.kind in "iu") != (mine.dtype.kind in "iu"):
        return False
    with np.errstate(all="ignore"):
        return bool(np.array_equal(to_host(array), to_host(mine).astype(array.dtype, copy=False)))
