"""When two runs count as equal: one function, used by every proof that a layout is the same training run.

    |a - b| <= tolerance * max(largest element of that tensor, 1e-6 * largest element over all tensors of that kind)

The first term asks for digits relative to the tensor, not to each element, since sums cancel.  The second is a floor
for tensors whose true value is zero (the gradient of a key's bias), where only the noise of the others is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from mpitrain.backend import Array, to_host

FLOAT64_TOLERANCE = 1e-10
FLOOR = 1e-6


class Difference(NamedTuple):
    """How far one tensor is from its reference.

    error: largest |a - b|; bound: what is allowed; at: where the error is; ratio: a / b there (2.0 says "doubled").
    """

    name: str
    error: float
    bound: float
    at: tuple[int, ...]
    ratio: float

    @property
    def ok(self) -> bool:
        """Whether the two count as equal (a NaN never does)."""
        return self.error <= self.bound

    def __str__(self) -> str:
        sign = "ok " if self.ok else "BAD"
        return f"{sign} {self.name}: |difference| {self.error:.3e}, allowed {self.bound:.3e}, ratio {self.ratio:.6g}"


def compare(
    mine: Mapping[str, Array], reference: Mapping[str, Array], tolerance: float = FLOAT64_TOLERANCE
) -> list[Difference]:
    """Compare tensors of one kind (all gradients, all weights ...) with their references, on the host.

    Returns:
        One difference a tensor, the worst in units of its bound first.

    Raises:
        ValueError: the two do not hold the same names and shapes.
    """
    if set(mine) != set(reference):
        raise ValueError(f"only one side has {sorted(set(mine) ^ set(reference))}")
    mine, reference = ({name: to_host(array) for name, array in side.items()} for side in (mine, reference))
    floor = FLOOR * max((_largest(array) for array in reference.values()), default=0.0)
    found = [_difference(name, mine[name], reference[name], tolerance, floor) for name in reference]
    return sorted(found, key=lambda d: (d.ok, -(d.error / d.bound if d.bound else d.error)))


def _difference(name: str, a: np.ndarray, b: np.ndarray, tolerance: float, floor: float) -> Difference:
    if a.shape != b.shape:
        raise ValueError(f"{name} is {a.shape} on one side, {b.shape} on the other")
    bound = tolerance * max(_largest(b), floor)
    if not a.size:
        return Difference(name, 0.0, bound, (), 1.0)
    gap = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))
    where = int(np.nan_to_num(gap, nan=np.inf).argmax())
    at = tuple(int(i) for i in np.unravel_index(where, gap.shape))
    other = float(np.asarray(b).reshape(-1)[where])
    value = float(np.asarray(a).reshape(-1)[where])
    return Difference(name, float(gap[at]), bound, at, value / other if other else float("nan"))


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array).max()) if np.size(array) else 0.0
