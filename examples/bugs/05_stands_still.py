"""Hunt 5: it learns, but much less than it should.

    mpitrain local -n 2 examples/bugs/05_stands_still.py          loss 0.4701 after 60 steps, 0.03 was expected

The second matrix is used transposed; it was transposed once, when the model was made, and not in every step.
"""

from __future__ import annotations

import numpy as np
from points import CLASSES, Points, spirals

from mpitrain import Executor, Mesh, Module, Parameter, Sgd, Tensor, one_stage, with_update, world
from mpitrain.autograd.ops import gelu_tanh, linear
from mpitrain.nn import init
from mpitrain.nn.layers import Linear
from mpitrain.nn.loss import cross_entropy


class Net(Module):
    """Two layers, the second of which keeps its matrix as (out, in)."""

    def __init__(self, width: int) -> None:
        super().__init__("net")
        self.up = Linear("up", 2, width, init=init.fan_in())
        self.down = Parameter("down", (CLASSES, width), init=init.fan_in(1))

    def prepare(self) -> None:
        """Lay the second matrix out for the product."""
        self.turned = Tensor(np.ascontiguousarray(self.down.data.T))

    def forward(self, batch: Points) -> Tensor:
        hidden = gelu_tanh(self.up(Tensor(batch.inputs)))
        return cross_entropy(linear(hidden, self.turned), batch.targets)


def main() -> None:
    """Train."""
    mesh = Mesh(world())
    model = Net(32)
    model.materialize(mesh, seed=1, dtype=np.float64)
    model.prepare()
    executor = Executor(model, Sgd(model.parameters(), lr=0.3, momentum=0.9), mesh, with_update(one_stage(1)))
    for step in range(60):
        loss = executor.step(spirals(step, mesh.dp.rank, mesh.dp.size))
    if mesh.is_reporter:
        print(f"loss {loss:.4f} after 60 steps")


if __name__ == "__main__":
    main()
