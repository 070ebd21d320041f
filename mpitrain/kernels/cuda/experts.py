"""Tokens on their way to experts and back: `csrc/experts.cu`, and the noise of a router's input: `csrc/residual.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels import reference
from mpitrain.kernels.blocks import rows_of
from mpitrain.kernels.cuda.arrays import precision, solid
from mpitrain.kernels.cuda.launch import MOST_BLOCKS, THREADS, launch
from mpitrain.kernels.cuda.residual import hashes_of
from mpitrain.kernels.cuda.rows import QUAD, tiles


def combine(out: Array, gates: Array, places: Array) -> Array:
    if not _picks(precision(out), out, gates, places):
        return reference.combine(out, gates, places)
    (t, choices), width = places.shape, out.shape[1]
    y = array_module(out).empty((t, width), out.dtype)
    arrays = solid(out), solid(gates), solid(places), y
    launch("experts", "combine", out.dtype, *_grid(t, width), *arrays, t, choices, width)
    return y


def combine_backward(grad: Array, out: Array, gates: Array, places: Array) -> tuple[Array, Array]:
    compute = precision(out, grad)
    if not _picks(compute, out, gates, places):
        return reference.combine_backward(grad, out, gates, places)
    xp, (t, choices), width = array_module(out), places.shape, out.shape[1]
    d_out, d_gates = xp.zeros(out.shape, out.dtype), xp.empty(gates.shape, compute)
    arrays = solid(grad), solid(out), solid(gates), solid(places), d_out, d_gates
    launch("experts", "combine_backward", out.dtype, *_grid(t, width), *arrays, t, choices, width)
    return d_out, d_gates


def _picks(compute: Any, out: Array, gates: Array, places: Array) -> bool:
    """Whether kernels can pick these places: gates of the precision, whole numbers of 64 bits, beside `out`."""
    beside = type(gates) is type(places) is type(out) and gates.shape == places.shape
    return compute is not None and beside and gates.dtype == compute and places.dtype == np.int64


def _grid(tokens: int, width: int) -> tuple[int, int]:
    """(blocks, threads): a block for a token, as many threads as have four columns, up to THREADS."""
    return min(tokens, MOST_BLOCKS), min(THREADS, 32 * max(1, -(-width // (32 * QUAD))))


def jitter(x: Array, rows: Array, amount: float) -> Array:
    if precision(x) is None or not hashes_of(x, rows):
        return reference.jitter(x, rows, amount)
    x = solid(x)
    y, shape = array_module(x).empty(x.shape, x.dtype), rows_of(x)
    launch("residual", "jitter", x.dtype, tiles(*shape), THREADS, x, solid(rows), y, *shape, float(amount))
    return y
