"""The script of docs/tutorials/your-first-distributed-bug.md: on one rank it works, on four it does not.

    mpitrain local -n 1 examples/bugs/00_first.py
    mpitrain local -n 4 examples/bugs/00_first.py

Two ranks share the hidden units, and two such pairs share the points of a batch.
"""

from __future__ import annotations

import numpy as np
from points import CLASSES, Points, spirals

from mpitrain import Executor, Mesh, Module, Parameter, Sgd, Shard, Tensor, one_stage, with_update, world
from mpitrain.autograd.ops import gelu_tanh, linear
from mpitrain.collectives import copy
from mpitrain.comm.communicator import Communicator
from mpitrain.nn import init
from mpitrain.nn.loss import cross_entropy


class Net(Module):
    """Two matrices: the columns of the first and the rows of the second are cut over the axis."""

    def __init__(self, width: int, hidden: int, tp: Communicator) -> None:
        super().__init__("net")
        self.tp = tp
        self.up = Parameter("up", (width, hidden), {"tp": Shard(1)}, init=init.fan_in())
        self.up_bias = Parameter("up_bias", (hidden,), {"tp": Shard(0)}, init=init.normal(0.5))
        self.down = Parameter("down", (hidden, CLASSES), {"tp": Shard(0)}, init=init.fan_in())

    def logits(self, inputs: np.ndarray) -> Tensor:
        """(b, 2) -> (b, classes)."""
        x = copy(Tensor(inputs), self.tp)
        hidden = gelu_tanh(linear(x, self.up, self.up_bias))
        return linear(hidden, self.down)

    def forward(self, batch: Points) -> Tensor:
        return cross_entropy(self.logits(batch.inputs), batch.targets)


def main() -> None:
    """Train, and count how many points are classified rightly."""
    mesh = Mesh(world(), tp=2 if world().size > 1 else 1)
    model = Net(2, 32, mesh.tp)
    model.materialize(mesh, seed=1, dtype=np.float64)
    executor = Executor(model, Sgd(model.parameters(), lr=0.5, momentum=0.9), mesh, with_update(one_stage(1)))
    for step in range(40):
        loss = executor.step(spirals(step, mesh.dp.rank, mesh.dp.size))
        if mesh.is_reporter and step % 10 == 9:
            print(f"step {step + 1}  loss {loss:.4f}")
    points = spirals(999, mesh.dp.rank, mesh.dp.size)
    right = np.array((model.logits(points.inputs).data.argmax(axis=1) == points.targets).sum())
    if mesh.is_reporter:
        right = mesh.dp.all_reduce(right)
        print(f"{right} of 48 points are classified rightly")


if __name__ == "__main__":
    main()
