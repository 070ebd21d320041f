"""Dropout, and the sum that ends a residual branch: the formulas in NumPy (or CuPy)."""

from __future__ import annotations

from mpitrain.backend import Array
from mpitrain.kernels.reference.halves import in_single
from mpitrain.kernels.reference.norm import layer_norm
from mpitrain.rng import keep_mask


@in_single(0, 0)
def dropout(x: Array, rows: Array, p: float) -> Array:
    """x / (1 - p) where the random word of (row, column) keeps it, else 0.

    The mask is a pure function of `rows`, so backward calls this again on the gradient and nothing waits for it.

    Args:
        x: (..., d).
        rows: uint64 (...), one hash a row.
        p: probability of zero, in [0, 1).
    """
    y = x * keep_mask(rows, x.shape[-1], p)
    y *= keep_scale(p)
    return y


@in_single(0, 0)
def residual(x: Array, y: Array, bias: Array | None, rows: Array | None, p: float) -> Array:
    """x + dropout(y + bias): what a branch adds to the stream it left.

    Args:
        x: (..., d), the stream.
        y: (..., d), the branch.
        bias: (d,), or None.
        rows: uint64 (...), the dropout's hashes; None: no dropout.
        p: probability of zero.
    """
    if bias is not None:
        y = y + bias
    if rows is not None:
        y = dropout(y, rows, p)
    return x + y


def residual_norm(
    x: Array, y: Array, branch_bias: Array | None, rows: Array | None, p: float, weight: Array, bias: Array, eps: float
) -> tuple[Array, Array, Array, Array]:
    """The sum that `residual` makes, and its layer norm while it is at hand: of halves, that of the rounded sum.

    Args:
        x, y, branch_bias, rows, p: as for `residual`.
        weight, bias, eps: as for `layer_norm`.

    Returns:
        (sum, normalised, center, rstd), the last two as `layer_norm` gives them.
    """
    total = residual(x, y, branch_bias, rows, p)
    return total, *layer_norm(total, weight, bias, eps)


def keep_scale(p: float) -> float:
    """1 / (1 - p), by which what is kept is scaled; 0 where nothing is."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0
