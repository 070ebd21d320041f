"""Weights that only rounding noise has moved.

The true gradient of a key's bias is zero: softmax does not see what it adds.  What a run computes there is rounding
noise, about 1e-17 of the other gradients, and other noise in every layout.  AdamW divides a gradient by its own size, so
it moves such a weight by noise times lr / eps, which is no noise any more beside a weight that is itself next to zero.
No layout is wrong there, and no other value depends on it.

So an element counts as noise if in every step so far its gradient was below 1e-12 of the largest of its tensor, or
below the floor of `debug.compare`, on one rank *and* in the layout.  There the weights may differ by a few times what
noise has moved them on one rank; everywhere else nothing changes.  A gradient of exactly zero is no noise (a token that
did not occur), nor is a weight that decays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from mpitrain.debug.compare import FLOAT64_TOLERANCE, FLOOR

NOISE = 1e-12  # of a tensor's largest gradient: a hundredth of what the comparison of gradients can see
MARGIN = 10.0  # of what noise moves: the largest of a few dozen random numbers against the largest of others

Tensors = Mapping[str, np.ndarray]


class Excused(NamedTuple):
    """How many weights were not held to the bound because they are noise, and how far they differ."""

    count: int
    error: float


class Noise:
    """What is known of one executor's run; fed with each step's full tensors."""

    def __init__(self) -> None:
        self._noisy: dict[str, np.ndarray] = {}
        self._alive: dict[str, np.ndarray] = {}  # where a gradient was not exactly zero
        self._before: dict[str, np.ndarray] = {}
        self._moved = 0.0

    def begin(self, weights: Tensors) -> None:
        """The weights of one rank before the first step."""
        self._before = dict(weights)

    def gradients(self, mine: Tensors, reference: Tensors, decaying: Collection[str]) -> None:
        """The gradients of a step; `decaying` names the parameters that decay."""
        largest = {name: float(np.abs(gradient).max(initial=0.0)) for name, gradient in reference.items()}
        floor = FLOAT64_TOLERANCE * FLOOR * max(largest.values(), default=0.0)
        for name, there in reference.items():
            here = mine.get(name)
            if here is None or here.shape != there.shape or name in decaying:
                here = np.full_like(there, np.nan)  # which is small nowhere
            level = max(floor, NOISE * largest[name])
            small, alive = (np.abs(here) <= level) & (np.abs(there) <= level), (here != 0) | (there != 0)
            self._noisy[name] = self._noisy.get(name, small) & small
            self._alive[name] = self._alive.get(name, alive) | alive

    def weights(self, mine: Tensors, reference: Tensors) -> tuple[dict[str, np.ndarray], Excused]:
        """The layout's weights after a step, with the reference's in place of those that are excused."""
        moves = [np.abs(reference[n] - self._before[n])[noisy] for n, noisy in self._noisy.items() if n in self._before]
        self._moved += max((float(move.max(initial=0.0)) for move in moves), default=0.0)
        self._before = dict(reference)
        judged, count, error = dict(mine), 0, 0.0
        for name, noisy in self._noisy.items():
            if noisy.any() and name in mine:
                gap = np.abs(mine[name] - reference[name])
                excused = noisy & self._alive[name] & (gap <= MARGIN * self._moved) & (gap > 0)
                judged[name] = np.where(excused, reference[name], mine[name])
                count += int(excused.sum())
                error = max(error, float(gap[excused].max(initial=0.0)))
        return judged, Excused(count, error)
