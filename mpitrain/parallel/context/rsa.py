"""Ring self-attention of Li et al.: two rings, and whole rows of scores between them.

    ring 1    the ranks' keys come by:     S[:, block j] = q k_j^T / sqrt(d)
              softmax over the whole rows  P = softmax(S)
    ring 2    the ranks' values come by:   y += P[:, block j] v_j

Backward is the same with the rings in the other order: values for dP, keys for dq.  What each rank adds to the
gradients of all keys, and of all values, is summed and given back by a reduce-scatter (the paper all-reduces, at twice
the bytes).  The rows of probabilities stay until backward: they are s/c long one way and s the other, so unlike in
`ring` memory grows with the square of the sequence.  This one is here to be read, and to compare with.

Halves travel as they are; what is computed, and kept, is float32.

Source: Li et al. 2021, "Sequence Parallelism: Long Sequence Training from System Perspective", arXiv:2105.13120.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from mpitrain import kernels
from mpitrain.autograd.needs import EXACT, NEAR
from mpitrain.autograd.ops.attention import Attention, by_head, rounded, split_heads
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, wide
from mpitrain.collectives import Arrow
from mpitrain.comm.communicator import Communicator
from mpitrain.kernels.reference.residual import keep_scale
from mpitrain.parallel.context.layout import positions, same_document
from mpitrain.rng import keep_mask
from mpitrain.spec import Shard


class RsaAttention(Arrow):
    """Attention over the sequence of all ranks by whole rows; saves qkv and the probabilities."""

    linear = ()
    arrow = (Shard(1), Shard(1))
    like = Attention
    needs = (NEAR, EXACT, NEAR)

    @staticmethod
    def forward(
        qkv: Array,
        documents: Array | None,
        rows: Array | None,
        *,
        heads: int,
        kv_heads: int,
        causal: bool,
        drop: float,
        window: int | None,
        axis: Communicator,
    ) -> tuple[Array, tuple[Any, ...]]:
        xp = array_module(qkv)
        b, length, _ = qkv.shape
        q, k, v = split_heads(qkv, heads, kv_heads)
        q = q.astype(wide(q.dtype), copy=False)
        scores = xp.empty((*q.shape[:4], length * axis.size), q.dtype)  # b, kv, group, query, key
        for block, k_j in ring(axis, k):
            scores[..., block] = q @ k_j[:, :, None].swapaxes(3, 4)
        scores *= 1.0 / math.sqrt(q.shape[4])
        p = kernels.softmax(scores, -1, allowed(xp, axis, length, causal, documents, window))
        dropped = p * kept(rows, p, drop)
        y = xp.zeros((b, length, heads * q.shape[4]), q.dtype)
        out = by_head(y, heads, kv_heads)
        for block, v_j in ring(axis, v):
            out += dropped[..., block] @ v_j[:, :, None]
        return rounded(y, qkv.dtype), (qkv, rows, p)

    @staticmethod
    def backward(
        grad: Array,
        qkv: Array,
        rows: Array | None,
        p: Array,
        *,
        wanted: tuple[bool, ...],
        heads: int,
        kv_heads: int,
        causal: bool,
        drop: float,
        window: int | None,
        axis: Communicator,
    ) -> tuple[Any, ...]:
        xp = array_module(qkv)
        q, k, v = split_heads(qkv, heads, kv_heads)
        q = q.astype(wide(q.dtype), copy=False)
        g = by_head(grad.astype(q.dtype, copy=False), heads, kv_heads)
        mask = kept(rows, p, drop)
        dp = xp.empty_like(p)
        for block, v_j in ring(axis, v):
            dp[..., block] = g @ v_j[:, :, None].swapaxes(3, 4)
        dp *= mask
        ds = kernels.softmax_backward(dp, p, -1)
        ds *= 1.0 / math.sqrt(q.shape[4])
        d_qkv = xp.zeros(qkv.shape, q.dtype)
        dq, dk, dv = split_heads(d_qkv, heads, kv_heads)
        for block, k_j in ring(axis, k):
            dq += ds[..., block] @ k_j[:, :, None]
        # Summands for the keys and values of all ranks; a group shares them.
        every_k = (ds.swapaxes(3, 4) @ q).sum(axis=2)
        every_v = ((p * mask).swapaxes(3, 4) @ g).sum(axis=2)
        dk[...] = axis.reduce_scatter(every_k, 2)
        dv[...] = axis.reduce_scatter(every_v, 2)
        return rounded(d_qkv, qkv.dtype), None, None


def ring(axis: Communicator, x: Array) -> Iterator[tuple[slice, Array]]:
    """Pass x around: (which tokens of the whole sequence, their x, in at least float32), this rank's own first.

    Cost: size - 1 messages of x.nbytes; nothing is computed meanwhile.
    """
    length = x.shape[2]
    for hop in range(axis.size):
        if hop:
            x = axis.shift(x)
        source = (axis.rank - hop) % axis.size
        yield slice(source * length, (source + 1) * length), x.astype(wide(x.dtype), copy=False)


def allowed(
    xp: Any, axis: Communicator, length: int, causal: bool, documents: Array | None, window: int | None
) -> Array | None:
    """bool, broadcastable to (b, kv, group, query, key): True where this rank's queries may look; None: everywhere."""
    here = positions(length * axis.size, axis.size, axis.rank, zigzag=False, xp=xp)
    mask = None
    if causal:
        every = xp.arange(length * axis.size)
        mask = every <= here[:, None]
        if window is not None:
            mask &= every > here[:, None] - window
    if documents is not None:
        same = same_document(documents[:, here], documents)[:, None, None]
        mask = same if mask is None else same & mask
    return mask


def kept(rows: Array | None, p: Array, drop: float) -> Any:
    """The scaled dropout mask over the probabilities (b, kv, group, query, key); 1 without dropout."""
    if rows is None:
        return 1.0
    return keep_mask(rows.reshape(p.shape[:-1]), p.shape[-1], drop).astype(p.dtype) * keep_scale(drop)


def rsa_attention(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    axis: Communicator,
    causal: bool,
    documents: Array | None,
    rows: Array | None,
    drop: float,
    window: int | None,
) -> Tensor:
    """`attention` of kind rsa."""
    how: dict[str, Any] = {"causal": causal, "drop": drop, "window": window}
    return RsaAttention.apply(qkv, documents, rows, heads=heads, kv_heads=kv_heads, **how, axis=axis)
