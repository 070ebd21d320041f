"""Attention by its formula, with the whole matrix of probabilities and in the next higher precision.

How far off a kernel may be is told in eps, as in `test_kernel_accuracy`.  A score is a product of d terms, so it is off
by about sqrt(d)/2 eps of the sizes of the two vectors, and its exponential by as much, relatively; what follows are
sums over keys or queries.
"""

import math

import numpy as np
import pytest
from kernel_calls import attend

from mpitrain.rng import keep_mask

HIGHER = {np.float32: np.float64, np.float64: np.longdouble}
PRECISIONS = pytest.mark.parametrize("dtype", HIGHER)


def make(dtype, b, h, s, d, seed=0, t=None):
    """q, k, v, grad: s queries, t keys (s where left out)."""
    rng = np.random.default_rng([seed, b, h, s, d])
    t = s if t is None else t
    return [rng.standard_normal((b, h, n, d)).astype(dtype) for n in (s, t, t, s)]


def chain(n):
    """Rounding errors of a sum of n terms in one chain, in eps of the sum of their sizes."""
    return 1 + math.sqrt(n) / 2


def norms(x):
    return np.sqrt((x * x).sum(-1))


def exact(q, k, v, grad, y, lse, causal, mask, rows, drop, keys):
    """([out, lse, dq, dk, dv], their bounds in eps) in the precision of the arguments.

    y and lse are what the kernel gave, since its backward starts from them.
    """
    (s, d), t = q.shape[2:], k.shape[2]
    scale = 1 / np.sqrt(q.dtype.type(d))
    seen = np.ones((1, 1, s, t), bool) if mask is None else mask
    seen = seen & np.tril(np.ones((s, t), bool)) if causal else seen
    seen = np.broadcast_to(seen, (*q.shape[:3], t))
    kept = np.ones_like(seen) if rows is None else keep_mask(rows, t if keys is None else keys, drop)
    kept = kept / q.dtype.type(1 - drop if rows is not None else 1)
    scores = scale * (q @ k.swapaxes(2, 3))
    off = chain(d) * scale * norms(q)[..., None] * norms(k)[..., None, :]  # of the scores

    hidden = np.where(seen, scores, -np.inf)
    peak = np.maximum(hidden.max(-1, keepdims=True), np.finfo(q.dtype).min)
    e = np.where(seen, np.exp(np.where(seen, scores - peak, 0)), 0)
    total = np.maximum(e.sum(-1, keepdims=True), 1)
    p = e / total
    loss = (np.where(seen, off, 0).max(-1) + 2 * np.abs(np.where(seen, scores, 0)).max(-1) + 4 + chain(t))[..., None]
    out, weights = (p * kept) @ v, p * kept
    lse_off = loss[..., 0] + np.log(total[..., 0])

    # From the numbers that backward was given.
    p = np.where(seen, np.exp(np.where(seen, scores - lse[..., None], 0)), 0)
    loss_p = np.where(seen, off + 3 + np.abs(scores) + np.abs(lse[..., None]), 0)
    dp = kept * (grad @ v.swapaxes(2, 3))
    delta = (grad * y).sum(-1, keepdims=True)
    ds = scale * p * (dp - delta)
    size = kept * norms(grad)[..., None] * norms(v)[..., None, :] + (norms(grad) * norms(y))[..., None]
    ds_off = scale * p * (loss_p * np.abs(dp - delta) + chain(d) * size)
    transposed = ds.swapaxes(2, 3)
    p_kept = (p * kept).swapaxes(2, 3)
    expected = [
        out,
        np.where(seen.any(-1), np.log(total[..., 0]) + hidden.max(-1), np.nan),
        ds @ k,
        transposed @ q,
        p_kept @ grad,
    ]
    bounds = [
        loss * (weights @ np.abs(v)),
        lse_off,
        ds_off @ np.abs(k) + chain(t) * (np.abs(ds) @ np.abs(k)),
        ds_off.swapaxes(2, 3) @ np.abs(q) + chain(s) * (np.abs(transposed) @ np.abs(q)),
        (p * kept * (loss_p + chain(s))).swapaxes(2, 3) @ np.abs(grad),
    ]
    return expected, bounds


def band(s, t, since):
    """(1, 1, s, t) the mask that hides the keys before `since` + i from query i."""
    return (np.arange(t) >= since + np.arange(s)[:, None])[None, None]


def assert_accurate(arrays, *, causal=True, mask=None, rows=None, drop=0.0, keys=None, since=None, firsts=None):
    dtype = arrays[0].dtype.type
    how = {"since": since, "firsts": firsts}
    results = attend(*arrays, causal=causal, mask=mask, rows=rows, drop=drop, keys=keys, **how)
    if firsts is not None:
        seen = (np.arange(arrays[1].shape[2]) >= firsts[:, :, None])[:, None]
        mask = seen if mask is None else mask & seen
    if since is not None:
        seen = band(arrays[0].shape[2], arrays[1].shape[2], since)
        mask = seen if mask is None else mask & seen
    wide = [a.astype(HIGHER[dtype]) for a in (*arrays, results[0], results[1])]
    expected, bounds = exact(*wide, causal, mask, rows, drop, keys)
    for name, result, y, bound in zip(("out", "lse", "dq", "dk", "dv"), results, expected, bounds, strict=True):
        assert result.dtype == dtype
        error = np.abs(result.astype(HIGHER[dtype]) - y) / np.finfo(dtype).eps
        off = error > bound + np.finfo(dtype).smallest_normal  # NaN, of a query without any key, is not
        assert not off.any(), f"{name}: {(error / np.maximum(bound, 1e-300))[off].max():.3g} times the bound"
    assert (results[1][np.isnan(expected[1])] == np.finfo(dtype).min).all()
    return results


def masks(b, h, s, t=None):
    """Every form, for s queries and t keys (s where left out), with queries that see none in all but the first."""
    t = s if t is None else t
    rng = np.random.default_rng(s)
    by_key = np.ones((b, 1, 1, t), bool)
    by_key[0, ..., t // 2 :] = False
    yield by_key
    yield np.zeros((1, 1, 1, 1), bool)
    for shape in ((b, 1, s, t), (1, h, s, t), (b, h, 1, t), (b, h, s, 1), (b, h, s, t), (1, 1, s, t), (1, 1, s, 1)):
        mask = rng.random(shape) > 0.4
        mask[:, :, : 1 + shape[2] // 3] = False
        yield mask
    yield np.asfortranarray(mask)
    yield np.broadcast_to(by_key[:, :, :, ::-1], (b, h, s, t))
