"""Layers as one operation: fewer passes over memory, and only what backward needs is kept.

Each Function here is a thin shell: its numerics are a kernel of `mpitrain.kernels`, its backward says which of them to
call.  What waits for backward is chosen to be cheap: an array that a neighbour saves anyway (it counts once), or one
that takes the place of the input, or a number a row.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

from mpitrain import kernels
from mpitrain.autograd.function import Function
from mpitrain.autograd.lazy import Product, summed
from mpitrain.autograd.needs import NEAR
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, at_hand
from mpitrain.errors import DataError, ShapeError
from mpitrain.kernels.blocks import rows_of

IGNORE = -100
"""The target of a token that does not count in the loss."""


class Linear(Function):
    """y = x w + b over the last dim; saves x.  dw is a `Product`, written straight into the gradient buffer.

    With a `dtype` the product is not rounded to that of x and w.
    """

    linear = (0, 2)
    bilinear = True
    saved_for = MappingProxyType({0: 1})
    needs = (NEAR,)

    @staticmethod
    def forward(x: Array, w: Array, b: Array | None = None, *, dtype: Any = None) -> tuple[Array, tuple[Any, ...]]:
        if x.ndim == 0 or x.shape[-1] != w.shape[0]:
            raise ShapeError(f"linear: x {x.shape} ends in another length than w {w.shape} begins with")
        matrix = x.reshape(rows_of(x))
        y = kernels.matmul(matrix, w, dtype=dtype) if b is None else kernels.linear(matrix, w, b, dtype)
        return y.reshape(*x.shape[:-1], w.shape[1]), (x, w, x.dtype, None if b is None else b.dtype)

    @staticmethod
    def backward(
        grad: Array,
        x: Array | None,
        w: Array,
        x_dtype: Any,
        b_dtype: Any,
        *,
        wanted: tuple[bool, ...],
        dtype: Any = None,
    ) -> tuple[Any, ...]:
        g = grad.reshape(rows_of(grad))
        if wanted[0] and wanted[1]:
            g = kernels.factor(g)
        dx = kernels.matmul(g, w.T, dtype=x_dtype).reshape(*grad.shape[:-1], w.shape[0]) if wanted[0] else None
        dw = None if x is None or not wanted[1] else Product(x.reshape(rows_of(x)).T, g, w.dtype)
        if len(wanted) == 2:
            return dx, dw
        return dx, dw, summed(kernels.sum_rows(g), b_dtype) if wanted[2] else None


class GeluTanh(Function):
    """GELU in tanh form of x, or of x + bias; saves its slope, in the place of its input."""

    undivided = True
    needs = (NEAR,)

    @staticmethod
    def forward(x: Array, bias: Array | None = None) -> tuple[Array, tuple[Any, ...]]:
        check_bias("gelu_tanh", x, bias)
        y, slope = kernels.gelu_tanh(x, bias)
        return y, (slope,)

    @staticmethod
    def backward(grad: Array, slope: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        dx, db = kernels.gelu_backward(grad, slope, with_bias=len(wanted) == 2 and wanted[1])
        return (dx,) if len(wanted) == 1 else (dx, db if db is None else summed(db, slope.dtype))


class GeluErf(GeluTanh):
    """GELU in its exact form of x, or of x + bias; saves its slope, in the place of its input."""

    @staticmethod
    def forward(x: Array, bias: Array | None = None) -> tuple[Array, tuple[Any, ...]]:
        check_bias("gelu_erf", x, bias)
        y, slope = kernels.gelu_erf(x, bias)
        return y, (slope,)


def check_bias(op: str, x: Array, bias: Array | None) -> None:
    """Refuse a bias that is not one number a column of x, with a ShapeError that begins with the op's name."""
    if bias is not None and (x.ndim == 0 or bias.shape != x.shape[-1:] or bias.dtype != x.dtype):
        raise ShapeError(f"{op}: x {x.shape} {x.dtype} and bias {bias.shape} {bias.dtype} do not go together")


class LayerNorm(Function):
    """Normalise over the last dim; saves its input and two numbers a row."""

    undivided = True
    needs = (NEAR,)

    @staticmethod
    def forward(x: Array, weight: Array, bias: Array, *, eps: float) -> tuple[Array, tuple[Any, ...]]:
        check_norm("layer_norm", x, weight, bias)
        y, center, rstd = kernels.layer_norm(x, weight, bias, eps)
        return y, (x, center, rstd, weight, bias.dtype)

    @staticmethod
    def backward(
        grad: Array,
        x: Array,
        center: Array,
        rstd: Array,
        weight: Array,
        b_dtype: Any,
        *,
        wanted: tuple[bool, ...],
        eps: float,
    ) -> tuple[Any, ...]:
        dx, dw, db = kernels.layer_norm_backward(grad, x, center, rstd, weight)
        return dx, summed(dw, weight.dtype), summed(db, b_dtype)


def check_norm(op: str, x: Array, weight: Array, bias: Array) -> None:
    """Refuse weight and bias of a norm that are not one number a column of x each, as `check_bias` does."""
    if x.ndim == 0 or x.shape[-1:] != weight.shape or weight.shape != bias.shape:
        raise ShapeError(f"{op}: x {x.shape}, weight {weight.shape}, bias {bias.shape} do not go together")


class SoftmaxCrossEntropy(Function):
    """Sum of the cross-entropies of the rows that count; saves the logits and a number a row."""

    @staticmethod
    def forward(logits: Array, targets: Array, *, ignore: int) -> tuple[Array, tuple[Any, ...]]:
        if logits.shape[:-1] != targets.shape:
            raise ShapeError(f"softmax_cross_entropy: logits {logits.shape} and targets {targets.shape}")
        flat = targets.reshape(-1)
        check_targets(flat, logits.shape[-1], ignore)
        total, lse = kernels.cross_entropy(logits.reshape(rows_of(logits)), flat, ignore)
        return total, (logits, targets, lse)

    @staticmethod
    def backward(
        grad: Array, logits: Array, targets: Array, lse: Array, *, wanted: tuple[bool, ...], ignore: int
    ) -> tuple[Any, ...]:
        d_logits = kernels.cross_entropy_backward(
            grad, logits.reshape(rows_of(logits)), targets.reshape(-1), lse, ignore
        )
        return d_logits.reshape(logits.shape), None


def check_targets(targets: Array, classes: int, ignore: int) -> None:
    """Refuse targets on the host that are no class; a device would have to be waited for.

    Raises:
        DataError: one that counts is not in [0, classes).
    """
    if at_hand(targets):
        wrong = (targets != ignore) & ((targets < 0) | (targets >= classes))
        if wrong.any():
            raise DataError(f"softmax_cross_entropy: target {targets[wrong][0]}, but the logits have {classes} classes")


# ------------------------------------------------------------------------------------------------------- as functions


def linear(x: Tensor, w: Tensor, b: Tensor | None = None, dtype: Any = None) -> Tensor:
    """x w + b.

    Args:
        x: (..., n).
        w: (n, m).
        b: (m,), or None.
        dtype: of the result; None: that of x and w.  float32 of halves is the product as it was formed.

    Returns:
        (..., m).

    Raises:
        ShapeError: x and w do not go together.

    Cost: 2 n m floating-point operations a row, 4 n m in backward.
    """
    inputs = (x, w) if b is None else (x, w, b)
    return Linear.apply(*inputs) if dtype is None else Linear.apply(*inputs, dtype=np.dtype(dtype))


def gelu_tanh(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """z/2 (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))) of z = x + bias: GPT-2's activation.

    Args:
        x: (..., d).
        bias: (d,), of the layer before; None: z is x.

    Raises:
        ShapeError: the bias has another length or dtype.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
    """
    return GeluTanh.apply(x) if bias is None else GeluTanh.apply(x, bias)


def gelu_erf(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """z Phi(z) of z = x + bias, Phi the normal distribution function; otherwise as `gelu_tanh`."""
    return GeluErf.apply(x) if bias is None else GeluErf.apply(x, bias)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim; statistics in at least float32.

    Args:
        x: (..., d).
        weight: (d,).
        bias: (d,).
        eps: added to the variance.

    Raises:
        ShapeError: the lengths differ.

    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.
    """
    return LayerNorm.apply(x, weight, bias, eps=eps)


def softmax_cross_entropy(logits: Tensor, targets: Array, ignore: int = IGNORE) -> Tensor:
    """The SUM over targets that count of -log softmax(logits)[target].

    The sum, not the mean: the mean is taken once, over the tokens of all ranks and micro-batches.

    Args:
        logits: (..., v).
        targets: integer array (...); the value `ignore` does not count.

    Returns:
        () in at least float32; 0 if no target counts, and then all gradients are 0.

    Raises:
        ShapeError: the shapes do not go together.
        DataError: a target is none of the v classes.
    """
    return SoftmaxCrossEntropy.apply(logits, targets, ignore=ignore)
