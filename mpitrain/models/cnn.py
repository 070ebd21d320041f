"""A convolutional network that classifies images.

    x = relu(conv(x))              for each block; the last of a group is followed by max_pool
    x = relu(norm(conv(x)))        with batch norm
    loss = sum over rows of cross_entropy(head(flatten(x)))

Rows are divided over dp, and the blocks are dealt out to the stages of a pipeline: between two of them go images.  A
convolution keeps the size of the images, a pool halves it.  With the groups (16, 32), (64):

    conv 16, relu, conv 32, relu, pool, conv 64, relu, pool, flatten, linear

Paper: the form is that of Simonyan and Zisserman 2015, arXiv:1409.1556, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from mpitrain.autograd.ops import IGNORE
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, to_device
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import MeshError, ShapeError
from mpitrain.models.classes import CORRECT, accuracy, loss_of_classes
from mpitrain.nn import init as initial
from mpitrain.nn.conv import BEFORE_RELU, Conv2d, Flatten, MaxPool2d
from mpitrain.nn.layers import Linear, Relu
from mpitrain.nn.module import Boundary, Module
from mpitrain.parallel.batch_norm import BatchNorm
from mpitrain.parallel.stages import check_whole, stages_here
from mpitrain.parallel.zero import gather_units
from mpitrain.parallel.zero.gather import PREFETCH
from mpitrain.pipeline.partition import Partition, balance
from mpitrain.spec import DATA_AXES, INVARIANT, Shard

__all__ = ["CNN", "CORRECT", "Block", "accuracy"]

Shape = tuple[int, int, int]  # of an image: (h, w, c)


class Block(Module):
    """Convolution of 3 x 3 pixels, batch norm if one is given, ReLU, and a pool of 2 x 2 if it ends a group."""

    def __init__(self, name: str, channels: int, filters: int, pools: bool, norm: BatchNorm | None = None) -> None:
        super().__init__(name)
        init = initial.fan_in((1, 2, 3), gain=BEFORE_RELU)
        # A norm takes away whatever a bias adds.
        self.conv = Conv2d(f"{name}.conv", channels, filters, kernel=3, padding=1, bias=norm is None, init=init)
        self.norm = norm
        self.relu = Relu(f"{name}.relu")
        self.pool = MaxPool2d(2, name=f"{name}.pool") if pools else None

    def forward(self, x: Tensor, rows: Array | None = None, training: bool = True) -> Tensor:
        """(b, h, w, c) -> (b, h, w, filters), half as high and wide behind a pool.

        Args:
            x: images.
            rows: bool (b,), those that count in the statistics of a batch norm; None: all.
            training: whether it takes them of this batch.
        """
        x = self.conv(x)
        if self.norm is not None:
            x = self.norm(x, rows, training)
        x = self.relu(x)
        return x if self.pool is None else self.pool(x)


class CNN(Module):
    """Groups of convolutions, then a head.

    Args:
        mesh: the layout; the model is the same on every one.
        image: height, width and channels of the images.
        groups: of each group the numbers of filters of its convolutions; a pool behind each group halves the images.
        classes: to be told apart.
        partition: how many blocks (convolutions) each stage of a pipeline has, the head being on the last; None: as
            even as the work of whole blocks can be divided.  Stage q is on rank q mod pp; there may be several a rank.
        batch_norm: whether there is one behind each convolution: over the rows of all ranks, and none that is padding.
        per_microbatch: batch norms take micro-batches by themselves, which then are another training run than whole
            batches; else the executor refuses several.
        seed: of the initial values.
        dtype: of weights, activations and gradients; inputs are turned into it.
        zero: stage of ZeRO: what ranks deal out that would all hold the same (mpitrain.parallel.zero).
        prefetch: stage 3: parts of the model whose weights are on their way while another one works.
        freeze: patterns of parameters that nobody trains, as `Module.freeze` takes them.
        xp: where they live: numpy, or cupy for this rank's device.

    Raises:
        MeshError: the layout has an axis tp or cp, along which nothing of this model is cut.
        ShapeError: nothing is left of the images behind the last pool; the partition has other blocks, or its stages do
            not divide over pp.

    `model(batch)`, where all stages are on this rank: batch.inputs (b, h, w, c), batch.targets (b,) class numbers,
    IGNORE for rows that do not count; returns the sum of the cross-entropy over the valid rows.  A batch from the host
    goes to where the weights are.  With batch norm the batch also says whether it is for training; `logits` is not.

    Steps report how many rows were classified rightly (`executor.report.counted["correct"]`); of other rows `accuracy`
    tells it.
    """

    counted: ClassVar = {CORRECT: 1}

    def __init__(
        self,
        mesh: Mesh,
        image: Shape = (8, 8, 1),
        groups: Sequence[Sequence[int]] = ((16, 32), (64,)),
        classes: int = 10,
        *,
        partition: Partition | None = None,
        batch_norm: bool = False,
        per_microbatch: bool = False,
        seed: int = 0,
        dtype: Any = np.float32,
        zero: int = 0,
        prefetch: int = PREFETCH,
        freeze: Sequence[str] = (),
        xp: Any = np,
    ) -> None:
        super().__init__("cnn")
        _check_axes(mesh)
        self.made_of = {
            "image": list(image),
            "groups": [list(group) for group in groups],
            "classes": classes,
            "batch_norm": batch_norm,
            "seed": seed,
        }
        filters = [count for group in groups for count in group]
        pools = [number == len(group) - 1 for group in groups for number in range(len(group))]
        self.shapes = _shapes(image, filters, pools)
        costs = [9.0 * math.prod(shape) * count for shape, count in zip(self.shapes, filters, strict=False)]
        self.partition = balance(costs, mesh.pp.size) if partition is None else partition
        self.num_stages = self.partition.stages
        self.stages = stages_here(self.partition, len(filters), mesh.pp)
        here = [number for stage in self.stages for number in self.partition.range(stage)]
        rows_over = mesh.merged(DATA_AXES)

        def norm(i: int) -> BatchNorm | None:
            name = f"blocks.{i}.norm"
            return BatchNorm(name, filters[i], rows_over, per_microbatch=per_microbatch) if batch_norm else None

        self.has_norms = batch_norm
        self.blocks = [Block(f"blocks.{i}", self.shapes[i][2], filters[i], pools[i], norm(i)) for i in here]
        self._block_at = dict(zip(here, self.blocks, strict=True))
        if self.num_stages - 1 in self.stages:
            self.flatten = Flatten()
            self.head = Linear("head", math.prod(self.shapes[-1]), classes)
        if freeze:
            self.freeze(*freeze, exchange=mesh.pp.exchange)
        self.materialize(mesh, seed, dtype, xp, zero)
        gather_units(self, mesh, prefetch)

    def parts(self, stage: int) -> list[Module]:
        blocks: list[Module] = [self._block_at[number] for number in self.partition.range(stage)]
        return [*blocks, self.head] if stage == self.num_stages - 1 else blocks

    # -- one stage ----------------------------------------------------------------------------------------------------

    def forward_stage(self, stage: int, batch: Any, *inputs: Tensor, carry: Any = None) -> tuple[Tensor, ...]:
        if self.num_stages == 1:
            return (self(batch),)
        x = self._blocks_of(stage, inputs[0] if stage else self._images(batch.inputs), batch)
        return (x,) if stage < self.num_stages - 1 else (loss_of_classes(self._scores(x), batch.targets, self.like),)

    def boundary(self, stage: int, batch: Any) -> tuple[Boundary, ...]:
        if not stage:
            return ()
        shape = self.shapes[sum(self.partition.layers[:stage])]
        return (Boundary((len(batch.targets), *shape), self.like.dtype, {"dp": Shard(0), "tp": INVARIANT}),)

    def _blocks_of(self, stage: int, x: Tensor, batch: Any = None) -> Tensor:
        """The blocks of a stage; without a batch as in evaluation."""
        rows, training = None, batch is not None
        if training and self.has_norms:
            training = batch.training
            if training and batch.count < len(batch.targets):
                rows = to_device(batch.targets, like=self.like) != IGNORE
        for number in self.partition.range(stage):
            x = self._block_at[number](x, rows, training)
        return x

    # -- all of them --------------------------------------------------------------------------------------------------

    def logits(self, inputs: Any) -> Tensor:
        """Scores of the classes.  inputs (b, h, w, c) -> (b, classes).

        Raises:
            ShapeError: some stages are on other ranks, or these are other images.
        """
        return self._through(inputs)

    def forward(self, batch: Any) -> Tensor:
        return loss_of_classes(self._through(batch.inputs, batch), batch.targets, self.like)

    def _through(self, inputs: Any, batch: Any = None) -> Tensor:
        """Scores from images; without a batch as in evaluation."""
        check_whole(self)
        x = self._images(inputs)
        for stage in self.stages:
            x = self._blocks_of(stage, x, batch)
        return self._scores(x)

    def _images(self, inputs: Any) -> Tensor:
        """What comes into the first stage."""
        if inputs.shape[1:] != self.shapes[0]:
            raise ShapeError(f"images {tuple(inputs.shape[1:])} (h, w, c), but the model is made for {self.shapes[0]}")
        if isinstance(inputs, Tensor):
            return inputs
        return Tensor(to_device(inputs, like=self.like).astype(self.like.dtype, copy=False))

    def _scores(self, x: Tensor) -> Tensor:
        return self.head(self.flatten(x))


def _shapes(image: Shape, filters: Sequence[int], pools: Sequence[bool]) -> list[Shape]:
    """What comes into each block, and what comes out of the last one."""
    shapes = [image]
    for count, pooled in zip(filters, pools, strict=True):
        height, width, _ = shapes[-1]
        shapes.append((height // 2, width // 2, count) if pooled else (height, width, count))
    if min(shapes[-1][:2]) < 1:
        raise ShapeError(
            f"cnn: {sum(pools)} pools halve images of {image[0]} x {image[1]} pixels to nothing; take fewer groups."
        )
    return shapes


def _check_axes(mesh: Mesh) -> None:
    """Refuse axes whose ranks would all do the same work."""
    for axis in ("tp", "cp"):
        size = mesh.sizes[axis]
        if size > 1:
            raise MeshError(
                f"--{axis} {size}: nothing of a CNN is cut along axis {axis}, so those ranks would all do the same.\n"
                "Give them to --dp (images) or --pp (blocks)."
            )
