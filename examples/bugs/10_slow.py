"""Hunt 10: on four ranks it takes much longer than it should.

    mpirun -n 4 python examples/bugs/10_slow.py          (or: mpitrain local -n 4 examples/bugs/10_slow.py)

Each rank reads lines of text, and leaves out those that came before.
"""

from __future__ import annotations

import time

import numpy as np
from points import CLASSES, Points, spirals

from mpitrain import MLP, Executor, Mesh, Sgd, one_stage, with_update, world

LINES = (40, 40, 1500, 40)  # a step reads so many to find its points


def read(step: int, rank: int, ranks: int) -> Points:
    """This rank's points of a step."""
    lines = [f"{(step * 7919 + line) % 977} {line % 53}" for line in range(LINES[rank % len(LINES)])]
    kept: list[str] = []
    for line in lines:
        if line not in kept:
            kept.append(line)
    return spirals(step + len(kept) // 10**6, rank, ranks)


def main() -> None:
    """Train."""
    mesh = Mesh(world())
    model = MLP((2, 64, 64, CLASSES), mesh, seed=1, dtype=np.float64)
    executor = Executor(model, Sgd(model.parameters(), lr=0.1, momentum=0.9), mesh, with_update(one_stage(2)))
    began = time.perf_counter()
    for step in range(30):
        loss = executor.step(read(step, mesh.dp.rank, mesh.dp.size))
    if mesh.is_reporter:
        print(f"loss {loss:.4f}, {1000 * (time.perf_counter() - began) / 30:.1f} ms a step")


if __name__ == "__main__":
    main()
