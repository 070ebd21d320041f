"""Weights that rounding alone can move.

AdamW divides a gradient by its own size, and so does Adafactor, whose eps is the root of what it adds to squares.  Sums
in another order differ by some 1e-16 of the largest gradient G, so a weight with a small gradient g moves otherwise by

    lr * 1e-16 G / |g|            eps keeps it below lr * 1e-16 G / eps

which is more than 1e-10 lr as soon as |g| is below 1e-6 G: beyond the bound of a weight that started at zero and is
itself a few lr.  The purest case is a key's bias: its true gradient is zero, since softmax does not see what it adds,
and what is computed is rounding.  No layout is wrong there.

So such weights are held to a bound of their own: the sum over the steps of

    step * min(1e-6, 1e-14 G / |g|)      step: what the optimizer has moved the weight that it moved most

wherever that is a tenth of the bound of the tensor or more.  A gradient that was exactly zero adds nothing (a token
that did not occur), and weights that decay do not start at zero: they keep their bound.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from mpitrain.debug.compare import FLOAT64_TOLERANCE, FLOOR

ROUNDING = 1e-14  # of the largest gradient: a hundred roundings
MOST = 1e-6  # of a step: eps = 1e-8 lets AdamW make 1e-9 of it out of rounding where G is 0.1

Tensors = Mapping[str, np.ndarray]


class Moved(NamedTuple):
    """How many weights differ by more than the bound of their tensor and not by more than their own, and how far."""

    number: int
    error: float


class Noise:
    """What is known of one executor's run; fed with each step's full tensors."""

    def __init__(self) -> None:
        self._before: dict[str, np.ndarray] = {}
        self._shares: dict[str, np.ndarray] = {}  # of this step that rounding may make
        self._allowed: dict[str, np.ndarray] = {}

    def begin(self, weights: Tensors) -> None:
        """The weights of one rank before the first step."""
        self._before = dict(weights)

    def gradients(self, mine: Tensors, reference: Tensors, decaying: Collection[str]) -> None:
        """The gradients of a step; `decaying` names the parameters that decay."""
        largest = _largest(reference.values())
        self._shares = {}
        for name, there in reference.items():
            here = mine.get(name)
            if here is None or here.shape != there.shape or name in decaying:
                continue
            size = np.maximum(np.abs(here), np.abs(there))
            with np.errstate(divide="ignore", invalid="ignore"):
                share = np.minimum(MOST, ROUNDING * largest / size)
            self._shares[name] = np.where(size > 0, share, 0.0)  # also where it is NaN

    def weights(self, mine: Tensors, reference: Tensors) -> tuple[dict[str, np.ndarray], Moved]:
        """The layout's weights after a step, with the reference's in place of those that are within their own bound."""
        step = _largest(after - self._before[name] for name, after in reference.items())
        self._before = dict(reference)
        floor = FLOOR * _largest(reference.values())
        judged, number, error = dict(mine), 0, 0.0
        for name, share in self._shares.items():
            allowed = self._allowed[name] = self._allowed.get(name, 0.0) + step * share
            bound = FLOAT64_TOLERANCE * max(_largest([reference[name]]), floor)
            gap = np.abs(mine[name] - reference[name])
            within = (allowed >= bound / 10) & (gap <= allowed)
            judged[name] = np.where(within, reference[name], mine[name])
            beyond = within & (gap > bound)
            number += int(beyond.sum())
            error = max(error, float(gap[beyond].max(initial=0.0)))
        return judged, Moved(number, error)


def _largest(arrays: Iterable[np.ndarray]) -> float:
    return max((float(np.abs(array).max(initial=0.0)) for array in arrays), default=0.0)
