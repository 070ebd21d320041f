"""The bits of a kernel's result depend on its inputs, not on where in memory they lie.

A compiler may leave a vectorised loop for a plain one where arrays lie close together.  If the two round differently,
ranks that hold the same numbers get different ones, and replicas drift apart.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from kernel_calls import CALLS, arguments, call

from mpitrain import kernels

compiled = pytest.importorskip("mpitrain.kernels.compiled", reason="no kernels were compiled here")


class Arena:
    """Stands for NumPy where kernels make their results: everything lies side by side, results before or behind."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.memory = np.zeros(1 << 16, np.uint8)
        self.behind = self.before = len(self.memory) // 2

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, shape: Any, dtype: Any = np.float64) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        gap = self.dice.randrange(4) * 8
        if self.dice.random() < 0.5:
            start = self.behind + gap
            self.behind = start + -(-size // 8) * 8
        else:
            start = self.before = self.before - gap - -(-size // 8) * 8
        return self.memory[start : start + size].view(dtype).reshape(shape)

    def copy(self, x: np.ndarray) -> np.ndarray:
        found = self.empty(x.shape, x.dtype)
        found[...] = x
        return found


@pytest.mark.parametrize("level", kernels.levels()[1:])
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float", "double"])
@pytest.mark.parametrize("name", CALLS)
def test_the_place_of_arrays_does_not_show(name: str, dtype: Any, level: str, monkeypatch: Any) -> None:
    kernels.select(level)
    dice = random.Random(1)
    for width in (3, 8, 10, 12, 20, 40):
        given = arguments(name, dtype, 2, width)
        seen = set()
        for _ in range(60):
            arena = Arena(dice)
            monkeypatch.setattr(compiled, "np", arena)
            found = call(name, [arena.copy(x) for x in given])
            monkeypatch.undo()
            seen.add(b"".join(result.tobytes() for result in found))
        assert len(seen) == 1, f"width {width}: {len(seen)} different results"
