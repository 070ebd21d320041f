"""Hunt 2: in a pipeline of two stages it learns nothing, on one rank it does.

    mpitrain local -n 1 examples/bugs/02_learns_nothing.py        loss 0.1493 after 60 steps
    mpitrain local -n 2 examples/bugs/02_learns_nothing.py        loss 1.0932: as good as guessing

The points of a batch are shuffled before they are cut into micro-batches, so that none has all of one class.
"""

from __future__ import annotations

import numpy as np
from points import CLASSES, Points, spirals

from mpitrain import MLP, Executor, Mesh, Sgd, complete, world


class Mixed(Points):
    """Points that are cut into micro-batches in a random order."""

    def split(self, num_microbatches: int) -> list[Points]:
        order = np.random.default_rng(world().rank).permutation(self.count)
        return [self.take(piece) for piece in np.array_split(order, num_microbatches)]


def main() -> None:
    """Train."""
    mesh = Mesh(world(), pp=world().size)
    model = MLP((2, 32, 32, CLASSES), mesh, seed=1, dtype=np.float64)
    rows = complete("1f1b", ranks=mesh.pp.size, microbatches=4)
    executor = Executor(model, Sgd(model.parameters(), lr=0.1, momentum=0.9), mesh, rows)
    for step in range(60):
        points = spirals(step)
        loss = executor.step(Mixed(points.inputs, points.targets))
    if mesh.is_reporter:
        print(f"loss {loss:.4f} after 60 steps")


if __name__ == "__main__":
    main()
