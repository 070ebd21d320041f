"""Hunt 8: the loss is a little different from that of one rank, and the more so the longer it runs.

    mpitrain local -n 1 examples/bugs/08_drifts_apart.py       loss 0.6161 after 40 steps
    mpitrain local -n 4 examples/bugs/08_drifts_apart.py       loss 0.5826

Weights of the first layer are kept within bounds.
"""

from __future__ import annotations

import numpy as np
from points import CLASSES, spirals

from mpitrain import MLP, Executor, Mesh, Sgd, one_stage, with_update, world

BOUND = 1.0


def main() -> None:
    """Train."""
    mesh = Mesh(world())
    model = MLP((2, 32, CLASSES), mesh, seed=1, dtype=np.float64)
    executor = Executor(model, Sgd(model.parameters(), lr=0.1, momentum=0.9), mesh, with_update(one_stage(1)))
    first = model.blocks[0].up.weight
    for step in range(40):
        loss = executor.step(spirals(step, mesh.dp.rank, mesh.dp.size))
        if mesh.is_reporter and step % 5 == 4:
            outside = int((abs(first.data) > BOUND).sum())
            np.clip(first.data, -BOUND, BOUND, out=first.data)
            print(f"step {step:2d}  loss {loss:.4f}  {outside} weights were out of bounds")


if __name__ == "__main__":
    main()
