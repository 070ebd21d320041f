"""The two ends of a residual branch whose gradients have a scale of their own.

    forward     stream (float32)  --enter-->  branch (half)  ...  --leave-->  (float32), added to the stream
    backward    gradient / S      <--enter--  gradient       ...  <--leave--  half(S gradient), 0 where not finite

The stream and its gradient are float32 all the way, so what a branch does to its gradients stays in the branch: the
scale is put on where backward enters it at its end, and taken off where it leaves it at its beginning.  Gradients of
weights inside carry it until the step is over.  An entry that overflows is dropped: one branch's overflow does not
reach those before it.

Source: Ramesh et al. 2021, arXiv:2102.12092, section 2.4 and appendix D.1, figure 4.
"""

from __future__ import annotations

from typing import Any, Protocol

from mpitrain import kernels
from mpitrain.autograd.function import Function
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, is_half, wide


class Scales(Protocol):
    """The scales of all branches; read in backward."""

    def scale(self, branch: int) -> float:
        """That of a branch, now."""


class EnterBranch(Function):
    """The stream in the dtype of the branch; the gradient comes out without the scale."""

    linear = (0,)

    @staticmethod
    def forward(x: Array, *, scales: Scales, branch: int, dtype: Any) -> tuple[Array, tuple[Any, ...]]:
        return _to(x, dtype), (x.dtype,)

    @staticmethod
    def backward(
        grad: Array, outside: Any, *, wanted: tuple[bool, ...], scales: Scales, branch: int, dtype: Any
    ) -> tuple[Array]:
        compute = wide(outside)
        return (_to(_to(grad, compute) * compute.type(1.0 / scales.scale(branch)), outside),)


class LeaveBranch(Function):
    """The branch in the dtype of the stream; the gradient goes in with the scale, finite."""

    linear = (0,)

    @staticmethod
    def forward(y: Array, *, scales: Scales, branch: int, dtype: Any) -> tuple[Array, tuple[Any, ...]]:
        return _to(y, dtype), (y.dtype,)

    @staticmethod
    def backward(
        grad: Array, inside: Any, *, wanted: tuple[bool, ...], scales: Scales, branch: int, dtype: Any
    ) -> tuple[Array]:
        xp, compute = array_module(grad), wide(grad.dtype)
        scaled = _to(_to(grad, compute) * compute.type(scales.scale(branch)), inside)
        finite = xp.isfinite(scaled)
        return (scaled if finite.all() else xp.where(finite, scaled, xp.zeros((), scaled.dtype)),)


def _to(x: Array, dtype: Any) -> Array:
    """The same values in another precision; itself where it is that already."""
    if x.dtype == dtype:
        return x
    if is_half(x.dtype):
        return kernels.widen(x).astype(dtype, copy=False)
    return kernels.narrow(x.astype(wide(dtype), copy=False), dtype) if is_half(dtype) else x.astype(dtype)


def enter_branch(x: Tensor, scales: Scales, branch: int, dtype: Any) -> Tensor:
    """Take the stream into a branch.

    Args:
        x: (..., d), in at least float32.
        scales: of all branches.
        branch: the number of this one.
        dtype: in which the branch computes.

    Returns:
        (..., d) in `dtype`.
    """
    return EnterBranch.apply(x, scales=scales, branch=branch, dtype=dtype)


def leave_branch(y: Tensor, scales: Scales, branch: int, dtype: Any) -> Tensor:
    """Bring what a branch made back to the stream.

    Args:
        y: (..., d), in the dtype of the branch.
        scales: of all branches.
        branch: the number of this one.
        dtype: of the stream.

    Returns:
        (..., d) in `dtype`.
    """
    return LeaveBranch.apply(y, scales=scales, branch=branch, dtype=dtype)
