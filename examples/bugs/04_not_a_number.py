"""Hunt 4: after a few steps the loss is not a number.

    mpitrain local -n 4 examples/bugs/04_not_a_number.py

Four ranks share the batch; the last of three blocks has a norm of its own.
"""

from __future__ import annotations

import numpy as np
from points import CLASSES, Points, spirals

from mpitrain import Executor, Mesh, Module, Sgd, Tensor, one_stage, with_update, world
from mpitrain.autograd.ops import mean, relu, sqrt
from mpitrain.nn import init
from mpitrain.nn.layers import Linear
from mpitrain.nn.loss import cross_entropy

ODD_STEP, ODD_PLACE = 5, 3  # a point of this batch that was measured at the origin


class Scale(Module):
    """x by its root mean square."""

    def forward(self, x: Tensor) -> Tensor:
        return x / sqrt(mean(x * x, dim=-1, keepdims=True))


class Net(Module):
    """Three blocks and a head."""

    def __init__(self, width: int) -> None:
        super().__init__("net")
        sizes = [2, width, width, width]
        self.blocks = [Linear(f"blocks.{i}", sizes[i], sizes[i + 1], bias=False, init=init.fan_in()) for i in range(3)]
        self.scale = Scale("blocks.2.scale")
        self.head = Linear("head", width, CLASSES, init=init.fan_in())

    def forward(self, batch: Points) -> Tensor:
        x = Tensor(batch.inputs)
        for block in self.blocks:
            x = relu(block(x))
        return cross_entropy(self.head(self.scale(x)), batch.targets)


def read(step: int, rank: int, ranks: int) -> Points:
    """This rank's points."""
    points = spirals(step)
    if step == ODD_STEP:
        points.inputs[ODD_PLACE] = 0.0
    return points.take(slice(rank, None, ranks))


def main() -> None:
    """Train."""
    mesh = Mesh(world())
    model = Net(16)
    model.materialize(mesh, seed=1, dtype=np.float64)
    executor = Executor(model, Sgd(model.parameters(), lr=0.1), mesh, with_update(one_stage(1)))
    for step in range(20):
        loss = executor.step(read(step, mesh.dp.rank, mesh.dp.size))
    if mesh.is_reporter:
        print(f"loss {loss:.4f} after 20 steps")


if __name__ == "__main__":
    main()
