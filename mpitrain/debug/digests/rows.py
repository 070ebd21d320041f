"""Which rows of the global batch the leading dims of a value are, and which columns its other dims.

A value of tokens is (b, s, ...): its rows are those of this micro-batch, at the positions that this rank holds.  Where
a batch knows no places or positions, or a value lies in a way that leaves them open, there are no factors, and sums go
without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mpitrain.backend import to_host
from mpitrain.comm.mesh import Mesh
from mpitrain.debug.digests.weights import COLUMNS, PLACES, POSITIONS, block_of, factors
from mpitrain.debug.states.known import Known
from mpitrain.nn.parameter import Parameter
from mpitrain.spec import Shard, State

Factors = np.ndarray | None


class Rows:
    """The rows of one micro-batch on this rank.

    Args:
        batch: with `places` (b,) of its rows, and `positions` (s,) of its tokens, if it has them.
        mesh: the layout.
        uneven: axis -> lengths of slices of dims that it cuts unevenly; where such a slice begins is not known.
    """

    def __init__(self, batch: Any, mesh: Mesh, uneven: Mapping[str, frozenset[int]]) -> None:
        self._mesh = mesh
        self._uneven = uneven
        self._places = _numbers(getattr(batch, "places", None))
        self._positions = _numbers(getattr(batch, "positions", None)) if self._places is not None else None
        self.leading = 1 if self._positions is None else 2
        self._cache: dict[tuple[int, str], Factors] = {}

    def factors(self, shape: tuple[int, ...], known: Known | None) -> tuple[Factors, Factors]:
        """The factors of the rows of a value, and of its columns."""
        if known is None or len(shape) <= self.leading:  # (b, s) has tokens in the place of columns
            return None, None
        return self._of_rows(shape, known), self._of_columns(shape[self.leading :], self.leading, known)

    def _of_rows(self, shape: tuple[int, ...], known: Known) -> Factors:
        places, positions = self._places, self._positions
        if places is None or shape[0] != len(places):
            return None
        if any(self._states(known, axis, Shard(0)) != (Shard(0),) for axis in ("edp", "ep")):
            return None
        if positions is None:
            return factors(PLACES, places)
        way = self._way(known)
        if way not in ("here", "slice", "all"):
            return None
        key = shape[1], way
        if key not in self._cache:
            self._cache[key] = self._of_tokens(places, positions, *key)
        return self._cache[key]

    def _way(self, known: Known) -> str:
        """How the tokens of a value are cut."""
        cp, tp = self._states(known, "cp", Shard(1)), known.states.get("tp", ())
        if len(cp) != 1 or len(tp) > 1 or (tp and tp[0].dim == 0):
            return ""
        in_slices = bool(tp) and tp[0] == Shard(1)
        if cp[0] == Shard(1):
            return "slice" if in_slices else "here"
        return "all" if cp[0].dim is not None and cp[0].name == "Shard" and cp[0].dim > 1 and not in_slices else ""

    def _states(self, known: Known, axis: str, alone: State) -> tuple[State, ...]:
        """The states on an axis; on one of a single rank that is not followed as they would be."""
        return known.states.get(axis, () if self._mesh.sizes[axis] > 1 or axis == "edp" else (alone,))

    def _of_tokens(self, places: np.ndarray, positions: np.ndarray, length: int, way: str) -> Factors:
        tp = self._mesh.tp
        if way == "slice":
            positions = positions[tp.rank * length : (tp.rank + 1) * length]
        elif way == "all":
            positions = np.arange(len(positions) * self._mesh.cp.size)
        if len(positions) != length:
            return None
        return np.multiply.outer(factors(PLACES, places), factors(POSITIONS, positions)).reshape(-1)

    def _of_columns(self, lengths: tuple[int, ...], leading: int, known: Known) -> Factors:
        starts = [0] * len(lengths)
        cut: list[tuple[str, State]] = []
        for axis, states in known.states.items():
            if self._mesh.sizes[axis] == 1:
                continue
            if len(states) > 1:
                return None
            if states[0].dim is not None and states[0].dim >= leading:
                cut.append((axis, states[0]))
        if len(cut) > 1:
            return None
        for axis, state in cut:
            at = (state.dim or 0) - leading
            if state.name != "Shard" or at != len(lengths) - 1 or lengths[at] in self._uneven.get(axis, ()):
                return None
            starts[at] = self._mesh.coords[axis] * lengths[at]
        return block_of(COLUMNS, tuple(starts), lengths)


def uneven(parameters: Iterable[Parameter], sizes: Mapping[str, int]) -> dict[str, frozenset[int]]:
    """Axis -> the lengths of slices of parameters that it cuts into parts of different lengths."""
    found: dict[str, set[int]] = {}
    for p in parameters:
        for axis, dim in p.spec.shard_dims().items():
            length, parts = p.full_shape[dim], sizes.get(axis, 1)
            if length % parts:
                step = -(-length // parts)
                found.setdefault(axis, set()).update(
                    min((i + 1) * step, length) - min(i * step, length) for i in range(parts)
                )
    return {axis: frozenset(lengths) for axis, lengths in found.items()}


def _numbers(array: Any) -> np.ndarray | None:
    if getattr(array, "ndim", 0) != 1:
        return None
    numbers = np.asarray(to_host(array))
    return numbers if numbers.dtype.kind in "iu" else None
