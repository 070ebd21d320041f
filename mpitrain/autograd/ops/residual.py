"""Dropout, and the ends of residual branches: what drops, adds and normalises in one pass.

A mask is a pure function of the hashes of its rows: it is made again in backward, and nothing as large as x waits.
"""

from __future__ import annotations

from typing import Any

from mpitrain import kernels
from mpitrain.autograd.function import Function
from mpitrain.autograd.lazy import summed
from mpitrain.autograd.needs import EXACT, NEAR
from mpitrain.autograd.ops.fused import check_bias, check_norm
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError


class Dropout(Function):
    """Zero elements at random and scale the others up; saves the hashes of the rows."""

    linear = (0,)

    @staticmethod
    def forward(x: Array, rows: Array, *, p: float) -> tuple[Array, tuple[Any, ...]]:
        return kernels.dropout(x, rows, p), (rows,)

    @staticmethod
    def backward(grad: Array, rows: Array, *, wanted: tuple[bool, ...], p: float) -> tuple[Any, ...]:
        return kernels.dropout(grad, rows, p), None


class Residual(Function):
    """x + dropout(y + bias); saves the hashes of the dropout's rows, where there is one.

    Inputs x, y, bias (or None), rows (or None).
    """

    linear = (0, 1, 2)
    undivided = True

    @staticmethod
    def forward(
        x: Array, y: Array, bias: Array | None, rows: Array | None, *, p: float
    ) -> tuple[Array, tuple[Any, ...]]:
        check_branch("residual", x, y, bias)
        return kernels.residual(x, y, bias, rows, p), (rows,)

    @staticmethod
    def backward(grad: Array, rows: Array | None, *, wanted: tuple[bool, ...], p: float) -> tuple[Any, ...]:
        return grad, *branch_gradients(grad, rows, wanted, p), None


class ResidualNorm(Function):
    """(x + dropout(y + branch_bias), its layer norm); saves the sum, two numbers a row, and the dropout's hashes.

    Inputs x, y, branch_bias (or None), rows (or None), weight, bias.
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
        bias: Array,
        *,
        p: float,
        eps: float,
    ) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
        check_branch("residual_norm", x, y, branch_bias)
        check_norm("residual_norm", x, weight, bias)
        total, normed, center, rstd = kernels.residual_norm(x, y, branch_bias, rows, p, weight, bias, eps)
        return (total, normed), (rows, total, center, rstd, weight, bias.dtype)

    @staticmethod
    def backward(
        grads: tuple[Array | None, Array | None],
        rows: Array | None,
        total: Array,
        center: Array,
        rstd: Array,
        weight: Array,
        b_dtype: Any,
        *,
        wanted: tuple[bool, ...],
        p: float,
        eps: float,
    ) -> tuple[Any, ...]:
        through, of_norm = grads
        grad, d_weight, d_bias = through, None, None
        if of_norm is not None:
            grad, d_weight, d_bias = kernels.layer_norm_backward(of_norm, total, center, rstd, weight, through)
            d_weight, d_bias = summed(d_weight, weight.dtype), summed(d_bias, b_dtype)
        return grad, *branch_gradients(grad, rows, wanted, p), None, d_weight, d_bias


def check_branch(op: str, x: Array, y: Array, bias: Array | None) -> None:
    """Refuse a branch y, or its bias, that does not fit the stream x, with a ShapeError that begins with the op."""
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ShapeError(f"{op}: x {x.shape} {x.dtype} and y {y.shape} {y.dtype} differ")
    check_bias(op, y, bias)


def branch_gradients(grad: Array, rows: Array | None, wanted: tuple[bool, ...], p: float) -> tuple[Any, Any]:
    """Gradients of a branch y and its bias from that of x + dropout(y + bias)."""
    if not (wanted[1] or wanted[2]):
        return None, None
    dy = grad if rows is None else kernels.dropout(grad, rows, p)
    return dy, summed(kernels.sum_rows(dy), dy.dtype) if wanted[2] else None


# ------------------------------------------------------------------------------------------------------- as functions


def dropout(x: Tensor, rows: Array, p: float) -> Tensor:
    """Zero each element with probability p, scale the others by 1 / (1 - p).

    Args:
        x: (..., d).
        rows: uint64 (...), the random stream of each row (`Draw.rows`); the same rows give the same mask.
        p: probability of zero.

    Raises:
        ShapeError: rows is not x's shape without the last dim.
    """
    check_rows("dropout", x, rows)
    return Dropout.apply(x, rows, p=p) if p else x


def residual(x: Tensor, y: Tensor, bias: Tensor | None = None, *, rows: Array | None = None, p: float = 0.0) -> Tensor:
    """x + dropout(y + bias): the end of a residual branch in one pass.

    Args:
        x: (..., d), the stream.
        y: (..., d), the branch.
        bias: (d,), of the branch's last layer; None: no bias.
        rows: uint64 (...), one hash a row from `Draw.rows`; None: no dropout.
        p: probability of zero.

    Raises:
        ShapeError: shapes or dtypes differ.

    Cost: one pass; the gradient of x, and without dropout that of y, is the gradient that comes in, uncopied.
    """
    check_rows("residual", y, rows)
    return Residual.apply(x, y, bias, rows if p else None, p=p)


def residual_norm(
    x: Tensor,
    y: Tensor,
    branch_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    *,
    rows: Array | None = None,
    p: float = 0.0,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """x + dropout(y + branch_bias), and the layer norm of that sum: where one branch ends and the next begins.

    Args:
        x: (..., d), the stream.
        y: (..., d), the branch that ends.
        branch_bias: (d,), of its last layer; None: no bias.
        weight, bias: (d,), of the norm.
        rows: uint64 (...), one hash a row from `Draw.rows`; None: no dropout.
        p: probability of zero.
        eps: added to the variance.

    Returns:
        (sum, normalised sum), both (..., d).

    Raises:
        ShapeError: shapes or dtypes differ.

    Cost: one pass forward; backward adds the two gradients of the sum in the pass that makes one of them.
    """
    check_rows("residual_norm", y, rows)
    return ResidualNorm.apply(x, y, branch_bias, rows if p else None, weight, bias, p=p, eps=eps)


def check_rows(op: str, x: Tensor, rows: Array | None) -> None:
    """Refuse hashes of a dropout that are not one a row of x, with a ShapeError that begins with the op's name."""
    if rows is not None and rows.shape != x.shape[:-1]:
        raise ShapeError(f"{op}: x {x.shape} wants rows {x.shape[:-1]}, got {rows.shape}")
