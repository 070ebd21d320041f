"""Hunt 3: it stands still at once.

    mpitrain local -n 4 examples/bugs/03_nobody_goes_on.py

Each rank has a stretch of a signal, smooths it, and needs the last value of its left neighbour for that.
"""

from __future__ import annotations

import numpy as np

from mpitrain import Communicator, Mesh, world


def smooth(stretch: np.ndarray, ring: Communicator) -> np.ndarray:
    """Each value with the one before it, around the ring."""
    before = np.empty(1)
    ring.send(stretch[-1:], dest=(ring.rank + 1) % ring.size)
    ring.recv((1,), np.float64, source=(ring.rank - 1) % ring.size, out=before)
    return (stretch + np.concatenate([before, stretch[:-1]])) / 2


def main() -> None:
    """Smooth three times."""
    mesh = Mesh(world())
    stretch = np.arange(8.0) + 8 * mesh.dp.rank
    for _ in range(3):
        stretch = smooth(stretch, mesh.dp)
    print(f"rank {mesh.dp.rank}: {stretch}")


if __name__ == "__main__":
    main()
