"""Hunt 7: it trains well, and does not end well.

    mpitrain local -n 4 examples/bugs/07_the_last_batch.py

Each rank reads a file of its own, in batches of 8 points.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from points import CLASSES, Points, spirals

from mpitrain import MLP, Executor, Mesh, Sgd, one_stage, with_update, world

LINES = (64, 61, 63, 56)  # in the four files


def batches(rank: int) -> Iterator[Points]:
    """The points of this rank's file, 8 at a time."""
    lines = LINES[rank % len(LINES)]
    points = spirals(rank, batch=lines)
    for start in range(0, lines, 8):
        yield points.take(slice(start, start + 8))


def main() -> None:
    """Train."""
    mesh = Mesh(world())
    model = MLP((2, 32, CLASSES), mesh, seed=1, dtype=np.float64)
    executor = Executor(model, Sgd(model.parameters(), lr=0.3, momentum=0.9), mesh, with_update(one_stage(1)))
    for batch in batches(mesh.dp.rank):
        loss = executor.step(batch)
    loss = executor.evaluate([spirals(999, mesh.dp.rank, mesh.dp.size)])
    if mesh.is_reporter:
        print(f"loss {loss:.4f}")


if __name__ == "__main__":
    main()
