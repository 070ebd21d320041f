"""`mpitrain checkpoint diff`: what two checkpoints hold that is not the same.

Tensors are read side by side a few megabytes at a time, whatever files and layouts they lie in.  Of each there is said

    how many elements have other bits     two NaN of the same bits are the same, 0.0 and -0.0 are not
    the largest difference                of the values, and where it is

and, with a tolerance, whether the largest difference is at most `tolerance * max(largest element of the tensor in B,
1e-6 * largest element of all tensors of its kind in B)`, the rule by which layouts are compared everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpitrain.checkpoint.manifest import Logical
from mpitrain.checkpoint.tools.source import Source, chosen, cut, kind_of
from mpitrain.config import OPTIONS

FLOOR = 1e-6
"""Of the largest element of all tensors of a kind: those far smaller are noise."""
AT_ONCE = 1 << 20
"""Elements of a tensor that are compared at once."""
UNCOUNTED = frozenset("config." + name for name in "run resume stop_after faults pp dp cp tp ep".split())
"""Settings that say where a run is and on which ranks: other ones do not make it another run."""


class Other(NamedTuple):
    """A number or setting that is not the same in both; None: it is only in the other one."""

    name: str
    a: Any
    b: Any

    @property
    def counts(self) -> bool:
        """Whether the two are different because of it."""
        return self.name not in UNCOUNTED


@dataclass(frozen=True)
class Compared:
    """A tensor that both have, of the same shape.

    Attributes:
        name: of the tensor.
        dtypes: in A and in B.
        elements: how many it has.
        other: of them, with other bits.
        error: the largest difference of two values; NaN where one of them is NaN.
        at: where that is.
        a, b: the values there.
        largest: the largest absolute value in B.
    """

    name: str
    dtypes: tuple[str, str]
    elements: int
    other: int
    error: float
    at: tuple[int, ...]
    a: Any
    b: Any
    largest: float

    @property
    def share(self) -> float:
        """The difference in units of the largest value; infinite of a NaN, or where that is zero."""
        if math.isnan(self.error) or (self.error and not self.largest):
            return math.inf
        return self.error / self.largest if self.error else 0.0

    @property
    def same_bits(self) -> bool:
        """Whether both have the same dtype and the same bits."""
        return self.dtypes[0] == self.dtypes[1] and not self.other


@dataclass(frozen=True)
class Comparison:
    """What was found.

    Attributes:
        only_a, only_b: names of tensors that only one has.
        shapes: name -> the two shapes, where they differ.
        tensors: those that could be compared, in the order of A.
        others: numbers and settings that differ.
        tolerance: None: the same is what has the same bits.
    """

    only_a: list[str]
    only_b: list[str]
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    tensors: list[Compared]
    others: list[Other]
    tolerance: float | None

    def bounds(self) -> dict[str, float]:
        """How much each tensor may differ; by name."""
        largest: dict[str, float] = {}
        for t in self.tensors:
            largest[kind_of(t.name)] = max(largest.get(kind_of(t.name), 0.0), _finite(t.largest))
        factor = self.tolerance or 0.0
        return {t.name: factor * max(_finite(t.largest), FLOOR * largest[kind_of(t.name)]) for t in self.tensors}

    def differing(self) -> list[Compared]:
        """Tensors that are not the same, the worst first: by what is allowed, or by their largest element."""
        bounds = self.bounds()

        def same(t: Compared) -> bool:
            allowed = self.tolerance is not None and t.dtypes[0] == t.dtypes[1] and t.error <= bounds[t.name]
            return t.same_bits or allowed

        def badness(t: Compared) -> float:
            bound = bounds[t.name]
            return t.error / bound if bound and math.isfinite(t.error) else t.share

        return sorted((t for t in self.tensors if not same(t)), key=badness, reverse=True)

    @property
    def same(self) -> bool:
        """Whether the two hold the same."""
        apart = self.only_a or self.only_b or self.shapes or any(other.counts for other in self.others)
        return not apart and not self.differing()


def compare(
    a: Source,
    b: Source,
    patterns: Sequence[str] = (),
    tolerance: float | None = None,
    told: Callable[[int], None] = lambda nbytes: None,
) -> Comparison:
    """Compare two checkpoints.

    Args:
        a, b: the two.
        patterns: of names of tensors; only these are compared, and no settings.
        tolerance: see this file's first lines.
        told: called with the number of bytes that were read of both.

    Raises:
        CheckpointError: a pattern matches no tensor of either, or something cannot be read; `CheckpointDamaged` says
            what is not what was written.

    Cost: memory for a few copies of `AT_ONCE` elements in float64.
    """
    both = {**a.manifest.tensors, **b.manifest.tensors}
    names = chosen(both, patterns, f"{a} or {b}")
    mine, theirs = ({n: s.manifest.tensors[n] for n in names if n in s.manifest.tensors} for s in (a, b))
    common = [name for name in mine if name in theirs]
    shapes = {n: (mine[n].shape, theirs[n].shape) for n in common if mine[n].shape != theirs[n].shape}
    tensors = [_tensor(n, a, b, mine[n], theirs[n], told) for n in common if n not in shapes]
    return Comparison(
        [name for name in mine if name not in theirs],
        [name for name in theirs if name not in mine],
        shapes,
        tensors,
        [] if patterns else others(_numbers(a), _numbers(b)),
        tolerance,
    )


def others(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[Other]:
    """Values of two JSON objects that differ, by their path: `config.lr`."""
    found: list[Other] = []
    for key in {**a, **b}:
        name, mine, theirs = f"{prefix}{key}", a.get(key), b.get(key)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            found += others(mine, theirs, f"{name}.")
        elif mine != theirs or (key in a) != (key in b):
            found.append(Other(name, mine, theirs))
    return found


def nbytes_to_read(a: Source, b: Source, patterns: Sequence[str]) -> int:
    """Bytes that a comparison will read, about."""
    names = chosen({**a.manifest.tensors, **b.manifest.tensors}, patterns, f"{a} or {b}")
    tensors = [s.manifest.tensors[name] for s in (a, b) for name in names if name in s.manifest.tensors]
    return sum(math.prod(t.shape) * np.dtype(t.dtype).itemsize for t in tensors)


def _numbers(source: Source) -> dict[str, Any]:
    """Step and scalars; settings that an earlier version did not know are what they would be if nobody gave them."""
    numbers = {"step": source.manifest.step, **source.manifest.scalars}
    if isinstance(config := numbers.get("config"), dict):
        numbers["config"] = {**{name: option.default for name, option in OPTIONS.items()}, **config}
    return numbers


class _Worst(NamedTuple):
    """The largest difference so far: see `Compared`."""

    error: float = 0.0
    at: tuple[int, ...] = ()
    a: Any = None
    b: Any = None


def _tensor(name: str, a: Source, b: Source, of_a: Logical, of_b: Logical, told: Callable[[int], None]) -> Compared:
    """Compare a tensor, a piece at a time."""
    other, largest, worst = 0, 0.0, _Worst()
    for rectangle in cut(of_a.shape, AT_ONCE):
        mine, theirs = a.read(name, rectangle), b.read(name, rectangle)
        told(mine.nbytes + theirs.nbytes)
        largest = max(largest, _largest(theirs))
        apart = _other_bits(mine, theirs)
        number = int(np.count_nonzero(apart))
        if number:
            error, index = _worst(mine, theirs, apart)
            worse = not other or not (math.isnan(worst.error) or error <= worst.error)  # nothing is worse than NaN
            if worse:
                at = tuple(part.start + i for part, i in zip(rectangle, index, strict=True))
                worst = _Worst(error, at, mine[index].item(), theirs[index].item())
            other += number
    return Compared(name, (of_a.dtype, of_b.dtype), math.prod(of_a.shape), other, *worst, largest)


def _other_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which elements have other bits; of two dtypes, other values."""
    if a.dtype != b.dtype:
        return ~_same_values(a, b)
    bits = f"u{a.dtype.itemsize}"
    apart: np.ndarray = np.asarray(a.view(bits) != b.view(bits))
    return apart


def _same_values(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    same: np.ndarray = np.asarray((a == b) | ((a != a) & (b != b)))
    return same


def _worst(a: np.ndarray, b: np.ndarray, apart: np.ndarray) -> tuple[float, tuple[int, ...]]:
    """The largest difference of two values, and where; a NaN against a number is the worst there can be."""
    shape, a, b = a.shape, a.reshape(-1), b.reshape(-1)
    if a.dtype == b.dtype and a.dtype.kind in "iu":
        bits = f"u{a.dtype.itemsize}"
        gap = np.maximum(a, b).view(bits) - np.minimum(a, b).view(bits)  # exact, as no difference of floats would be
    else:
        with np.errstate(all="ignore"):
            gap = np.abs(a.astype(np.float64) - b.astype(np.float64))
        gap = np.where(_same_values(a, b), 0.0, gap)  # two infinities of one sign
    place = int(gap.argmax())  # the first NaN, if there is one
    if not gap[place]:
        place = int(apart.argmax())  # values are the same, bits are not: 0.0 and -0.0
    return float(gap[place]), tuple(int(i) for i in np.unravel_index(place, shape))


def _largest(array: np.ndarray) -> float:
    if not array.size:
        return 0.0
    with np.errstate(all="ignore"):
        return float(np.fmax.reduce(np.abs(array.astype(np.float64, copy=False)), axis=None))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
