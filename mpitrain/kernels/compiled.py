"""The fast versions: the same names as the references, computed by `csrc` where the arrays allow it.

Here each call is looked at once: NumPy arrays of float32, float64 or a half precision (of one dtype) go to C, anything
else (a device, an unusual layout where copying would not pay) goes to the reference.  What comes out is allocated here,
so that NumPy, and whoever counts its memory, knows of it.

Halves are widened in C, by blocks of rows that stay in cache, and what becomes of them is narrowed there; vectors of
weights are widened here, statistics of rows and sums over them are float32.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np

from mpitrain.backend import Array, is_half, wide
from mpitrain.kernels import _compiled, reference
from mpitrain.kernels.compiled_images import (  # noqa: F401 - kernels by name
    conv2d,
    conv2d_filters,
    conv2d_images,
    max_pool2d,
    max_pool2d_backward,
)
from mpitrain.kernels.reference.products import multiply, product_dtype
from mpitrain.kernels.reference.residual import keep_scale
from mpitrain.kernels.reference.rotary import packed, unpacked
from mpitrain.kernels.reference.update import adamw_numbers, each_run, each_sgd
from mpitrain.kernels.several import AdamwRun, Several, SgdRun

levels, use = _compiled.levels, _compiled.use

_SINGLE = np.dtype(np.float32)
_DOUBLE = np.dtype(np.float64)
_PRECISIONS = (_SINGLE, np.dtype(np.float64))
SPARE = 4_096
"""Floats in which C computes with a block of halves: 16 KiB, so that they stay in a core's first cache."""


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


def _precision(first: Array, *others: Array | None, beside: tuple[Array | None, ...] = ()) -> Any:
    """The dtype that C computes in for these arrays; None: it cannot.

    Args:
        first, others: NumPy arrays of one dtype.
        beside: of that in which is computed, or of first's.
    """
    if not _fits(first, *others) and not (type(first) is np.ndarray and _is_half(first.dtype)):
        return None
    dtype = first.dtype
    if dtype in _PRECISIONS:
        return dtype if _fits(first, *beside) else None
    for array in others:
        if array is not None and (type(array) is not np.ndarray or array.dtype != dtype):
            return None
    for array in beside:
        if array is not None and (type(array) is not np.ndarray or (array.dtype != dtype and array.dtype != _SINGLE)):
            return None
    return _SINGLE


def _solid(x: Array) -> Array:
    """The same values, C-contiguous, each at a multiple of its size."""
    flags = x.flags
    return x if flags.c_contiguous and flags.aligned else x.copy()


def _raw(x: Array) -> Array:
    """An array as C takes it: bfloat16, which the buffer protocol does not know, by its bits."""
    return x if x.dtype.kind == "f" else x.view(np.uint16)


def _given(x: Array | None) -> Array | None:
    return None if x is None else _raw(_solid(x))


def _vector(x: Array | None, dtype: Any) -> Array | None:
    """A vector of weights in the dtype to compute in."""
    if x is None:
        return None
    return _solid(x) if x.dtype == dtype else widen(x)


def _spare(x: Array, dtype: Any, operands: int, width: int) -> Array | None:
    """Room for a block of each of so many operands, seen as rows of `width` of x's dtype; None where C needs none."""
    if x.dtype == dtype or not width:
        return None if x.dtype == dtype else np.empty(0, dtype)
    rows = min(x.size // width, max(1, SPARE // (operands * width)))
    return np.empty(operands * width * max(1, rows), dtype)


def _integers(x: Array) -> Array:
    return _solid(x.astype(np.int64, copy=False))


def _threshold(p: float) -> int:
    """The lowest word that is kept; 2^32, which C does not take, keeps none."""
    return round(p * 2**32)


# ------------------------------------------------------------------------------------------- GELU, residual, dropout


def gelu_tanh(x: Array, bias: Array | None = None) -> tuple[Array, Array]:
    return _gelu(0, x, bias, reference.gelu_tanh)


def gelu_erf(x: Array, bias: Array | None = None) -> tuple[Array, Array]:
    return _gelu(1, x, bias, reference.gelu_erf)


def _gelu(exact: int, x: Array, bias: Array | None, plain: Any) -> tuple[Array, Array]:
    compute = _precision(x, beside=(bias,))
    if compute is None:
        result: tuple[Array, Array] = plain(x, bias)
        return result
    y, slope = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
    spare = _spare(x, compute, 3, 1 if bias is None else bias.size)
    _compiled.gelu(exact, _given(x), _vector(bias, compute), _raw(y), _raw(slope), spare)
    return y, slope


def gelu_backward(grad: Array, slope: Array, with_bias: bool) -> tuple[Array, Array | None]:
    compute = _precision(slope, grad)
    if compute is None:
        return reference.gelu_backward(grad, slope, with_bias)
    dx = np.empty(slope.shape, slope.dtype)
    db = np.empty(slope.shape[-1], compute) if with_bias else None
    group = np.empty(0 if db is None else db.size, compute)
    spare = _spare(slope, compute, 3, 1 if db is None else db.size)
    _compiled.gelu_backward(_given(grad), _given(slope), _raw(dx), db, group, spare)
    return dx, db


def dropout(x: Array, rows: Array, p: float) -> Array:
    threshold, compute = _threshold(p), _precision(x)
    if compute is None or type(rows) is not np.ndarray or threshold >= 2**32 or not 0 < x.size < 2**32:
        return reference.dropout(x, rows, p)
    y = np.empty(x.shape, x.dtype)
    spare = _spare(x, compute, 2, x.shape[-1])
    _compiled.dropout(_given(x), _solid(rows), threshold, keep_scale(p), _raw(y), spare)
    return y


def residual(x: Array, y: Array, bias: Array | None, rows: Array | None, p: float) -> Array:
    threshold, compute = _threshold(p), _precision(x, y, beside=(bias,))
    if compute is None or x.shape != y.shape or threshold >= 2**32 or not 0 < x.size < 2**32:
        return reference.residual(x, y, bias, rows, p)
    out = np.empty(x.shape, x.dtype)
    rows = None if rows is None else _solid(rows)
    spare = _spare(x, compute, 3, x.shape[-1] if x.ndim else 1)
    branch = _given(y), _vector(bias, compute), rows, threshold, keep_scale(p)
    _compiled.residual(_given(x), *branch, _raw(out), spare)
    return out


# --------------------------------------------------------------------------------------------------------- layer norm


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    compute = _precision(x, beside=(weight, bias))
    if compute is None:
        return reference.layer_norm(x, weight, bias, eps)
    num_rows = x.size // x.shape[-1] if x.size else 0
    y = np.empty(x.shape, x.dtype)
    center, rstd = np.empty((num_rows, 1), compute), np.empty((num_rows, 1), compute)
    norm = _vector(weight, compute), _vector(bias, compute), eps
    _compiled.layer_norm(_given(x), *norm, _raw(y), center, rstd, _spare(x, compute, 2, x.shape[-1]))
    return y, center, rstd


def residual_norm(
    x: Array, y: Array, branch_bias: Array | None, rows: Array | None, p: float, weight: Array, bias: Array, eps: float
) -> tuple[Array, Array, Array, Array]:
    threshold = _threshold(p)
    compute = _precision(x, y, beside=(branch_bias, weight, bias))
    if compute is None or x.shape != y.shape or threshold >= 2**32 or not 0 < x.size < 2**32:
        return reference.residual_norm(x, y, branch_bias, rows, p, weight, bias, eps)
    total, out = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
    num_rows = x.size // x.shape[-1]
    center, rstd = np.empty((num_rows, 1), compute), np.empty((num_rows, 1), compute)
    rows = None if rows is None else _solid(rows)
    branch = _given(y), _vector(branch_bias, compute), rows, threshold, keep_scale(p)
    norm = _vector(weight, compute), _vector(bias, compute), eps
    spare = _spare(x, compute, 4, x.shape[-1])
    _compiled.residual_norm(_given(x), *branch, *norm, _raw(total), _raw(out), center, rstd, spare)
    return total, out, center, rstd


def layer_norm_backward(
    grad: Array, x: Array, center: Array, rstd: Array, weight: Array, extra: Array | None = None
) -> tuple[Array, Array, Array]:
    compute = _precision(x, grad, extra, beside=(weight,))
    if compute is None or center.dtype != compute or rstd.dtype != compute:
        return reference.layer_norm_backward(grad, x, center, rstd, weight, extra)
    width = x.shape[-1]
    dx, dw, db = np.empty(x.shape, x.dtype), np.empty(width, compute), np.empty(width, compute)
    norm = _solid(center), _solid(rstd), _vector(weight, compute)
    groups, spare = np.empty(2 * width, compute), _spare(x, compute, 4, width)
    _compiled.layer_norm_backward(_given(grad), _given(extra), _given(x), *norm, _raw(dx), dw, db, groups, spare)
    return dx, dw, db


# ----------------------------------------------------------------------------------------- RMS norm, SwiGLU, rotary


def rms_norm(x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    compute = _precision(x, beside=(weight,))
    if compute is None:
        return reference.rms_norm(x, weight, eps)
    y, rstd = np.empty(x.shape, x.dtype), np.empty((x.size // x.shape[-1] if x.size else 0, 1), compute)
    spare = _spare(x, compute, 2, x.shape[-1])
    _compiled.rms_norm(_given(x), _vector(weight, compute), eps, _raw(y), rstd, spare)
    return y, rstd


def residual_rms_norm(
    x: Array, y: Array, branch_bias: Array | None, rows: Array | None, p: float, weight: Array, eps: float
) -> tuple[Array, Array, Array]:
    threshold = _threshold(p)
    compute = _precision(x, y, beside=(branch_bias, weight))
    if compute is None or x.shape != y.shape or threshold >= 2**32 or not 0 < x.size < 2**32:
        return reference.residual_rms_norm(x, y, branch_bias, rows, p, weight, eps)
    total, out = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
    rstd = np.empty((x.size // x.shape[-1], 1), compute)
    rows = None if rows is None else _solid(rows)
    branch = _given(y), _vector(branch_bias, compute), rows, threshold, keep_scale(p)
    spare = _spare(x, compute, 4, x.shape[-1])
    _compiled.residual_rms_norm(_given(x), *branch, _vector(weight, compute), eps, _raw(total), _raw(out), rstd, spare)
    return total, out, rstd


def rms_norm_backward(
    grad: Array, x: Array, rstd: Array, weight: Array, extra: Array | None = None
) -> tuple[Array, Array]:
    compute = _precision(x, grad, extra, beside=(weight,))
    if compute is None or rstd.dtype != compute:
        return reference.rms_norm_backward(grad, x, rstd, weight, extra)
    width = x.shape[-1]
    dx, dw, group = np.empty(x.shape, x.dtype), np.empty(width, compute), np.empty(width, compute)
    norm = _solid(rstd), _vector(weight, compute)
    spare = _spare(x, compute, 4, width)
    _compiled.rms_norm_backward(_given(grad), _given(extra), _given(x), *norm, _raw(dx), dw, group, spare)
    return dx, dw


def swiglu(gate: Array, up: Array) -> Array:
    compute = _precision(gate, up)
    if compute is None or gate.shape != up.shape:
        return reference.swiglu(gate, up)
    y = np.empty(gate.shape, gate.dtype)
    _compiled.swiglu(_given(gate), _given(up), _raw(y), _spare(gate, compute, 3, 1))
    return y


def swiglu_backward(grad: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    compute = _precision(gate, up, grad)
    if compute is None or not gate.shape == up.shape == grad.shape:
        return reference.swiglu_backward(grad, gate, up)
    d_gate, d_up = np.empty(gate.shape, gate.dtype), np.empty(gate.shape, gate.dtype)
    spare = _spare(gate, compute, 5, 1)
    _compiled.swiglu_backward(_given(grad), _given(gate), _given(up), _raw(d_gate), _raw(d_up), spare)
    return d_gate, d_up


def rotary(qkv: Array, heads: int, kv_heads: int, cos: Array, sin: Array) -> Array:
    compute = _precision(qkv, beside=(cos, sin))
    if compute is None or not cos.size:
        return reference.rotary(qkv, heads, kv_heads, cos, sin)
    y = np.empty(qkv.shape, qkv.dtype)
    tables = _vector(cos, compute), _vector(sin, compute)
    spare = _spare(qkv, compute, 2, qkv.shape[-1])
    _compiled.rotary(_given(qkv), heads // kv_heads + 2, *tables, _raw(y), spare)
    return y


def rotary_pack(q: Array, kv: Array, heads: int, kv_heads: int, cos: Array, sin: Array) -> Array:
    if not (_fits(q, kv, cos, sin) and cos.size):
        return rotary(packed(q, kv, kv_heads), heads, kv_heads, cos, sin)
    y = np.empty((*q.shape[:2], q.shape[2] + kv.shape[2]), q.dtype)
    _compiled.rotary_pack(_solid(q), _solid(kv), kv_heads, _solid(cos), _solid(sin), y)
    return y


def rotary_unpack(qkv: Array, heads: int, kv_heads: int, cos: Array, sin: Array) -> tuple[Array, Array]:
    if not (_fits(qkv, cos, sin) and cos.size):
        return unpacked(rotary(qkv, heads, kv_heads, cos, sin), heads, kv_heads)
    b, s, width = qkv.shape
    d = width // (heads + 2 * kv_heads)
    q, kv = np.empty((b, s, heads * d), qkv.dtype), np.empty((b, s, 2 * kv_heads * d), qkv.dtype)
    _compiled.rotary_unpack(_solid(qkv), kv_heads, _solid(cos), _solid(sin), q, kv)
    return q, kv


# -------------------------------------------------------------------------------------------- softmax and cross-entropy


def softmax(x: Array, dim: int, mask: Array | None) -> Array:
    compute = _precision(x)
    if compute is None or mask is not None or x.ndim == 0 or dim not in (-1, x.ndim - 1):
        return reference.softmax(x, dim, mask)
    y = np.empty(x.shape, x.dtype)
    _compiled.softmax(_given(x), _raw(y), _spare(x, compute, 2, x.shape[-1]))
    return y


def softmax_backward(grad: Array, y: Array, dim: int) -> Array:
    compute = _precision(y, grad)
    if compute is None or y.ndim == 0 or dim not in (-1, y.ndim - 1):
        return reference.softmax_backward(grad, y, dim)
    dx = np.empty(y.shape, y.dtype)
    _compiled.softmax_backward(_given(grad), _given(y), _raw(dx), _spare(y, compute, 3, y.shape[-1]))
    return dx


def cross_entropy(logits: Array, targets: Array, ignore: int) -> tuple[Array, Array]:
    compute = _precision(logits)
    if compute is None or type(targets) is not np.ndarray or logits.shape[1] == 0:
        return reference.cross_entropy(logits, targets, ignore)
    lse = np.empty(logits.shape[0], compute)
    spare = _spare(logits, compute, 1, logits.shape[1])
    total = _compiled.cross_entropy(_given(logits), _integers(targets), ignore, lse, spare)
    return np.asarray(total, compute), lse


def cross_entropy_backward(grad: Array, logits: Array, targets: Array, lse: Array, ignore: int) -> Array:
    compute = _precision(logits)
    fits = compute is not None and lse.dtype == compute and type(lse) is type(targets) is np.ndarray
    if not fits or grad.ndim or logits.shape[1] == 0:
        return reference.cross_entropy_backward(grad, logits, targets, lse, ignore)
    out = np.empty(logits.shape, logits.dtype)
    rows = _given(logits), _integers(targets), _solid(lse)
    spare = _spare(logits, compute, 2, logits.shape[1])
    _compiled.cross_entropy_backward(float(grad), *rows, ignore, _raw(out), spare)
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
    scores: Array | None = None,
    since: int | None = None,
    firsts: Array | None = None,
) -> Array:
    precision = _attends(q, k, v, out)
    if precision is None or _threshold(drop) >= 2**32:
        how: dict[str, Any] = {"scale": scale, "causal": causal, "mask": mask, "rows": rows, "drop": drop, "keys": keys}
        return reference.attention(q, k, v, out, scores=scores, since=since, firsts=firsts, **how)
    lse = np.empty(q.shape[:3], precision[0])
    setting = _setting(precision, q, k, scale, causal, mask, rows, drop, keys, scores, since, firsts, backward=False)
    _compiled.attention(lse, *_bits(q, k, v, out), *setting)
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
    scores: Array | None = None,
    since: int | None = None,
    firsts: Array | None = None,
) -> None:
    arrays = q, k, v, y, dq, dk, dv
    precision = _attends(grad, *arrays)
    if precision is None and type(grad) is np.ndarray:  # a gradient may come broadcast or transposed
        precision = _attends(*arrays)
        grad = grad if precision is None else grad.astype(q.dtype, order="C")
    if precision is None or not _fits(lse) or lse.dtype != precision[0] or _threshold(drop) >= 2**32:
        how: dict[str, Any] = {"scale": scale, "causal": causal, "mask": mask, "rows": rows, "drop": drop, "keys": keys}
        how |= {"scores": scores, "since": since, "firsts": firsts}
        reference.attention_backward(grad, *arrays[:4], lse, dq, dk, dv, **how)
        return
    setting = _setting(precision, q, k, scale, causal, mask, rows, drop, keys, scores, since, firsts, backward=True)
    _compiled.attention_backward(_solid(lse), *_bits(grad, q, k, v, y, dq, dk, dv), *setting)


def _attends(*arrays: Array) -> tuple[np.dtype[Any], np.dtype[Any] | None] | None:
    """(the precision to compute in, that of the halves among the arrays), or None where C cannot read them as they lie.

    It reads (b, h, s, d) that are not empty and have no gaps in the last dim: of one precision, or float32 and one half
    precision mixed.
    """
    compute: np.dtype[Any] | None = None
    half: np.dtype[Any] | None = None
    for x in arrays:
        if type(x) is not np.ndarray or not (x.size and x.flags.aligned):
            return None
        if x.strides[3] != x.itemsize and x.shape[3] != 1:
            return None
        dtype = x.dtype
        if dtype in _PRECISIONS:
            its = dtype
        elif is_half(dtype) and dtype.isnative and (half is None or dtype == half):
            its, half = _SINGLE, dtype
        else:
            return None
        if compute is not None and its != compute:
            return None
        compute = its
    return None if compute is None else (compute, half)


def _bits(*arrays: Array) -> list[Array]:
    """Halves as whole numbers of 16 bits, which is how the buffer protocol can tell of either kind."""
    return [x.view(np.uint16) if x.itemsize == 2 else x for x in arrays]


def _setting(
    precision: tuple[np.dtype[Any], np.dtype[Any] | None],
    q: Array,
    k: Array,
    scale: float,
    causal: bool,
    mask: Array | None,
    rows: Array | None,
    drop: float,
    keys: Array | None,
    scores: Array | None,
    since: int | None,
    firsts: Array | None,
    *,
    backward: bool,
) -> tuple[Any, ...]:
    compute, half = precision
    s, d = q.shape[2:]
    t = k.shape[2]
    scratch = np.empty(_compiled.attention_scratch(s, t, d, compute.itemsize, backward), np.uint8)
    rows = None if rows is None else _solid(rows)
    keys = None if keys is None else _integers(keys)
    firsts = None if firsts is None else _integers(firsts)
    brain = half is not None and half.kind != "f"
    return causal, scale, mask, rows, keys, _threshold(drop), keep_scale(drop), scratch, scores, brain, since, firsts


# ------------------------------------------------------------------------------------------------------------ experts


def combine(out: Array, gates: Array, places: Array) -> Array:
    compute = _precision(out)
    if compute is None or not _picks(compute, out, gates, places):
        return reference.combine(out, gates, places)
    y = np.empty((places.shape[0], out.shape[1]), out.dtype)
    spare = _spare(out, compute, 2, out.shape[1])
    _compiled.combine(_given(out), _solid(gates), _integers(places), _raw(y), spare)
    return y


def combine_backward(grad: Array, out: Array, gates: Array, places: Array) -> tuple[Array, Array]:
    compute = _precision(out, grad)
    if compute is None or not _picks(compute, out, gates, places):
        return reference.combine_backward(grad, out, gates, places)
    d_out, d_gates = np.empty(out.shape, out.dtype), np.empty(gates.shape, compute)
    spare = _spare(out, compute, 2, out.shape[1])
    _compiled.combine_backward(_given(grad), _given(out), _solid(gates), _integers(places), _raw(d_out), d_gates, spare)
    return d_out, d_gates


def _picks(compute: Any, out: Array, gates: Array, places: Array) -> bool:
    """Whether C can pick these places: there are some, and rows that are no mere points."""
    return _fits(gates) and gates.dtype == compute and type(places) is np.ndarray and bool(places.size and out.shape[1])


def jitter(x: Array, rows: Array, amount: float) -> Array:
    compute = _precision(x)
    if compute is None or type(rows) is not np.ndarray or not 0 < x.size < 2**32:
        return reference.jitter(x, rows, amount)
    y = np.empty(x.shape, x.dtype)
    _compiled.jitter(_given(x), _solid(rows), amount, _raw(y), _spare(x, compute, 2, x.shape[-1]))
    return y


# ------------------------------------------------------------------------------------------- embedding and optimizer


def row_sum(ids: Array, rows: Array, out: Array) -> None:
    compute = _precision(rows)
    fits = compute is not None and type(out) is np.ndarray and out.dtype == compute and out.flags.carray
    if not fits or type(ids) is not np.ndarray:
        reference.row_sum(ids, rows, out)
        return
    _compiled.row_sum(_integers(ids), _given(rows), out, _spare(rows, compute, 1, out.shape[-1]))


def sum_rows(x: Array) -> Array:
    compute = _precision(x)
    if compute is None or x.dtype == compute:
        return reference.sum_rows(x)
    total, group = np.empty(x.shape[-1], compute), np.empty(x.shape[-1], compute)
    _compiled.sum_rows(_given(x), total, group, _spare(x, compute, 1, x.shape[-1]))
    return total


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
    compute = _precision(x)
    if compute is None:
        return reference.sum_of_squares(x)
    return _compiled.sum_of_squares(_given(x), _spare(x, compute, 1, 1))


def adamw_runs(runs: Several[AdamwRun], *, update: int, lr: float, beta1: float, beta2: float, eps: float) -> None:
    each_run(adamw, narrow, runs, update=update, lr=lr, beta1=beta1, beta2=beta2, eps=eps)


def sgd_runs(runs: Several[SgdRun], *, lr: float, momentum: float, nesterov: bool) -> None:
    each_sgd(narrow, runs, lr=lr, momentum=momentum, nesterov=nesterov)


def sums_of_squares(arrays: Several[Array]) -> Any:
    return [sum_of_squares(x) for x in arrays]


# ------------------------------------------------------------------------------------------------------------- halves


def widen(x: Array, out: Array | None = None) -> Array:
    if type(x) is not np.ndarray or not _is_half(x.dtype):
        return reference.widen(x, out)
    into = out if _takes(out, x, _SINGLE) else np.empty(x.shape, np.float32)
    _compiled.widen(x.dtype.kind != "f", _solid(x).view(np.uint16), into)
    return _delivered(into, out)


def narrow(x: Array, dtype: Any, out: Array | None = None) -> Array:
    dtype = np.dtype(dtype)
    if type(x) is not np.ndarray or x.dtype != _SINGLE or not _is_half(dtype):
        return reference.narrow(x, dtype, out)
    into = out if _takes(out, x, dtype) else np.empty(x.shape, dtype)
    _compiled.narrow(dtype.kind != "f", _solid(x), into.view(np.uint16))
    return _delivered(into, out)


def matmul(a: Array, b: Array, out: Array | None = None, dtype: Any = None, add: bool = False) -> Array:
    if add:
        assert out is not None, "there is nothing to add to"
        out += matmul(a, b, dtype=wide(out.dtype))
        return out
    if out is None and a.dtype is b.dtype and (a.dtype is _SINGLE or a.dtype is _DOUBLE):  # small ones are many
        plain = type(a) is type(b) is np.ndarray and a.flags.c_contiguous and b.flags.c_contiguous
        if plain and (dtype is None or dtype == a.dtype):
            return np.matmul(a, b)
    halves = type(a) is type(b) is np.ndarray and (_is_half(a.dtype) or _is_half(b.dtype))
    common = product_dtype(a, b)
    result = out.dtype if out is not None else common if dtype is None else np.dtype(dtype)
    if not halves or wide(common) != _SINGLE or wide(result) != _SINGLE:
        return reference.matmul(a, b, out, dtype)
    a, b = _wide_matrix(a), _wide_matrix(b)
    if result == _SINGLE:
        return multiply(np, a, b, out)
    return narrow(np.asarray(multiply(np, a, b)), result, out)


def linear(x: Array, w: Array, bias: Array, dtype: Any = None) -> Array:
    dtype = product_dtype(x, w) if dtype is None else np.dtype(dtype)
    y = matmul(x, w, dtype=wide(dtype))
    y += bias
    return y if y.dtype == dtype else narrow(y, dtype)


def factor(x: Array) -> Array:
    return widen(x) if is_half(x.dtype) else x


def _wide_matrix(x: Array) -> Array:
    """The same matrices in float32, lying as they lay: a transposed one is widened as what it is the transpose of."""
    if not _is_half(x.dtype):
        return x
    return widen(x.swapaxes(-1, -2)).swapaxes(-1, -2) if x.ndim > 1 and x.strides[-2] == x.itemsize else widen(x)


def _is_half(dtype: Any) -> bool:
    return dtype.itemsize == 2 and dtype.isnative and is_half(dtype)  # the other byte order has the same name


def _takes(out: Array | None, x: Array, dtype: Any) -> TypeGuard[Array]:
    """Whether C can write into `out` what it makes of x."""
    return out is not None and out.dtype == dtype and out.shape == x.shape and bool(out.flags.carray)


def _delivered(made: Array, out: Array | None) -> Array:
    if out is None or made is out:
        return made
    out[...] = made
    return out
