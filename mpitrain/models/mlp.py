"""A multi-layer perceptron that classifies: the smallest model that trains on every layout.

    x = down(gelu(up(x)))      for each block
    loss = sum over rows of cross_entropy(head(x))

Hidden units are cut over tp, rows over dp, and the blocks are dealt out to the stages of a pipeline: between two of
them passes x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import to_device
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.mesh import Mesh
from mpitrain.models.classes import CORRECT, loss_of_classes
from mpitrain.nn import init as initial
from mpitrain.nn.layers import Gelu, Linear
from mpitrain.nn.materialize import Home
from mpitrain.nn.module import Boundary, Module
from mpitrain.parallel.stages import check_whole, stages_here
from mpitrain.parallel.tensor import ColumnLinear, RowLinear
from mpitrain.parallel.zero import gather_units
from mpitrain.parallel.zero.gather import PREFETCH
from mpitrain.pipeline.partition import Partition, balance
from mpitrain.spec import INVARIANT, Shard


class Block(Module):
    """Column-parallel, GELU, row-parallel: (b, width) -> (b, width), `hidden` units between."""

    def __init__(self, name: str, width: int, hidden: int, tp: Communicator) -> None:
        super().__init__(name)
        self.up = ColumnLinear(f"{name}.up", width, hidden, tp)
        self.gelu = Gelu("tanh")
        self.down = RowLinear(f"{name}.down", hidden, width, tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gelu(self.up(x, add_bias=False), self.up.bias))


class MLP(Module):
    """Blocks, then a head.

    Args:
        sizes: features in, hidden width of each block, classes; (64, 128, 10) is one hidden block.  A block keeps the
            width of its input.
        mesh: the layout; the model is the same on every one.
        partition: how many blocks each stage of a pipeline has, the head being on the last; None: as many each, as far
            as that goes.  Stage q is on rank q mod pp; there may be several a rank.
        seed: of the initial values.
        dtype: of weights, activations and gradients; inputs are turned into it.
        zero: stage of ZeRO: what ranks deal out that would all hold the same (mpitrain.parallel.zero).
        prefetch: stage 3: parts of the model whose weights are on their way while another one works.
        home: stage 3: where the parameters live, if not here (mpitrain.memory.home).
        freeze: patterns of parameters that nobody trains, as `Module.freeze` takes them.
        xp: where they live: numpy, or cupy for this rank's device.

    Raises:
        ShapeError: the partition has other blocks, or its stages do not divide over pp.

    `model(batch)`, where all stages are on this rank: batch.inputs (b, in), or images (b, ...) of as many numbers;
    batch.targets (b,) class numbers, IGNORE for rows that do not count; returns the sum of the cross-entropy over the
    valid rows.  A batch from the host goes to where the weights are.

    Steps report how many rows were classified rightly (`executor.report.counted["correct"]`); of other rows `accuracy`
    tells it (mpitrain.models.classes).
    """

    counted: ClassVar = {CORRECT: 1}

    def __init__(
        self,
        sizes: Sequence[int],
        mesh: Mesh,
        *,
        partition: Partition | None = None,
        seed: int = 0,
        dtype: Any = np.float32,
        zero: int = 0,
        prefetch: int = PREFETCH,
        home: Home | None = None,
        freeze: Sequence[str] = (),
        xp: Any = np,
    ) -> None:
        super().__init__("mlp")
        self.width, *hidden, classes = sizes
        self.partition = balance([1.0] * len(hidden), mesh.pp.size) if partition is None else partition
        self.num_stages = self.partition.stages
        self.stages = stages_here(self.partition, len(hidden), mesh.pp)
        here = [number for stage in self.stages for number in self.partition.range(stage)]
        self.blocks = [Block(f"blocks.{number}", self.width, hidden[number], mesh.tp) for number in here]
        self._block_at = dict(zip(here, self.blocks, strict=True))
        if self.num_stages - 1 in self.stages:
            self.head = Linear("head", self.width, classes, init=initial.fan_in())
        self._counts = mesh.coords["tp"] == 0
        if freeze:
            self.freeze(*freeze, exchange=mesh.pp.exchange)
        self.materialize(mesh, seed, dtype, xp, zero, home)
        gather_units(self, mesh, prefetch)

    def parts(self, stage: int) -> list[Module]:
        blocks: list[Module] = [self._block_at[number] for number in self.partition.range(stage)]
        return [*blocks, self.head] if stage == self.num_stages - 1 else blocks

    # -- one stage ----------------------------------------------------------------------------------------------------

    def forward_stage(self, stage: int, batch: Any, *inputs: Tensor, carry: Any = None) -> tuple[Tensor, ...]:
        if self.num_stages == 1:
            return (self(batch),)
        x = self._blocks_of(stage, inputs[0] if stage else self._features(batch.inputs))
        return (x,) if stage < self.num_stages - 1 else (self._loss(self.head(x), batch),)

    def boundary(self, stage: int, batch: Any) -> tuple[Boundary, ...]:
        if not stage:
            return ()
        return (Boundary((len(batch.targets), self.width), self.like.dtype, {"dp": Shard(0), "tp": INVARIANT}),)

    def _blocks_of(self, stage: int, x: Tensor) -> Tensor:
        for number in self.partition.range(stage):
            x = self._block_at[number](x)
        return x

    # -- all of them --------------------------------------------------------------------------------------------------

    def logits(self, inputs: Any) -> Tensor:
        """Scores of the classes.  inputs (b, in) -> (b, classes).

        Raises:
            ShapeError: some stages are on other ranks.
        """
        check_whole(self)
        x = self._features(inputs)
        for stage in self.stages:
            x = self._blocks_of(stage, x)
        return self.head(x)

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.logits(batch.inputs), batch)

    def _features(self, inputs: Any) -> Tensor:
        """What comes into the first stage."""
        if isinstance(inputs, Tensor):
            return inputs
        rows = inputs.reshape(len(inputs), math.prod(inputs.shape[1:]))
        return Tensor(to_device(rows, like=self.like).astype(self.like.dtype, copy=False))

    def _loss(self, scores: Tensor, batch: Any) -> Tensor:
        return loss_of_classes(scores, batch.targets, self.like, self._counts)
