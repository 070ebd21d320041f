"""Rotary positions: queries and keys turned by an angle that grows with their position, in NumPy (or CuPy)."""

from __future__ import annotations

from mpitrain.backend import Array, array_module
from mpitrain.kernels.reference.halves import in_single


@in_single(0, 0)
def rotary(qkv: Array, heads: int, kv_heads: int, cos: Array, sin: Array) -> Array:
    """The same packed queries, keys and values, with queries and keys turned.

    Elements i and i + d/2 of a head are the coordinates of a point in a plane of their own, i < d/2:

        y_i = x_i cos_i - x_{i+d/2} sin_i,   y_{i+d/2} = x_{i+d/2} cos_i + x_i sin_i

    The gradient of qkv is that of the result turned the other way: this once more, with -sin.

    Args:
        qkv: (b, s, (heads + 2 kv_heads) d), the last dim in the order (kv head, [queries | key | value], d).
        heads: how many heads of queries it holds.
        kv_heads: how many of keys and values.
        cos, sin: (s, d/2), or (b, s, d/2) where samples have positions of their own; in at least float32.

    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864, equation
    34; the pairs are those of GPT-NeoX.
    """
    xp = array_module(qkv)
    b, s, width = qkv.shape
    group, d = heads // kv_heads + 2, width // (heads + 2 * kv_heads)
    half = d // 2
    y = xp.empty(qkv.shape, qkv.dtype)
    old, new = (array.reshape(b, s, kv_heads, group, d) for array in (qkv, y))
    cos, sin = (table[..., None, None, :].astype(qkv.dtype, copy=False) for table in (cos, sin))
    first, second = old[..., :-1, :half], old[..., :-1, half:]
    for place, one, other, turn in ((slice(half), first, second, xp.subtract), (slice(half, d), second, first, xp.add)):
        into = new[..., :-1, place]
        xp.multiply(one, cos, out=into)
        turn(into, other * sin, out=into)
    new[..., -1, :] = old[..., -1, :]
    return y


def rotary_pack(q: Array, kv: Array, heads: int, kv_heads: int, cos: Array, sin: Array) -> Array:
    """`rotary` of queries and of keys and values that come apart.

    Args:
        q: (b, s, heads d).
        kv: (b, s, 2 kv_heads d), the last dim in the order (kv head, [key | value], d).
        heads, kv_heads, cos, sin: as for `rotary`.
    """
    return rotary(packed(q, kv, kv_heads), heads, kv_heads, cos, sin)


def rotary_unpack(qkv: Array, heads: int, kv_heads: int, cos: Array, sin: Array) -> tuple[Array, Array]:
    """`rotary` of a packed array, taken apart as `rotary_pack` has it: with -sin its gradients."""
    return unpacked(rotary(qkv, heads, kv_heads, cos, sin), heads, kv_heads)


def packed(q: Array, kv: Array, kv_heads: int) -> Array:
    """Queries (b, s, heads d), keys and values (b, s, 2 kv_heads d) in one array."""
    b, s, width = q.shape
    d = kv.shape[2] // (2 * kv_heads)
    parts = [q.reshape(b, s, kv_heads, width // (kv_heads * d), d), kv.reshape(b, s, kv_heads, 2, d)]
    return array_module(q).concatenate(parts, axis=3).reshape(b, s, width + kv.shape[2])


def unpacked(qkv: Array, heads: int, kv_heads: int) -> tuple[Array, Array]:
    """What `packed` has put together, two new arrays."""
    b, s, width = qkv.shape
    d = width // (heads + 2 * kv_heads)
    whole = qkv.reshape(b, s, kv_heads, heads // kv_heads + 2, d)
    return whole[..., :-2, :].reshape(b, s, heads * d), whole[..., -2:, :].reshape(b, s, 2 * kv_heads * d)
