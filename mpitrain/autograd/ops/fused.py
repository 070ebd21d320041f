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
        return y.reshape(*x.shape[:-1], w.shape[1]), (x, w, None if b is None else b.dtype)

    @staticmethod
    def backward(grad: Array, x: Array, w: Array, b_dtype: Any, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        g = grad.reshape(rows_of(grad))
        dx = kernels.matmul(g, w.T).reshape(x.shape).astype(x.dtype, copy=False) if wanted[0] else None
        dw = Product(x.reshape(rows_of(x)).T, g, w.dtype) if wanted[1] else None
        if len(wanted) == 2:
            return dx, dw
        return dx, dw, kernels.sum_rows(g).astype(b_dtype, copy=False) if wanted[2] else None


class GeluTanh(Function):
    """GELU in tanh form of x, or of x + bias; saves its slope, in the place of its input."""

    @staticmethod
    def forward(x: Array, bias: Array | None = None) -> tuple[Array, tuple[Any, ...]]:
        _check_bias("gelu_tanh", x, bias)
        y, slope = kernels.gelu_tanh(x, bias)
        return y, (slope,)

    @staticmethod
    def backward(grad: Array, slope: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        dx, db = kernels.gelu_backward(grad, slope, with_bias=len(wanted) == 2 and wanted[1])
        return (dx,) if len(wanted) == 1 else (dx, db)


class GeluErf(GeluTanh):
    """GELU in its exact form of x, or of x + bias; saves its slope, in the place of its input."""

    @staticmethod
    def forward(x: Array, bias: Array | None = None) -> tuple[Array, tuple[Any, ...]]:
        _check_bias("gelu_erf", x, bias)
        y, slope = kernels.gelu_erf(x, bias)
        return y, (slope,)


def _check_bias(op: str, x: Array, bias: Array | None) -> None:
    if bias is not None and (x.ndim == 0 or bias.shape != x.shape[-1:] or bias.dtype != x.dtype):
        raise ShapeError(f"{op}: x {x.shape} {x.dtype} and bias {bias.shape} {bias.dtype} do not go together")


class LayerNorm(Function):
    """Normalise over the last dim; saves its input and two numbers a row."""

    @staticmethod
    def forward(x: Array, weight: Array, bias: Array, *, eps: float) -> tuple[Array, tuple[Any, ...]]:
        _check_norm("layer_norm", x, weight, bias)
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
        return dx, dw, db.astype(b_dtype, copy=False)


def _check_norm(op: str, x: Array, weight: Array, bias: Array) -> None:
    if x.ndim == 0 or x.shape[-1:] != weight.shape or weight.shape != bias.shape:
        raise ShapeError(f"{op}: x {x.shape}, weight {weight.shape}, bias {bias.shape} do not go together")


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
    """Zero elements at random and scale the others up; saves the hashes of the rows.

    The mask is a pure function of the rows' hashes: it is made again in backward, and nothing as large as x waits.
    """

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

    @staticmethod
    def forward(
        x: Array, y: Array, bias: Array | None, rows: Array | None, *, p: float
    ) -> tuple[Array, tuple[Any, ...]]:
        _check_branch("residual", x, y, bias)
        return kernels.residual(x, y, bias, rows, p), (rows,)

    @staticmethod
    def backward(grad: Array, rows: Array | None, *, wanted: tuple[bool, ...], p: float) -> tuple[Any, ...]:
        return grad, *_branch_gradients(grad, rows, wanted, p), None


class ResidualNorm(Function):
    """(x + dropout(y + branch_bias), its layer norm); saves the sum, two numbers a row, and the dropout's hashes.

    Inputs x, y, branch_bias (or None), rows (or None), weight, bias.
    """

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
        _check_branch("residual_norm", x, y, branch_bias)
        _check_norm("residual_norm", x, weight, bias)
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
            d_bias = d_bias.astype(b_dtype, copy=False)
        return grad, *_branch_gradients(grad, rows, wanted, p), None, d_weight, d_bias


def _check_branch(op: str, x: Array, y: Array, bias: Array | None) -> None:
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ShapeError(f"{op}: x {x.shape} {x.dtype} and y {y.shape} {y.dtype} differ")
    _check_bias(op, y, bias)


def _branch_gradients(grad: Array, rows: Array | None, wanted: tuple[bool, ...], p: float) -> tuple[Any, Any]:
    """Gradients of a branch y and its bias from that of x + dropout(y + bias)."""
    if not (wanted[1] or wanted[2]):
        return None, None
    dy = grad if rows is None else kernels.dropout(grad, rows, p)
    return dy, kernels.sum_rows(dy) if wanted[2] else None


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
    _check_rows("dropout", x, rows)
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
    _check_rows("residual", y, rows)
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
    _check_rows("residual_norm", y, rows)
    return ResidualNorm.apply(x, y, branch_bias, rows if p else None, weight, bias, p=p, eps=eps)


def _check_rows(op: str, x: Tensor, rows: Array | None) -> None:
    if rows is not None and rows.shape != x.shape[:-1]:
        raise ShapeError(f"{op}: x {x.shape} wants rows {x.shape[:-1]}, got {rows.shape}")
