"""Lesson 3: data parallelism is one sum, and any number of ranks is the same training run.

    mpitrain local -n 4 examples/03_data_parallel.py          (or: mpirun -n 4 python examples/03_data_parallel.py)

An MLP learns to tell three spirals apart.  The batch of 50 points is divided over the ranks, evenly or not.  At the end
one rank trains again in a world of one and prints the largest difference of any weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.models.mlp import MLP
from mpitrain.optim import Sgd
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage

STEPS, BATCH, CLASSES = 120, 50, 3


@dataclass(frozen=True)
class Points:
    """A batch: what the executor needs is how to cut it, and how many of its targets count."""

    inputs: np.ndarray  # (b, 2)
    targets: np.ndarray  # (b,)

    @property
    def count(self) -> int:
        return len(self.targets)

    def split(self, num_microbatches: int) -> list[Points]:
        pieces = np.array_split(np.arange(self.count), num_microbatches)
        return [Points(self.inputs[piece], self.targets[piece]) for piece in pieces]


def spirals(step: int) -> Points:
    """The global batch of a step: a pure function of its number, so every rank knows it without a message."""
    random = np.random.default_rng(step)
    targets = random.integers(CLASSES, size=BATCH)
    radius = random.uniform(0.1, 1.0, size=BATCH)
    angle = 4.0 * radius + 2 * np.pi * targets / CLASSES + random.normal(0.0, 0.1, size=BATCH)
    return Points(np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1) * 3, targets)


def train() -> tuple[list[float], dict[str, np.ndarray], Mesh]:
    """Train on the ranks of the surrounding world; the losses, the final weights, and the layout."""
    mesh = Mesh(world())
    model = MLP((2, 32, 32, CLASSES), mesh, seed=1, dtype=np.float64)
    # F0 B0 F1 B1: two micro-batches, whose gradients add up before the one sum over the ranks.
    rows = with_update(one_stage(num_microbatches=2))
    executor = Executor(model, Sgd(model.parameters(), lr=0.02, momentum=0.9), mesh, rows)
    losses = []
    for step in range(STEPS):
        points = spirals(step)
        mine = slice(mesh.dp.rank, None, mesh.dp.size)  # this rank's share: every n-th point
        losses.append(executor.step(Points(points.inputs[mine], points.targets[mine])))
    return losses, {p.name: p.data.copy() for p in model.parameters()}, mesh


def main() -> float:
    """Train on all ranks, then on one; return the largest difference, relative to the largest weight."""
    losses, weights, mesh = train()
    if not mesh.is_reporter:
        return 0.0
    n = mesh.dp.size
    sizes = [len(range(rank, BATCH, n)) for rank in range(n)]
    print(f"{n} ranks, {sizes} points a step each")
    for step in range(0, STEPS, 20):
        print(f"    step {step:3d}  loss {losses[step]:.4f}")
    print(f"    step {STEPS - 1:3d}  loss {losses[-1]:.4f}\n")

    # The same function, in a world of one rank.
    [(serial_losses, serial_weights, _)] = LocalWorld(1).run(train)
    difference = max(float(np.abs(weights[name] - w).max() / np.abs(w).max()) for name, w in serial_weights.items())
    print(f"largest difference of a loss to the serial run:   {np.abs(np.subtract(losses, serial_losses)).max():.1e}")
    print(f"largest difference of a weight to the serial run: {difference:.1e} of the largest")
    assert difference < 1e-10, difference
    return difference


if __name__ == "__main__":
    main()
