"""Normalisation by statistics that are given: what a batch norm does to each number once mean and variance are known.

    y = (x - mean) / sqrt(variance + eps) * weight + bias          channel by channel

Where the statistics come from is not its business: they are of this batch, over all ranks, and then a gradient goes
back to them, or they are those that a module has kept.
"""

from __future__ import annotations

from typing import Any

from mpitrain import kernels
from mpitrain.autograd.function import Function
from mpitrain.autograd.lazy import rounded, summed, widened
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module
from mpitrain.errors import ShapeError

MEAN, VARIANCE = 0, 1
"""The rows of statistics."""


class Normalize(Function):
    """Normalise channels by statistics; saves its input, the statistics and the weight.  All in at least float32."""

    undivided = True

    @staticmethod
    def forward(
        x: Array, statistics: Array, weight: Array, bias: Array, *, eps: float
    ) -> tuple[Array, tuple[Any, ...]]:
        channels = x.shape[-1:]
        if not channels or statistics.shape != (2, *channels) or weight.shape != channels or bias.shape != channels:
            raise ShapeError(
                f"normalize: x {x.shape}, statistics {statistics.shape}, weight {weight.shape}, bias {bias.shape} do"
                " not go together"
            )
        y = widened(x) - statistics[MEAN]
        y *= widened(weight) * _rstd(statistics, eps)
        y += widened(bias)
        return rounded(y, x.dtype), (x, statistics, weight, bias.dtype)

    @staticmethod
    def backward(
        grad: Array,
        x: Array,
        statistics: Array,
        weight: Array,
        b_dtype: Any,
        *,
        wanted: tuple[bool, ...],
        eps: float,
    ) -> tuple[Any, ...]:
        g, rstd = widened(grad), _rstd(statistics, eps)
        slope = widened(weight) * rstd
        total = kernels.sum_rows(g)
        along = kernels.sum_rows(g * (widened(x) - statistics[MEAN]))
        dx = rounded(g * slope, x.dtype) if wanted[0] else None
        d_statistics = None
        if wanted[1]:
            d_statistics = array_module(x).stack([-total * slope, along * slope * rstd**2 * -0.5])
            d_statistics = d_statistics.astype(statistics.dtype, copy=False)
        return dx, d_statistics, summed(along * rstd, weight.dtype), summed(total, b_dtype)


def _rstd(statistics: Array, eps: float) -> Array:
    return 1.0 / array_module(statistics).sqrt(statistics[VARIANCE] + eps)


def normalize(x: Tensor, statistics: Tensor | Array, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, channel by channel.

    Args:
        x: (..., c), the channels last.
        statistics: (2, c) mean and variance of each channel, in at least float32; a Tensor has a gradient.
        weight, bias: (c,).
        eps: added to the variance.

    Raises:
        ShapeError: the lengths differ.

    Source: Ioffe and Szegedy 2015, arXiv:1502.03167, algorithm 1.
    """
    return Normalize.apply(x, statistics, weight, bias, eps=eps)
