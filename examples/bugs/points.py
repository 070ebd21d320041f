"""What the hunts have in common: a batch of points in three spirals, and a step's share of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CLASSES, BATCH = 3, 48


@dataclass(frozen=True)
class Points:
    """A batch: what the executor needs is how to cut it, and how many of its targets count."""

    inputs: np.ndarray  # (b, 2)
    targets: np.ndarray  # (b,)

    @property
    def count(self) -> int:
        return len(self.targets)

    def split(self, num_microbatches: int) -> list[Points]:
        return [self.take(piece) for piece in np.array_split(np.arange(self.count), num_microbatches)]

    def take(self, rows: np.ndarray | slice) -> Points:
        return Points(self.inputs[rows], self.targets[rows])


def spirals(step: int, rank: int = 0, ranks: int = 1, batch: int = BATCH) -> Points:
    """A rank's share of the batch of a step, which is a pure function of its number: every n-th point."""
    random = np.random.default_rng(step)
    targets = random.integers(CLASSES, size=batch)
    radius = random.uniform(0.1, 1.0, size=batch)
    angle = 4.0 * radius + 2 * np.pi * targets / CLASSES + random.normal(0.0, 0.1, size=batch)
    inputs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1) * 3
    return Points(inputs, targets).take(slice(rank, None, ranks))
