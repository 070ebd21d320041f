"""Softmax and the loss on it: the formulas in NumPy (or CuPy), over blocks of rows that stay in cache."""

from __future__ import annotations

import math

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels.blocks import row_blocks
from mpitrain.kernels.reference.halves import in_single


@in_single(0, 0)
def softmax(x: Array, dim: int, mask: Array | None) -> Array:
    """exp(x) over its sum along `dim`; 0 where the bool mask is False, also if it is False for a whole row."""
    xp = array_module(x)
    y = x.copy()
    if mask is not None:
        xp.copyto(y, -math.inf, where=~mask)
    # A row without any key has maximum -inf; -inf minus the lowest finite number stays -inf, whose exp is 0.
    y -= xp.maximum(y.max(axis=dim, keepdims=True), xp.finfo(y.dtype).min) if y.size else 0
    xp.exp(y, out=y)
    # The largest element contributes exactly 1, so only a row without any key has a sum below 1.
    y /= xp.maximum(y.sum(axis=dim, keepdims=True), 1.0)
    return y


@in_single(1, 0)
def softmax_backward(grad: Array, y: Array, dim: int) -> Array:
    """y (grad - sum(grad y)) along `dim`."""
    dx = grad * y
    total = dx.sum(axis=dim, keepdims=True)
    dx -= y * total
    return dx.astype(y.dtype, copy=False)


@in_single(0)
def cross_entropy(logits: Array, targets: Array, ignore: int) -> tuple[Array, Array]:
    """Sum over rows of log(sum(exp(logits))) - logits[target], rows whose target is `ignore` left out.

    Args:
        logits: (n, v).
        targets: (n,) integers.  One that is negative and not `ignore` counts, but its logit is held elsewhere: where
            ranks hold some columns each, one of them subtracts it and the others add the logarithm alone.
        ignore: the target that does not count.

    Returns:
        (total, lse): total () in at least float32; lse (n,), the logarithm of the sum, of rows that do not count as
        well.  With the logits it is all that backward needs: no array of probabilities is kept.  A row without a
        column, or with nothing but -inf, has the lowest finite number: it changes no sum of exponentials that it is
        added to.  Without columns the total is 0.
    """
    xp = array_module(logits)
    num_rows, width = logits.shape
    compute = logits.dtype
    lowest = float(xp.finfo(compute).min)
    if width == 0:
        return xp.zeros((), compute), xp.full(num_rows, lowest, compute)
    lse, picked = xp.empty(num_rows, compute), xp.empty(num_rows, compute)
    valid = targets != ignore
    here = valid & (targets >= 0)
    columns = xp.where(here, targets, 0)
    for block in row_blocks(xp, num_rows, width):
        z = logits[block]
        # -inf less the lowest finite number stays -inf, whose exp is 0.
        highest = xp.maximum(z.max(axis=1, keepdims=True), lowest)
        picked[block] = z[xp.arange(z.shape[0]), columns[block]]
        z = z - highest
        xp.exp(z, out=z)
        total = xp.maximum(z.sum(axis=1), 1.0)  # the largest logit contributes exactly 1, unless it is -inf
        xp.log(total, out=total)
        total += highest[:, 0]
        lse[block] = total
    losses = xp.where(valid, lse - xp.where(here, picked, 0), 0)
    return xp.asarray(losses.sum(dtype=np.float64), dtype=compute), lse


@in_single(1, 0)
def cross_entropy_backward(grad: Array, logits: Array, targets: Array, lse: Array, ignore: int) -> Array:
    """grad (exp(logits - lse) - one_hot(target)), exactly 0 in rows that do not count.

    Args:
        grad: ().
        logits, targets, ignore: as for `cross_entropy`; where the logit is held elsewhere nothing is subtracted.
        lse: (n,), of all columns: where ranks hold some each, of those of all ranks.
    """
    xp = array_module(logits)
    num_rows, width = logits.shape
    compute = logits.dtype
    d_logits = xp.empty((num_rows, width), logits.dtype)
    if width == 0:
        return d_logits
    valid = targets != ignore
    here = valid & (targets >= 0)
    columns = xp.where(here, targets, 0)
    hot = here.astype(compute)
    scale = xp.where(valid, grad.astype(compute, copy=False), 0).astype(compute, copy=False)[:, None]
    for block in row_blocks(xp, num_rows, width):
        p = logits[block] - lse[block, None]
        xp.exp(p, out=p)
        p[xp.arange(p.shape[0]), columns[block]] -= hot[block]
        xp.multiply(p, scale[block], out=d_logits[block])
        xp.copyto(d_logits[block], 0, where=~valid[block, None])  # 0 times NaN is not 0
    return d_logits
