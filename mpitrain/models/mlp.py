"""A multi-layer perceptron that classifies: the smallest model that trains on every layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import to_device
from mpitrain.comm.mesh import Mesh
from mpitrain.nn import init as initial
from mpitrain.nn.layers import Gelu, Linear
from mpitrain.nn.loss import cross_entropy
from mpitrain.nn.module import Module
from mpitrain.parallel.tensor import ColumnLinear, RowLinear


class MLP(Module):
    """Blocks of column-parallel, GELU, row-parallel, then a head.

    Args:
        sizes: features in, hidden width of each block, classes; (64, 128, 10) is one hidden block.  A block keeps the
            width of its input.
        mesh: the layout; the model is the same on every one.
        seed: of the initial values.
        dtype: of weights, activations and gradients.
        xp: where they live: numpy, or cupy for this rank's device.

    `model(batch)`: batch.inputs (b, in), batch.targets (b,) class numbers, IGNORE for rows that do not count; returns
    the sum of the cross-entropy over the valid rows.  A batch from the host goes to where the weights are.
    """

    def __init__(
        self, sizes: Sequence[int], mesh: Mesh, *, seed: int = 0, dtype: Any = np.float32, xp: Any = np
    ) -> None:
        super().__init__("mlp")
        first, *hidden, last = sizes
        self.ups = [ColumnLinear(f"blocks.{i}.up", first, width, mesh.tp) for i, width in enumerate(hidden)]
        self.downs = [RowLinear(f"blocks.{i}.down", width, first, mesh.tp) for i, width in enumerate(hidden)]
        self.gelu = Gelu("tanh")
        self.head = Linear("head", first, last, init=initial.fan_in())
        self.materialize(mesh, seed, dtype, xp)

    def logits(self, inputs: Any) -> Tensor:
        """Scores of the classes.  inputs (b, in) -> (b, classes)."""
        x = inputs if isinstance(inputs, Tensor) else Tensor(to_device(inputs, like=self.head.weight.data))
        for up, down in zip(self.ups, self.downs, strict=True):
            x = down(self.gelu(up(x, add_bias=False), up.bias))
        return self.head(x)

    def forward(self, batch: Any) -> Tensor:
        targets = to_device(batch.targets, like=self.head.weight.data)
        return cross_entropy(self.logits(batch.inputs), targets)
