"""The fast versions: the same names as the references, computed by `csrc` where the arrays allow it.

Here each call is looked at once: NumPy arrays of float32 or float64 (of one dtype) go to C, anything else (a device,
half precision, an unusual layout where copying would not pay) goes to the reference.  What comes out is allocated here,
so that NumPy, and whoever counts its memory, knows of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend import Array
from mpitrain.kernels import _compiled, reference
from mpitrain.kernels.reference.residual import keep_scale
from mpitrain.kernels.reference.update import adamw_numbers

levels, use = _compiled.levels, _compiled.use

_SINGLE = np.dtype(np.float32)
_PRECISIONS = (_SINGLE, np.dtype(np.float64))
_HALVES = ("float16", "bfloat16")


def _fits(first: Array, *others: Array | None) -> bool:
    """Whether all are NumPy arrays of the first one's dtype, and that is one which C computes in."""
    if type(first) is not np.ndarray:
        return False
    dtype = first.dtype
    if dtype not in _PRECISIONS:  # equal, not the same object: an array that was pickled has a dtype of its own
        return False
    for array in others:  # noqa: SIM110 - a generator would take twice as long
        if array is not None and (type(array) is not np.ndarray or array.dtype != dtype):
            return False
    return True


def _solid(x: Array) -> Array:
    """The same values, C-contiguous, each at a multiple of its size."""
    flags = x.flags
    return x if flags.c_contiguous and flags.aligned else x.copy()


def _integers(x: Array) -> Array:
    return _solid(x.astype(np.int64, copy=False))


def _threshold(p: float) -> int:
    """The lowest word that is kept; 2^32, which C does not take, keeps none."""
    return round(p * 2**32)


# ------------------------------------------------------------------------------------------- GELU, residual, dropout


def gelu_tanh(x: Array, bias: Array | None = None) -> tuple[Array, Array]:
    return _gelu(0, x, bias) if _fits(x, bias) else reference.gelu_tanh(x, bias)


def gelu_erf(x: Array, bias: Array | None = None) -> tuple[Array, Array]:
    return _gelu(1, x, bias) if _fits(x, bias) else reference.gelu_erf(x, bias)


def _gelu(exact: int, x: Array, bias: Array | None) -> tuple[Array, Array]:
    y, slope = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
    _compiled.gelu(exact, _solid(x), None if bias is None else _solid(bias), y, slope)
    return y, slope


def gelu_backward(grad: Array, slope: Array, with_bias: bool) -> tuple[Array, Array | None]:
    if not _fits(slope, grad):
        return reference.gelu_backward(grad, slope, with_bias)
    dx = np.empty(slope.shape, slope.dtype)
    db = np.empty(slope.shape[-1], slope.dtype) if with_bias else None
    scratch = np.empty(0 if db is None else db.size, slope.dtype)
    _compiled.gelu_backward(_solid(grad), _solid(slope), dx, db, scratch)
    return dx, db


def dropout(x: Array, rows: Array, p: float) -> Array:
    threshold = _threshold(p)
    if not _fits(x) or type(rows) is not np.ndarray or threshold >= 2**32 or not 0 < x.size < 2**32:
        return reference.dropout(x, rows, p)
    y = np.empty(x.shape, x.dtype)
    _compiled.dropout(_solid(x), _solid(rows), threshold, keep_scale(p), y)
    return y


def residual(x: Array, y: Array, bias: Array | None, rows: Array | None, p: float) -> Array:
    threshold = _threshold(p)
    if not _fits(x, y, bias) or x.shape != y.shape or threshold >= 2**32 or not 0 < x.size < 2**32:
        return reference.residual(x, y, bias, rows, p)
    out = np.empty(x.shape, x.dtype)
    bias = None if bias is None else _solid(bias)
    rows = None if rows is None else _solid(rows)
    _compiled.residual(_solid(x), _solid(y), bias, rows, threshold, keep_scale(p), out)
    return out


# --------------------------------------------------------------------------------------------------------- layer norm


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    if not _fits(x, weight, bias):
        return reference.layer_norm(x, weight, bias, eps)
    num_rows = x.size // x.shape[-1] if x.size else 0
    y = np.empty(x.shape, x.dtype)
    center, rstd = np.empty((num_rows, 1), x.dtype), np.empty((num_rows, 1), x.dtype)
    _compiled.layer_norm(_solid(x), _solid(weight), _solid(bias), eps, y, center, rstd)
    return y, center, rstd


def residual_norm(
    x: Array, y: Array, branch_bias: Array | None, rows: Array | None, p: float, weight: Array, bias: Array, eps: float
) -> tuple[Array, Array, Array, Array]:
    threshold = _threshold(p)
    fits = _fits(x, y, branch_bias, weight, bias) and x.shape == y.shape
    if not fits or threshold >= 2**32 or not 0 < x.size < 2**32:
        return reference.residual_norm(x, y, branch_bias, rows, p, weight, bias, eps)
    total, out = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
    num_rows = x.size // x.shape[-1]
    center, rstd = np.empty((num_rows, 1), x.dtype), np.empty((num_rows, 1), x.dtype)
    branch_bias = None if branch_bias is None else _solid(branch_bias)
    rows = None if rows is None else _solid(rows)
    norm = _solid(weight), _solid(bias), eps
    _compiled.residual_norm(
        _solid(x), _solid(y), branch_bias, rows, threshold, keep_scale(p), *norm, total, out, center, rstd
    )
    return total, out, center, rstd


def layer_norm_backward(
    grad: Array, x: Array, center: Array, rstd: Array, weight: Array, extra: Array | None = None
) -> tuple[Array, Array, Array]:
    if not _fits(x, grad, weight, center, rstd, extra):
        return reference.layer_norm_backward(grad, x, center, rstd, weight, extra)
    width = x.shape[-1]
    dx, dw, db = np.empty(x.shape, x.dtype), np.empty(width, x.dtype), np.empty(width, x.dtype)
    scratch = np.empty(2 * width, x.dtype)
    extra = None if extra is None else _solid(extra)
    center, rstd, weight = _solid(center), _solid(rstd), _solid(weight)
    _compiled.layer_norm_backward(_solid(grad), extra, _solid(x), center, rstd, weight, dx, dw, db, scratch)
    return dx, dw, db


# -------------------------------------------------------------------------------------------- softmax and cross-entropy


def softmax(x: Array, dim: int, mask: Array | None) -> Array:
    if not _fits(x) or mask is not None or x.ndim == 0 or dim not in (-1, x.ndim - 1):
        return reference.softmax(x, dim, mask)
    y = np.empty(x.shape, x.dtype)
    _compiled.softmax(_solid(x), y)
    return y


def softmax_backward(grad: Array, y: Array, dim: int) -> Array:
    if not _fits(y, grad) or y.ndim == 0 or dim not in (-1, y.ndim - 1):
        return reference.softmax_backward(grad, y, dim)
    dx = np.empty(y.shape, y.dtype)
    _compiled.softmax_backward(_solid(grad), _solid(y), dx)
    return dx


def cross_entropy(logits: Array, targets: Array, ignore: int) -> tuple[Array, Array]:
    if not _fits(logits) or type(targets) is not np.ndarray or logits.shape[1] == 0:
        return reference.cross_entropy(logits, targets, ignore)
    lse = np.empty(logits.shape[0], logits.dtype)
    total = _compiled.cross_entropy(_solid(logits), _integers(targets), ignore, lse)
    return np.asarray(total, logits.dtype), lse


def cross_entropy_backward(grad: Array, logits: Array, targets: Array, lse: Array, ignore: int) -> Array:
    if not _fits(logits, lse) or type(targets) is not np.ndarray or grad.ndim or logits.shape[1] == 0:
        return reference.cross_entropy_backward(grad, logits, targets, lse, ignore)
    out = np.empty(logits.shape, logits.dtype)
    _compiled.cross_entropy_backward(float(grad), _solid(logits), _integers(targets), _solid(lse), ignore, out)
    return out


# ---------------------------------------------------------------------------------------------------------- attention


def attention(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    *,
    scale: float,
    causal: bool,
    mask: Array | None,
    rows: Array | None,
    drop: float,
    keys: Array | None = None,
) -> Array:
    if not _attends(q, k, v, out) or _threshold(drop) >= 2**32:
        return reference.attention(q, k, v, out, scale=scale, causal=causal, mask=mask, rows=rows, drop=drop, keys=keys)
    lse = np.empty(q.shape[:3], q.dtype)
    _compiled.attention(lse, q, k, v, out, *_setting(q, k, scale, causal, mask, rows, drop, keys, backward=False))
    return lse


def attention_backward(
    grad: Array,
    q: Array,
    k: Array,
    v: Array,
    y: Array,
    lse: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    *,
    scale: float,
    causal: bool,
    mask: Array | None,
    rows: Array | None,
    drop: float,
    keys: Array | None = None,
) -> None:
    fits = _attends(q, k, v, y, dq, dk, dv) and _fits(q, lse) and type(grad) is np.ndarray
    if not fits or _threshold(drop) >= 2**32:
        reference.attention_backward(
            grad, q, k, v, y, lse, dq, dk, dv, scale=scale, causal=causal, mask=mask, rows=rows, drop=drop, keys=keys
        )
        return
    if not _attends(grad):  # a gradient may come broadcast or transposed
        grad = grad.astype(q.dtype, order="C")
    setting = _setting(q, k, scale, causal, mask, rows, drop, keys, backward=True)
    _compiled.attention_backward(_solid(lse), grad, q, k, v, y, dq, dk, dv, *setting)


def _attends(*arrays: Array) -> bool:
    """Whether C can read (b, h, s, d) arrays as they lie: not empty, and without gaps in the last dim."""
    return _fits(*arrays) and all(
        x.size > 0 and x.flags.aligned and (x.strides[3] == x.itemsize or x.shape[3] == 1) for x in arrays
    )


def _setting(
    q: Array,
    k: Array,
    scale: float,
    causal: bool,
    mask: Array | None,
    rows: Array | None,
    drop: float,
    keys: Array | None,
    *,
    backward: bool,
) -> tuple[Any, ...]:
    s, d = q.shape[2:]
    t = k.shape[2]
    scratch = np.empty(_compiled.attention_scratch(s, t, d, q.itemsize, backward), np.uint8)
    rows = None if rows is None else _solid(rows)
    keys = None if keys is None else _integers(keys)
    return causal, scale, mask, rows, keys, _threshold(drop), keep_scale(drop), scratch


# ------------------------------------------------------------------------------------------- embedding and optimizer


def row_sum(ids: Array, rows: Array, out: Array) -> None:
    if not _fits(rows, out) or not out.flags.carray or type(ids) is not np.ndarray:
        reference.row_sum(ids, rows, out)
        return
    _compiled.row_sum(_integers(ids), _solid(rows), out)


def adamw(
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    *,
    update: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    if _fits(p, g, m, v) and p.flags.carray and m.flags.carray and v.flags.carray:
        _compiled.adamw(p, _solid(g), m, v, *adamw_numbers(update, lr, beta1, beta2, eps, weight_decay))
        return
    reference.adamw(p, g, m, v, update=update, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)


def sum_of_squares(x: Array) -> Any:
    return _compiled.sum_of_squares(_solid(x)) if _fits(x) else reference.sum_of_squares(x)


# ------------------------------------------------------------------------------------------------------------- halves


def widen(x: Array, out: Array | None = None) -> Array:
    if type(x) is not np.ndarray or not _is_half(x.dtype):
        return reference.widen(x, out)
    into = out if out is not None and out.dtype == _SINGLE and out.flags.carray else np.empty(x.shape, np.float32)
    _compiled.widen(x.dtype.name == "bfloat16", _solid(x).view(np.uint16), into)
    return _delivered(into, out)


def narrow(x: Array, dtype: Any, out: Array | None = None) -> Array:
    dtype = np.dtype(dtype)
    if type(x) is not np.ndarray or x.dtype != _SINGLE or not _is_half(dtype):
        return reference.narrow(x, dtype, out)
    into = out if out is not None and out.dtype == dtype and out.flags.carray else np.empty(x.shape, dtype)
    _compiled.narrow(dtype.name == "bfloat16", _solid(x), into.view(np.uint16))
    return _delivered(into, out)


def _is_half(dtype: np.dtype[Any]) -> bool:
    return dtype.name in _HALVES and dtype.isnative  # the other byte order has the same name


def _delivered(made: Array, out: Array | None) -> Array:
    if out is None or made is out:
        return made
    out[...] = made
    return out
