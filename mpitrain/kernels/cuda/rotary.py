"""Rotary positions: `csrc/rotary.cu`."""

from __future__ import annotations

from typing import Any

from mpitrain.backend import Array, array_module
from mpitrain.kernels import reference
from mpitrain.kernels.cuda.arrays import precision, solid
from mpitrain.kernels.cuda.launch import MOST_BLOCKS, THREADS, launch
from mpitrain.kernels.cuda.rows import QUAD


def rotary(qkv: Array, heads: int, kv_heads: int, cos: Array, sin: Array) -> Array:
    compute = precision(qkv, beside=(cos, sin))
    if compute is None:
        return reference.rotary(qkv, heads, kv_heads, cos, sin)
    qkv = solid(qkv)
    y = array_module(qkv).empty(qkv.shape, qkv.dtype)
    _turn("rotary", qkv, heads, kv_heads, _tables(compute, cos, sin), (qkv,), (y,))
    return y


def rotary_pack(q: Array, kv: Array, heads: int, kv_heads: int, cos: Array, sin: Array) -> Array:
    compute = precision(q, kv, beside=(cos, sin))
    if compute is None:
        return reference.rotary_pack(q, kv, heads, kv_heads, cos, sin)
    y = array_module(q).empty((*q.shape[:2], q.shape[2] + kv.shape[2]), q.dtype)
    _turn("rotary_pack", y, heads, kv_heads, _tables(compute, cos, sin), (solid(q), solid(kv)), (y,))
    return y


def rotary_unpack(qkv: Array, heads: int, kv_heads: int, cos: Array, sin: Array) -> tuple[Array, Array]:
    compute = precision(qkv, beside=(cos, sin))
    if compute is None:
        return reference.rotary_unpack(qkv, heads, kv_heads, cos, sin)
    xp, (b, s, width) = array_module(qkv), qkv.shape
    d = width // (heads + 2 * kv_heads)
    q, kv = xp.empty((b, s, heads * d), qkv.dtype), xp.empty((b, s, 2 * kv_heads * d), qkv.dtype)
    _turn("rotary_unpack", qkv, heads, kv_heads, _tables(compute, cos, sin), (solid(qkv),), (q, kv))
    return q, kv


def _tables(compute: Any, cos: Array, sin: Array) -> tuple[Array, Array]:
    return solid(cos.astype(compute, copy=False)), solid(sin.astype(compute, copy=False))


def _turn(
    name: str,
    packed: Array,
    heads: int,
    kv_heads: int,
    tables: tuple[Array, Array],
    before: tuple[Array, ...],
    after: tuple[Array, ...],
) -> None:
    """Launch: a block for each row of the packed array, a thread for each four pairs of a head."""
    b, s, width = packed.shape
    half = width // (heads + 2 * kv_heads) // 2
    work = (heads + 2 * kv_heads) * -(-half // QUAD)
    turns = -(-work // THREADS)  # of a block; its threads are as many as then have nearly equal work
    threads = 32 * -(-work // (32 * max(1, turns)))
    positions = tables[0].size // max(1, half)  # s, or b s where samples have positions of their own
    numbers = kv_heads, heads // kv_heads, half, b * s, positions
    blocks = min(b * s, MOST_BLOCKS) if work else 0
    launch("rotary", name, packed.dtype, blocks, threads, *before, *tables, *after, *numbers)
