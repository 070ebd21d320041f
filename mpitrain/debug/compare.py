"""When two runs count as equal: one function, used by every proof that a layout is the same training run.

    |a - b| <= tolerance * max(largest element of that tensor, 1e-6 * largest element over all tensors of that kind)

The first term asks for digits relative to the tensor, not to each element, since sums cancel.  The second is a floor
for tensors whose true value is zero (the gradient of a key's bias), where only the noise of the others is left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from mpitrain.backend import Array, to_host

FLOAT64_TOLERANCE = 1e-10
FLOOR = 1e-6
SAME_FACTOR = 1e-9  # of the largest element: how far elements may be from one common factor


class Difference(NamedTuple):
    """How far one tensor is from its reference.

    error: largest |a - b|; bound: what is allowed; at: where the error is; ratio: a / b there; why: where the bound
    comes from; factor: the one number by which all of b became a (2.0 says "doubled"), NaN where there is none or the
    two are equal.
    """

    name: str
    error: float
    bound: float
    at: tuple[int, ...]
    ratio: float
    why: str = ""
    factor: float = math.nan

    @property
    def ok(self) -> bool:
        """Whether the two count as equal (a NaN never does)."""
        return self.error <= self.bound

    @property
    def share(self) -> float:
        """The error in units of its bound: above 1 it is too large.  Infinite for a NaN, which sorts first."""
        if math.isnan(self.error) or math.isnan(self.bound):
            return math.inf
        return self.error / self.bound if self.bound else (math.inf if self.error else 0.0)

    def __str__(self) -> str:
        sign = "ok " if self.ok else "BAD"
        return f"{sign} {self.name}: |difference| {self.error:.3e}, allowed {self.bound:.3e}, ratio {self.ratio:.6g}"


def compare(
    mine: Mapping[str, Array],
    reference: Mapping[str, Array],
    tolerance: float = FLOAT64_TOLERANCE,
    kind: str = "tensor",
) -> list[Difference]:
    """Compare tensors of one kind (all gradients, all weights ...) with their references, on the host.

    Args:
        mine: what is judged.
        reference: what it should be.
        tolerance: of the rule above.
        kind: what the tensors are, for `Difference.why`.

    Returns:
        One difference a tensor, the worst in units of its bound first.

    Raises:
        ValueError: the two do not hold the same names and shapes.
    """
    if set(mine) != set(reference):
        raise ValueError(f"only one side has {sorted(set(mine) ^ set(reference))}")
    mine, reference = ({name: to_host(array) for name, array in side.items()} for side in (mine, reference))
    largest = max((_largest(array) for array in reference.values()), default=0.0)
    found = [_difference(name, mine[name], reference[name], tolerance, largest, kind) for name in reference]
    return sorted(found, key=lambda d: (d.ok, -d.share))


def _difference(
    name: str, a: np.ndarray, b: np.ndarray, tolerance: float, largest_of_all: float, kind: str
) -> Difference:
    if a.shape != b.shape:
        raise ValueError(f"{name} is {a.shape} on one side, {b.shape} on the other")
    largest, floor = _largest(b), FLOOR * largest_of_all
    bound = tolerance * max(largest, floor)
    why = f"{tolerance:g} x {largest:.2g}, its largest element"
    if largest < floor:
        why = f"{tolerance:g} x {FLOOR:g} x {largest_of_all:.2g}, the largest {kind} of all: its own are noise"
    if not a.size:
        return Difference(name, 0.0, bound, (), 1.0, why)
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(a - b)
    at = tuple(int(i) for i in np.unravel_index(int(np.nan_to_num(gap, nan=np.inf).argmax()), gap.shape))
    value, other, error = float(a[at]), float(b[at]), float(gap[at])
    factor = math.nan if error <= bound else _factor(a, b)
    return Difference(name, error, bound, at, value / other if other else math.nan, why, factor)


def _factor(a: np.ndarray, b: np.ndarray) -> float:
    """The number f with a = f b everywhere; NaN where there is none."""
    with np.errstate(all="ignore"):
        weight = float(np.vdot(b, b))
        factor = float(np.vdot(a, b)) / weight if weight else math.nan
        far = float(np.abs(a - factor * b).max())
        return factor if far <= SAME_FACTOR * max(_largest(a), _largest(b)) else math.nan


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array).max()) if np.size(array) else 0.0
