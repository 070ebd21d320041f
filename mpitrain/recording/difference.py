"""How two arrays of one shape and dtype differ, or two texts, in a few words."""

from __future__ import annotations

from typing import Any

import numpy as np


def same(a: Any, b: Any) -> bool:
    """Whether two arrays of the host have the same dtype, shape and bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(np.array_equal(_bytes(a), _bytes(b)))


def difference(now: Any, before: Any) -> str:
    """Of two arrays that are not the same: `max |d| 3.1e-05 at [12, 7], in 3 of 4,096 elements`."""
    odd = np.any((_bytes(now) != _bytes(before)).reshape(now.size, -1), axis=1)
    kind = np.complex128 if now.dtype.kind == "c" else np.float64
    a, b = (array.astype(kind).reshape(-1) for array in (now, before))
    with np.errstate(invalid="ignore", over="ignore"):
        distances = np.where(odd, np.abs(a - b), -1.0)
    many = f"in {int(odd.sum()):,} of {now.size:,} elements"
    strange = odd & ~np.isfinite(distances)
    if strange.any():
        place = int(np.argmax(strange))
        return f"{_shown(a[place])} in the place of {_shown(b[place])} at {_index(place, now.shape)}, {many}"
    place = int(np.argmax(distances))
    return f"max |d| {distances[place]:.3g} at {_index(place, now.shape)}, {many}"


def parted(now: str, before: str, most: int) -> tuple[str, str]:
    """Of two long texts the parts, of at most so many characters each, around the first place where they differ."""
    pairs = enumerate(zip(now, before, strict=False))
    place = next((index for index, (a, b) in pairs if a != b), min(len(now), len(before)))
    start = 0 if place < most // 2 else place - most // 3
    dots = "..." if start else ""
    return dots + now[start : start + most - len(dots)], dots + before[start : start + most - len(dots)]


def _bytes(array: Any) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _index(place: int, shape: tuple[int, ...]) -> list[int]:
    return [int(index) for index in np.unravel_index(place, shape)] if shape else []


def _shown(number: Any) -> str:
    return f"{number:.6g}"
