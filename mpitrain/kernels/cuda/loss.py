"""Cross-entropy of rows of logits, and its gradient: `csrc/loss.cu`.

A target that is no column makes the loss NaN: to refuse it, somebody would have to wait for the device.
"""

from __future__ import annotations

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels import reference
from mpitrain.kernels.cuda.arrays import precision, solid
from mpitrain.kernels.cuda.launch import THREADS, launch
from mpitrain.kernels.cuda.norm import turns

MOST_THREADS = 1_024  # of the block that adds up the losses of all rows


def cross_entropy(logits: Array, targets: Array, ignore: int) -> tuple[Array, Array]:
    compute = precision(logits)
    if compute is None or not logits.shape[1] or not _labels(logits, targets):
        return reference.cross_entropy(logits, targets, ignore)
    xp, rows = array_module(logits), logits.shape[0]
    total, lse, losses = xp.empty((), compute), xp.empty(rows, compute), xp.empty(rows, compute)
    given = solid(logits), solid(targets.astype(np.int64, copy=False)), int(ignore)
    launch("loss", "cross_entropy", logits.dtype, *_grid(logits), *given, lse, losses, *logits.shape)
    threads = min(32 * max(1, -(-rows // 32)), MOST_THREADS)
    launch("loss", "cross_entropy_total", logits.dtype, 1, threads, losses, total, rows)
    return total, lse


def cross_entropy_backward(grad: Array, logits: Array, targets: Array, lse: Array, ignore: int) -> Array:
    compute = precision(logits, beside=(grad,))
    fits = compute is not None and grad.ndim == 0 and type(lse) is type(logits) and lse.dtype == compute
    if not fits or not logits.shape[1] or not _labels(logits, targets):
        return reference.cross_entropy_backward(grad, logits, targets, lse, ignore)
    out = array_module(logits).empty(logits.shape, logits.dtype)
    given = solid(logits), solid(targets.astype(np.int64, copy=False)), solid(lse), int(ignore)
    scale = grad.astype(compute, copy=False)
    launch("loss", "cross_entropy_backward", logits.dtype, *_grid(logits), scale, *given, out, *logits.shape)
    return out


def _labels(logits: Array, targets: Array) -> bool:
    """Whether there is a target, a whole number, for each row of logits, beside it."""
    return type(targets) is type(logits) and targets.dtype.kind in "iu" and targets.shape == logits.shape[:1]


def _grid(logits: Array) -> tuple[int, int]:
    """(blocks, threads of each): one for a row, eight elements at a time to a thread."""
    rows, width = logits.shape
    return turns(rows), min(32 * -(-width // (8 * 32)), THREADS)
