"""Rotary positions: queries and keys of packed heads turned by their positions, in one pass."""

from __future__ import annotations

from typing import Any

from mpitrain import kernels
from mpitrain.autograd.function import Function
from mpitrain.autograd.ops.attention import check_heads
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, wide
from mpitrain.errors import ShapeError


class Rotary(Function):
    """Queries and keys turned, values as they are; saves the cosines and sines.  Backward turns the other way.

    Inputs qkv, cos, sin.
    """

    linear = (0,)

    @staticmethod
    def forward(qkv: Array, cos: Array, sin: Array, *, heads: int, kv_heads: int) -> tuple[Array, tuple[Any, ...]]:
        return kernels.rotary(qkv, heads, kv_heads, cos, sin), (cos, sin)

    @staticmethod
    def backward(
        grad: Array, cos: Array, sin: Array, *, wanted: tuple[bool, ...], heads: int, kv_heads: int
    ) -> tuple[Any, ...]:
        return kernels.rotary(grad, heads, kv_heads, cos, -sin), None, None


class PackRotary(Function):
    """Queries, and keys and values, in one array, queries and keys turned; saves the cosines and sines.

    Inputs q, kv, cos, sin.
    """

    linear = (0, 1)
    undivided = True

    @staticmethod
    def forward(
        q: Array, kv: Array, cos: Array, sin: Array, *, heads: int, kv_heads: int
    ) -> tuple[Array, tuple[Any, ...]]:
        return kernels.rotary_pack(q, kv, heads, kv_heads, cos, sin), (cos, sin)

    @staticmethod
    def backward(
        grad: Array, cos: Array, sin: Array, *, wanted: tuple[bool, ...], heads: int, kv_heads: int
    ) -> tuple[Any, ...]:
        return *kernels.rotary_unpack(grad, heads, kv_heads, cos, -sin), None, None


def rotary(qkv: Tensor, heads: int, kv_heads: int, cos: Array, sin: Array) -> Tensor:
    """Packed queries, keys and values, with queries and keys turned by the angles of their positions.

    Elements i and i + d/2 of a head are turned by an angle of their own, i < d/2 (the pairs of GPT-NeoX and Llama):

        y_i = x_i cos_i - x_{i+d/2} sin_i,   y_{i+d/2} = x_{i+d/2} cos_i + x_i sin_i

    Args:
        qkv: (b, s, (heads + 2 kv_heads) d), the last dim in the order (kv head, [g queries | key | value], d) with
            g = heads / kv_heads, as `attention` takes it.
        heads: how many heads of queries `qkv` holds.
        kv_heads: how many of keys and values.
        cos, sin: (s, d/2), or (b, s, d/2) where samples have positions of their own: `mpitrain.nn.rotary.tables`.

    Raises:
        ShapeError: heads do not fit, d is odd, or the tables have another shape.

    Cost: one pass forward and one backward; what waits for backward are the tables, which all layers share.

    Source: Su et al. 2021, arXiv:2104.09864, equation 34.
    """
    check_heads(qkv, heads, kv_heads, op="rotary")
    tables = _tables("rotary", qkv, qkv.shape[2] // (heads + 2 * kv_heads), cos, sin)
    return Rotary.apply(qkv, *tables, heads=heads, kv_heads=kv_heads)


def pack_rotary(q: Tensor, kv: Tensor, heads: int, kv_heads: int, cos: Array, sin: Array) -> Tensor:
    """`rotary` of queries and of keys and values that come apart, packed in the same pass.

    Args:
        q: (b, s, heads d).
        kv: (b, s, 2 kv_heads d), the last dim in the order (kv head, [key | value], d).
        heads, kv_heads, cos, sin: as for `rotary`.

    Returns:
        (b, s, (heads + 2 kv_heads) d), as `attention` takes it.

    Raises:
        ShapeError: as `rotary`; or q and kv do not go together.

    Cost: one pass forward and one backward.
    """
    fits = q.ndim == kv.ndim == 3 and q.shape[:2] == kv.shape[:2] and q.dtype == kv.dtype
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ShapeError(f"pack_rotary: {heads} heads of queries in {kv_heads} groups that are not of one size")
    if not fits or q.shape[2] % heads or kv.shape[2] * heads != 2 * kv_heads * q.shape[2]:
        raise ShapeError(
            f"pack_rotary: q {q.shape} {q.dtype} and kv {kv.shape} {kv.dtype} are not {heads} heads of queries and"
            f" {kv_heads} of keys and values"
        )
    tables = _tables("pack_rotary", q, q.shape[2] // heads, cos, sin)
    return PackRotary.apply(q, kv, *tables, heads=heads, kv_heads=kv_heads)


def _tables(op: str, x: Tensor, d: int, cos: Array, sin: Array) -> tuple[Array, Array]:
    """Cosines and sines in the precision to compute in, if they are those of x's tokens and heads of width d."""
    b, s, _ = x.shape
    if d % 2:
        raise ShapeError(f"{op}: heads of an odd width {d} have no pairs to turn")
    shapes = ((s, d // 2), (b, s, d // 2))
    if cos.shape not in shapes or cos.shape != sin.shape:
        raise ShapeError(f"{op}: cos {cos.shape} and sin {sin.shape} are neither {shapes[0]} nor {shapes[1]}")
    precision = wide(x.dtype)
    return cos.astype(precision, copy=False), sin.astype(precision, copy=False)
