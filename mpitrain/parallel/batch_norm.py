"""Batch norm: channels are normalised by mean and variance over the whole batch, whichever ranks its rows are on.

    rank 0    rows 0 2 4 ...    n, mean, squares
                                                    all-gather -> mean and variance of all rows, on both ranks
    rank 1    rows 1 3 5 ...    n, mean, squares

Each rank measures its own rows, in two passes: their mean, then the squares of what is left.  One small message brings
these findings to all ranks, and each puts them together in the same order, so all hold the same bits; no large numbers
are subtracted on the way (the second source).  In backward the gradients of the two statistics are summed over the
ranks, as those of any value of which each rank uses its copy.

Were each rank to normalise its own rows, every layout would be another training run.  So it is with micro-batches, each
normalised by itself: several are refused unless that is asked for by name.

Evaluation takes running means of both statistics, and sends nothing.

Source: Ioffe and Szegedy 2015, "Batch Normalization", arXiv:1502.03167, algorithms 1 and 2; Chan, Golub and LeVeque
1983, "Algorithms for Computing the Sample Variance", The American Statistician 37(3).
"""

from __future__ import annotations

import math
from typing import Any

from mpitrain import kernels
from mpitrain.autograd import ops
from mpitrain.autograd.lazy import rounded, widened
from mpitrain.autograd.ops.normalize import MEAN, VARIANCE
from mpitrain.autograd.recompute import recomputing
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module
from mpitrain.collectives import Arrow
from mpitrain.comm.communicator import Communicator
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.nn import init as initial
from mpitrain.nn.buffer import Buffer
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.spec import REPLICATE, Shard, Spec


class BatchStatistics(Arrow):
    """Mean and variance of each channel over the rows of all ranks, and how many numbers those are; saves x.

    Shard(0) -> Replicate.  Backward: all-reduce of the gradients of mean and variance; each rank's rows have their part
    in both.
    """

    linear = ()
    arrow = (Shard(0), REPLICATE)
    any_rows = True

    @staticmethod
    def forward(
        x: Array, rows: Array | None = None, *, axis: Communicator
    ) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
        xp, z = array_module(x), widened(x)
        each = math.prod(x.shape[1:-1])  # numbers of a channel in a row
        count = xp.asarray(float(len(x) * each)) if rows is None else xp.asarray(rows.sum() * float(each))
        mean = kernels.sum_rows(_counted(z, rows)) / xp.maximum(count, 1.0).astype(z.dtype)
        squares = kernels.sum_rows(_counted((z - mean) ** 2, rows))
        mine = xp.concatenate([count.reshape(1), mean, squares]).astype(xp.float64)
        # Every rank puts all findings together itself, in the order of the ranks: so all have the same bits.
        told = axis.all_gather(mine.reshape(1, -1), 0)
        channels = x.shape[-1]
        counts, means, squares = told[:, :1], told[:, 1 : channels + 1], told[:, channels + 1 :]
        total = counts.sum()
        least = xp.maximum(total, 1.0)
        mean = (counts * means).sum(axis=0) / least
        variance = (squares + counts * (means - mean) ** 2).sum(axis=0) / least
        statistics = xp.stack([mean, variance]).astype(z.dtype)
        return (statistics, total), (x, rows, statistics, least)

    @staticmethod
    def backward(
        grad: tuple[Array | None, Array | None],
        x: Array,
        rows: Array | None,
        statistics: Array,
        total: Array,
        *,
        wanted: tuple[bool, ...],
        axis: Communicator,
    ) -> tuple[Array | None, ...]:
        of_statistics, _ = grad
        if of_statistics is None:
            return (None,) * len(wanted)
        d_mean, d_variance = axis.all_reduce(of_statistics) / total.astype(of_statistics.dtype)
        dx = d_mean + (2.0 * d_variance) * (widened(x) - statistics[MEAN])  # squares are least around the mean
        return (rounded(_counted(dx, rows), x.dtype), None)[: len(wanted)]


def _counted(x: Array, rows: Array | None) -> Array:
    """x with zeros in the rows that do not count."""
    return x if rows is None else x * rows.reshape(-1, *(1,) * (x.ndim - 1)).astype(x.dtype)


class BatchNorm(Module):
    """Normalise each channel over the whole batch, then scale and shift.

    Args:
        name: path in the model.
        channels: length of the last dim.
        axis: of the ranks that have different rows: `mesh.merged(DATA_AXES)`.
        eps: added to the variance.
        momentum: share of a batch in the running statistics.
        per_microbatch: normalise each micro-batch by itself.  With several of them this is another training run than
            with one, so unless it is asked for here, the executor refuses them.
        spec: how weight, bias and running statistics lie across ranks, where not by default.

    Attributes:
        mean, variance: the running statistics; the variance is that of what the batch is drawn from, (n - 1) in its
            denominator.  A pass whose statistics are no numbers, as one that overflows in half precision, and one with
            a single number a channel leave them as they are.

    Raises:
        ConfigError: a momentum that is not in (0, 1], or an eps that is not positive.

    Cost: forward sends 8 (2 channels + 1) bytes to each rank, backward all-reduces two numbers a channel; evaluation
        sends nothing.
    """

    def __init__(
        self,
        name: str,
        channels: int,
        axis: Communicator,
        *,
        eps: float = 1e-5,
        momentum: float = 0.1,
        per_microbatch: bool = False,
        spec: Spec | None = None,
    ) -> None:
        super().__init__(name)
        if not 0.0 < momentum <= 1.0 or not eps > 0.0:
            raise ConfigError(f"{name}: momentum {momentum}, eps {eps}; momentum is in (0, 1], eps above 0")
        self.channels = channels
        self.axis = axis
        self.eps = eps
        self.momentum = momentum
        self.mixes_rows = not per_microbatch
        self.weight = Parameter(f"{name}.weight", (channels,), spec, init=initial.ones)
        self.bias = Parameter(f"{name}.bias", (channels,), spec, init=initial.zeros)
        self.mean = Buffer(f"{name}.mean", (channels,), 0.0, spec)
        self.variance = Buffer(f"{name}.variance", (channels,), 1.0, spec)

    def forward(self, x: Tensor, rows: Array | None = None, training: bool = True) -> Tensor:
        """(b, ..., channels) -> (b, ..., channels).

        Args:
            x: this rank's rows.
            rows: bool (b,), those that count; None: all.  The others are normalised, but change nothing.
            training: normalise by the batch; else by the running statistics.

        Raises:
            ShapeError: x has other channels, or integers; or there are more or fewer `rows` than x has.
        """
        self._check(x, rows)
        if not training:
            kept = array_module(x.data).stack([self.mean.array, self.variance.array])
            return ops.normalize(x, kept, self.weight, self.bias, self.eps)
        inputs = (x,) if rows is None else (x, rows)
        statistics, count = BatchStatistics.apply(*inputs, axis=self.axis)
        if not recomputing():
            self._keep(statistics.data, count.data)
        return ops.normalize(x, statistics, self.weight, self.bias, self.eps)

    def _check(self, x: Tensor, rows: Array | None) -> None:
        """Refuse what does not fit, before a rank waits for the findings of this one."""
        if x.ndim < 2 or x.shape[-1] != self.channels:
            raise ShapeError(f"{self.name}: x {x.shape} is not (b, ..., {self.channels}): rows, and channels last")
        if x.dtype.kind in "biu":
            raise ShapeError(
                f"{self.name}: x is {x.dtype}, which has no place for means; cast it, as x.astype(np.float32)"
            )
        if rows is not None and rows.shape != x.shape[:1]:
            raise ShapeError(f"{self.name}: rows {rows.shape} for x {x.shape}: there is one bool for each row of x")

    def _keep(self, statistics: Array, count: Array) -> None:
        """Take a batch into the running statistics; on a device without waiting for it."""
        xp = array_module(statistics)
        is_sound = xp.isfinite(statistics).all() & (count > 1)
        unbiased = statistics[VARIANCE] * (count / xp.maximum(count - 1, 1)).astype(statistics.dtype)
        for buffer, of_batch in ((self.mean, statistics[MEAN]), (self.variance, unbiased)):
            new = (1.0 - self.momentum) * buffer.array + self.momentum * of_batch
            buffer.array = xp.where(is_sound, new, buffer.array)
