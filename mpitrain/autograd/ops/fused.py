"""Whole layers as one operation: fewer passes over memory, and only what backward needs is kept.

Each Function here is a thin shell: its numerics are a kernel of `mpitrain.kernels`, its backward says which of them to
call.  What waits for backward is chosen to be cheap: an array that a neighbour saves anyway (it counts once), or one
that takes the place of the input, or a number a row.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain import kernels
from mpitrain.autograd.function import Function
from mpitrain.autograd.lazy import Product
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module
from mpitrain.errors import DataError, ShapeError
from mpitrain.kernels.blocks import rows_of, wide
from mpitrain.rng import keep_mask

IGNORE = -100
"""The target of a token that does not count in the loss."""


class Linear(Function):
    """y = x w + b over the last dim; saves x.  dw is a `Product`, written straight into the gradient buffer."""

    linear = (0, 2)

    @staticmethod
    def forward(x: Array, w: Array, b: Array | None = None) -> tuple[Array, tuple[Any, ...]]:
        if x.ndim == 0 or x.shape[-1] != w.shape[0]:
            raise ShapeError(f"linear: x {x.shape} ends in another length than w {w.shape} begins with")
        y = kernels.matmul(x.reshape(rows_of(x)), w)
        if b is not None:
            y += b
        return y.reshape(*x.shape[:-1], w.shape[1]), (x, w)

    @staticmethod
    def backward(grad: Array, x: Array, w: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        g = grad.reshape(rows_of(grad))
        dx = kernels.matmul(g, w.T).reshape(x.shape).astype(x.dtype, copy=False) if wanted[0] else None
        dw = Product(x.reshape(rows_of(x)).T, g, w.dtype) if wanted[1] else None
        if len(wanted) == 2:
            return dx, dw
        return dx, dw, kernels.sum_rows(g) if wanted[2] else None


class GeluTanh(Function):
    """GELU in tanh form; saves its slope, in the place of its input."""

    @staticmethod
    def forward(x: Array) -> tuple[Array, tuple[Any, ...]]:
        y, slope = kernels.gelu_tanh(x)
        return y, (slope,)

    @staticmethod
    def backward(grad: Array, slope: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        return (grad * slope,)


class GeluErf(GeluTanh):
    """GELU in its exact form; saves its slope, in the place of its input."""

    @staticmethod
    def forward(x: Array) -> tuple[Array, tuple[Any, ...]]:
        y, slope = kernels.gelu_erf(x)
        return y, (slope,)


class LayerNorm(Function):
    """Normalise over the last dim; saves its input and two numbers a row."""

    @staticmethod
    def forward(x: Array, weight: Array, bias: Array, *, eps: float) -> tuple[Array, tuple[Any, ...]]:
        if x.shape[-1:] != weight.shape or weight.shape != bias.shape:
            raise ShapeError(f"layer_norm: x {x.shape}, weight {weight.shape}, bias {bias.shape} do not go together")
        y, center, rstd = kernels.layer_norm(x, weight, bias, eps)
        return y, (x, center, rstd, weight)

    @staticmethod
    def backward(
        grad: Array, x: Array, center: Array, rstd: Array, weight: Array, *, wanted: tuple[bool, ...], eps: float
    ) -> tuple[Any, ...]:
        return kernels.layer_norm_backward(grad, x, center, rstd, weight)


class Attention(Function):
    """Self-attention of all heads on fused queries, keys and values; saves those, its output, a number a query."""

    @staticmethod
    def forward(
        qkv: Array, mask: Array | None, rows: Array | None, *, heads: int, causal: bool, drop: float
    ) -> tuple[Array, tuple[Any, ...]]:
        b, s, width = qkv.shape
        xp = array_module(qkv)
        q, k, v = _heads(qkv.astype(wide(qkv.dtype), copy=False), heads)
        y = xp.empty((b, s, width // 3), q.dtype)
        out = _by_head(y, heads)
        scale = 1.0 / math.sqrt(q.shape[3])
        lse = kernels.attention(q, k, v, out, scale=scale, causal=causal, mask=mask, rows=rows, drop=drop)
        y = y.astype(qkv.dtype, copy=False)
        return y, (qkv, mask, rows, y, lse)

    @staticmethod
    def backward(
        grad: Array,
        qkv: Array,
        mask: Array | None,
        rows: Array | None,
        y: Array,
        lse: Array,
        *,
        wanted: tuple[bool, ...],
        heads: int,
        causal: bool,
        drop: float,
    ) -> tuple[Any, ...]:
        xp = array_module(qkv)
        compute = wide(qkv.dtype)
        q, k, v = _heads(qkv.astype(compute, copy=False), heads)
        g, y = (_by_head(array.astype(compute, copy=False), heads) for array in (grad, y))
        d_qkv = xp.empty(qkv.shape, compute)
        scale = 1.0 / math.sqrt(q.shape[3])
        kernels.attention_backward(
            g, q, k, v, y, lse, *_heads(d_qkv, heads), scale=scale, causal=causal, mask=mask, rows=rows, drop=drop
        )
        return d_qkv.astype(qkv.dtype, copy=False), None, None


def _by_head(y: Array, heads: int) -> Array:
    """(b, s, heads * d) as (b, heads, s, d), a view."""
    b, s, width = y.shape
    return y.reshape(b, s, heads, width // heads).swapaxes(1, 2)


def _heads(qkv: Array, heads: int) -> tuple[Array, Array, Array]:
    """Queries, keys and values (b, heads, s, d) as views of (b, s, heads * 3 * d)."""
    b, s, width = qkv.shape
    parts = qkv.reshape(b, s, heads, 3, width // (3 * heads)).transpose(3, 0, 2, 1, 4)
    return parts[0], parts[1], parts[2]


class SoftmaxCrossEntropy(Function):
    """Sum of the cross-entropies of the rows that count; saves the logits and a number a row."""

    @staticmethod
    def forward(logits: Array, targets: Array, *, ignore: int) -> tuple[Array, tuple[Any, ...]]:
        if logits.shape[:-1] != targets.shape:
            raise ShapeError(f"softmax_cross_entropy: logits {logits.shape} and targets {targets.shape}")
        v = logits.shape[-1]
        flat = targets.reshape(-1)
        if array_module(flat) is np:  # a device would have to be waited for
            wrong = (flat != ignore) & ((flat < 0) | (flat >= v))
            if wrong.any():
                raise DataError(f"softmax_cross_entropy: target {flat[wrong][0]}, but the logits have {v} classes")
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


class Dropout(Function):
    """Zero elements at random and scale the others up; saves the mask, a byte an element.

    The mask is a pure function of its row hashes and could be made again: that costs three times the product it is
    for, and saves a byte where the activation next to it takes four.
    """

    linear = (0,)

    @staticmethod
    def forward(x: Array, rows: Array, *, p: float) -> tuple[Array, tuple[Any, ...]]:
        keep = keep_mask(rows, x.shape[-1], p)
        return _masked(x, keep, p), (keep,)

    @staticmethod
    def backward(grad: Array, keep: Array, *, wanted: tuple[bool, ...], p: float) -> tuple[Any, ...]:
        return _masked(grad, keep, p), None


def _masked(x: Array, keep: Array, p: float) -> Array:
    y = x * keep
    y *= 1.0 / (1.0 - p) if p < 1.0 else 0.0
    return y


# ------------------------------------------------------------------------------------------------------- as functions


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """x w + b.

    Args:
        x: (..., n).
        w: (n, m).
        b: (m,), or None.

    Returns:
        (..., m).

    Raises:
        ShapeError: x and w do not go together.

    Cost: 2 n m floating-point operations a row, 4 n m in backward.
    """
    return Linear.apply(x, w) if b is None else Linear.apply(x, w, b)


def gelu_tanh(x: Tensor) -> Tensor:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): GPT-2's activation.  Source: arXiv:1606.08415, section 2."""
    return GeluTanh.apply(x)


def gelu_erf(x: Tensor) -> Tensor:
    """x Phi(x), Phi the normal distribution function.  Source: arXiv:1606.08415, section 2."""
    return GeluErf.apply(x)


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


def attention(
    qkv: Tensor,
    heads: int,
    *,
    causal: bool = True,
    mask: Array | None = None,
    rows: Array | None = None,
    drop: float = 0.0,
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v for each head.

    Args:
        qkv: (b, s, heads * 3 * d), the last dim in the order (head, query | key | value, d): a slice of it along whole
            heads is again a qkv, so a rank can hold some of the heads by holding some of the columns.
        heads: how many heads `qkv` holds.
        causal: position i sees positions 0..i only.
        mask: bool array, True where attention is allowed besides that: (b, s) by key (padding), (b, s, s) by query and
            key (documents), or anything that broadcasts to (b, heads, s, s).
        rows: uint64 (b, heads, s) from `Draw.attention_rows`, for dropout of the attention weights; None: no dropout.
        drop: the probability with which a weight is dropped.

    Returns:
        (b, s, heads * d).  A query that may see no position gives 0, and its gradient is exactly 0.

    Raises:
        ShapeError: the width is not heads * 3 * d, or the mask or the rows have another shape.

    Cost: memory for backward grows with s, not s^2; scores are made again in backward.
    Source: Vaswani et al. 2017, arXiv:1706.03762, eq. 1; Dao et al. 2022, arXiv:2205.14135.
    """
    if qkv.ndim != 3 or heads < 1 or qkv.shape[2] % (3 * heads):
        raise ShapeError(f"attention: qkv {qkv.shape} is not (batch, sequence, heads * 3 * width) for {heads} heads")
    b, s, _ = qkv.shape
    if mask is not None:
        given = mask.shape
        if mask.ndim == 2:
            mask = mask[:, None, None, :]
        elif mask.ndim == 3:
            mask = mask[:, None]
        fits = mask.ndim == 4 and all(n in (1, m) for n, m in zip(mask.shape, (b, heads, s, s), strict=True))
        if not fits or mask.dtype != bool:
            raise ShapeError(
                f"attention: a mask of shape {given} and dtype {mask.dtype}; wanted is bool, ({b}, {s}) by key or"
                f" ({b}, {s}, {s}) by query and key"
            )
    if drop and rows is None:
        raise ShapeError("attention: dropout needs rows, the random stream of each query")
    if rows is not None and rows.shape != (b, heads, s):
        raise ShapeError(f"attention: rows {rows.shape}; wanted is one a query of each head, ({b}, {heads}, {s})")
    if not drop:
        rows = None
    return Attention.apply(qkv, mask, rows, heads=heads, causal=causal, drop=drop)


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


def dropout(x: Tensor, rows: Array, p: float) -> Tensor:
    """Zero each element with probability p, scale the others by 1 / (1 - p).

    Args:
        x: (..., d).
        rows: uint64 (...), the random stream of each row (`Draw.rows`); the same rows give the same mask.
        p: probability of zero.

    Raises:
        ShapeError: rows is not x's shape without the last dim.
    """
    if rows.shape != x.shape[:-1]:
        raise ShapeError(f"dropout: x {x.shape} wants rows {x.shape[:-1]}, got {rows.shape}")
    return Dropout.apply(x, rows, p=p) if p else x
