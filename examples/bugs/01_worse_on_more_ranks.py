"""Hunt 1: cut over four ranks it learns, but something else than on one.

    mpitrain local -n 1 examples/bugs/01_worse_on_more_ranks.py       loss 0.3870 after 40 steps
    mpitrain local -n 4 examples/bugs/01_worse_on_more_ranks.py       loss 0.3788, and it should be the same

The hidden units are cut over tensor-parallel ranks.
"""

from __future__ import annotations

import numpy as np
from points import CLASSES, Points, spirals

from mpitrain import Executor, Mesh, Module, Parameter, Sgd, Shard, Tensor, one_stage, with_update, world
from mpitrain.autograd.ops import gelu_tanh, linear
from mpitrain.collectives import all_reduce, copy
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
        self.down_bias = Parameter("down_bias", (CLASSES,), init=init.normal(0.5))

    def forward(self, batch: Points) -> Tensor:
        x = copy(Tensor(batch.inputs), self.tp)
        hidden = gelu_tanh(linear(x, self.up, self.up_bias))
        logits = all_reduce(linear(hidden, self.down, self.down_bias), self.tp)
        return cross_entropy(logits, batch.targets)


def main() -> None:
    """Train."""
    mesh = Mesh(world(), tp=world().size)
    model = Net(2, 16, mesh.tp)
    model.materialize(mesh, seed=1, dtype=np.float64)
    executor = Executor(model, Sgd(model.parameters(), lr=0.5), mesh, with_update(one_stage(1)))
    for step in range(40):
        loss = executor.step(spirals(step))
    if mesh.is_reporter:
        print(f"loss {loss:.4f} after 40 steps")


if __name__ == "__main__":
    main()
