"""RMS norm, alone and after the end of a residual branch."""

from __future__ import annotations

from typing import Any

from mpitrain import kernels
from mpitrain.autograd.function import Function
from mpitrain.autograd.lazy import summed
from mpitrain.autograd.needs import EXACT, NEAR
from mpitrain.autograd.ops.residual import branch_gradients, check_branch, check_rows
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError


class RmsNorm(Function):
    """Divide by the root mean square over the last dim; saves its input and a number a row."""

    undivided = True
    needs = (NEAR,)

    @staticmethod
    def forward(x: Array, weight: Array, *, eps: float) -> tuple[Array, tuple[Any, ...]]:
        _check_scale("rms_norm", x, weight)
        y, rstd = kernels.rms_norm(x, weight, eps)
        return y, (x, rstd, weight)

    @staticmethod
    def backward(
        grad: Array, x: Array, rstd: Array, weight: Array, *, wanted: tuple[bool, ...], eps: float
    ) -> tuple[Any, ...]:
        dx, dw = kernels.rms_norm_backward(grad, x, rstd, weight)
        return dx, summed(dw, weight.dtype)


class ResidualRmsNorm(Function):
    """(x + dropout(y + branch_bias), its RMS norm); saves the sum, a number a row, and the dropout's hashes.

    Inputs x, y, branch_bias (or None), rows (or None), weight.
    """

    undivided = True
    needs = (EXACT, NEAR)

    @staticmethod
    def forward(
        x: Array,
        y: Array,
        branch_bias: Array | None,
        rows: Array | None,
        weight: Array,
        *,
        p: float,
        eps: float,
    ) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
        check_branch("residual_rms_norm", x, y, branch_bias)
        _check_scale("residual_rms_norm", x, weight)
        total, normed, rstd = kernels.residual_rms_norm(x, y, branch_bias, rows, p, weight, eps)
        return (total, normed), (rows, total, rstd, weight)

    @staticmethod
    def backward(
        grads: tuple[Array | None, Array | None],
        rows: Array | None,
        total: Array,
        rstd: Array,
        weight: Array,
        *,
        wanted: tuple[bool, ...],
        p: float,
        eps: float,
    ) -> tuple[Any, ...]:
        through, of_norm = grads
        grad, d_weight = through, None
        if of_norm is not None:
            grad, d_weight = kernels.rms_norm_backward(of_norm, total, rstd, weight, through)
            d_weight = summed(d_weight, weight.dtype)
        return grad, *branch_gradients(grad, rows, wanted, p), None, d_weight


def _check_scale(op: str, x: Array, weight: Array) -> None:
    if x.ndim == 0 or x.shape[-1:] != weight.shape:
        raise ShapeError(f"{op}: x {x.shape} and weight {weight.shape} do not go together")


# ------------------------------------------------------------------------------------------------------- as functions


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean square + eps) * weight over the last dim; statistics in at least float32.

    Args:
        x: (..., d).
        weight: (d,).
        eps: added to the mean square.

    Raises:
        ShapeError: the lengths differ.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    return RmsNorm.apply(x, weight, eps=eps)


def residual_rms_norm(
    x: Tensor,
    y: Tensor,
    branch_bias: Tensor | None,
    weight: Tensor,
    *,
    rows: Array | None = None,
    p: float = 0.0,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """x + dropout(y + branch_bias), and the RMS norm of that sum: where one branch ends and the next begins.

    Args:
        x: (..., d), the stream.
        y: (..., d), the branch that ends.
        branch_bias: (d,), of its last layer; None: no bias.
        weight: (d,), of the norm.
        rows: uint64 (...), one hash a row from `Draw.rows`; None: no dropout.
        p: probability of zero.
        eps: added to the mean square.

    Returns:
        (sum, normalised sum), both (..., d).

    Raises:
        ShapeError: shapes or dtypes differ.

    Cost: one pass forward; backward adds the two gradients of the sum in the pass that makes one of them.
    """
    check_rows("residual_rms_norm", y, rows)
    return ResidualRmsNorm.apply(x, y, branch_bias, rows if p else None, weight, p=p, eps=eps)
