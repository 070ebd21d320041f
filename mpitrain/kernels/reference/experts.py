"""Tokens on their way to experts and back: the formulas in NumPy (or CuPy).

A token's choices are numbers of rows, its places; -1 is a choice that came to nothing.
"""

from __future__ import annotations

from mpitrain.backend import Array, array_module
from mpitrain.kernels.reference.halves import in_single
from mpitrain.rng import uniform


@in_single(0, 0)
def combine(out: Array, gates: Array, places: Array) -> Array:
    """y[i] = sum over j of gates[i, j] out[places[i, j]]: what a token's experts made of it, weighted.

    The terms are added in the order of j, in at least float32, and the sum is rounded once.

    Args:
        out: (n, h).
        gates: (t, k), float32 or float64.
        places: (t, k) int64, rows of `out`, each at most once; -1: no term.

    Returns:
        (t, h) of out's dtype; 0 where a token has no place.
    """
    xp = array_module(out)
    y = xp.zeros((places.shape[0], out.shape[1]), out.dtype)
    for j in range(places.shape[1]):
        there = xp.flatnonzero(places[:, j] >= 0)
        y[there] += gates[there, j, None] * out[places[there, j]]
    return y


@in_single(1, 0)
def combine_backward(grad: Array, out: Array, gates: Array, places: Array) -> tuple[Array, Array]:
    """Gradients of `out` and `gates` from that of their `combine`.

    Returns:
        (d_out, d_gates): d_out[places[i, j]] = gates[i, j] grad[i], rounded once, and 0 in rows that nobody has;
        d_gates[i, j] = <grad[i], out[places[i, j]]>, and 0 where there is no place.
    """
    xp = array_module(out)
    d_out, d_gates = xp.zeros_like(out), xp.zeros_like(gates)
    for j in range(places.shape[1]):
        there = xp.flatnonzero(places[:, j] >= 0)
        rows, g = places[there, j], grad[there]
        d_gates[there, j] = (g * out[rows]).sum(-1)
        d_out[rows] = gates[there, j, None] * g
    return d_out, d_gates


@in_single(0, 0)
def jitter(x: Array, rows: Array, amount: float) -> Array:
    """x times a uniform number of [1 - amount, 1 + amount], another for each element.

    The factors are a pure function of `rows`, so backward calls this again on the gradient and nothing waits for it.

    Args:
        x: (..., d).
        rows: uint64 (...), one hash a row.
        amount: in [0, 1).
    """
    factor = uniform(rows, x.shape[-1])
    factor *= 2.0 * amount
    factor += 1.0 - amount
    return x * factor.astype(x.dtype, copy=False)
