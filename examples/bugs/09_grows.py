"""Hunt 9: the longer it runs, the more memory it needs.

    mpitrain local -n 2 examples/bugs/09_grows.py

A module keeps how active its units are on average, to print it at the end.
"""

from __future__ import annotations

import numpy as np
from points import CLASSES, Points, spirals

from mpitrain import Executor, Mesh, Module, Sgd, Tensor, one_stage, with_update, world
from mpitrain.autograd.ops import gelu_tanh
from mpitrain.nn import init
from mpitrain.nn.layers import Linear
from mpitrain.nn.loss import cross_entropy

BATCH = 512


class Net(Module):
    """Two layers."""

    def __init__(self, width: int) -> None:
        super().__init__("net")
        self.up = Linear("up", 2, width, init=init.fan_in())
        self.down = Linear("down", width, CLASSES, init=init.fan_in())
        self.activity: list[Tensor] = []

    def forward(self, batch: Points) -> Tensor:
        hidden = gelu_tanh(self.up(Tensor(batch.inputs)))
        self.activity.append(hidden)
        return cross_entropy(self.down(hidden), batch.targets)


def main() -> None:
    """Train."""
    mesh = Mesh(world())
    model = Net(256)
    model.materialize(mesh, seed=1, dtype=np.float64)
    executor = Executor(model, Sgd(model.parameters(), lr=0.1), mesh, with_update(one_stage(1)))
    for step in range(30):
        loss = executor.step(spirals(step, mesh.dp.rank, mesh.dp.size, BATCH))
    if mesh.is_reporter:
        activity = np.mean([each.data.mean() for each in model.activity])
        print(f"loss {loss:.4f}, mean activity {activity:.3f}")


if __name__ == "__main__":
    main()
