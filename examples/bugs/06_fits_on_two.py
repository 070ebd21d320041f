"""Hunt 6: on 2 ranks it works, on 4 it does not.

    mpitrain local -n 2 examples/bugs/06_fits_on_two.py
    mpitrain local -n 4 examples/bugs/06_fits_on_two.py

After training the ranks count together, row by row, which of their points are classified rightly.
"""

from __future__ import annotations

import numpy as np
from points import CLASSES, spirals

from mpitrain import MLP, Executor, Mesh, Sgd, one_stage, with_update, world

POINTS = 50


def main() -> None:
    """Train."""
    mesh = Mesh(world())
    model = MLP((2, 32, CLASSES), mesh, seed=1, dtype=np.float64)
    executor = Executor(model, Sgd(model.parameters(), lr=0.3, momentum=0.9), mesh, with_update(one_stage(1)))
    for step in range(30):
        executor.step(spirals(step, mesh.dp.rank, mesh.dp.size, POINTS))
    points = spirals(999, mesh.dp.rank, mesh.dp.size, POINTS)
    is_right = model.logits(points.inputs).data.argmax(axis=1) == points.targets
    right = mesh.dp.all_reduce(is_right.astype(np.int64)).sum()
    if mesh.is_reporter:
        print(f"{right} of {POINTS} points are classified rightly")


if __name__ == "__main__":
    main()
