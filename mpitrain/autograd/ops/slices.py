"""Causal attention of one slice of a sequence: a query sees the keys of all earlier slices, and its own up to itself.

    keys       slice 0 | slice 1  | slice 2 |        .    the triangle of one's own keys
    slice 0    .                                     #    the rectangle of all earlier ones, where nothing is masked
    slice 1    ########.
    slice 2    ###################.

The two are softmaxes over different keys, which are merged.  Nothing is computed that is masked away, so slices
together do the work of the whole sequence.  Dropout's columns are the keys' places in it, so any slicing gives the same
numbers.  Halves are merged, and added up, in float32.

With a sliding window earlier slices that no query sees are left out, and of the others the kernel skips the keys before
the window.

Shapes: b sample, l places of the slice, c places of all earlier ones together, w the packed width of attention.py.
Source: Li et al. 2021, "TeraPipe", arXiv:2102.07988, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain.autograd.function import Function
from mpitrain.autograd.needs import EXACT, NEAR
from mpitrain.autograd.ops.attention import (
    attend,
    attend_backward,
    attention,
    by_head,
    check_heads,
    checked_mask,
    checked_rows,
    checked_window,
    merge,
    rounded,
    split_heads,
)
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, wide
from mpitrain.errors import ShapeError


class SliceAttention(Function):
    """Attention of a slice on itself and on at least one earlier one; saves them, its output, a number a query."""

    needs = (EXACT, EXACT, EXACT, NEAR)  # what later slices hold as well, as the first's `past` does, waits once

    @staticmethod
    def forward(
        qkv: Array,
        mask: Array | None,
        rows: Array | None,
        *past: Array,
        heads: int,
        kv_heads: int,
        drop: float,
        window: int | None,
        skipped: int,
    ) -> tuple[Array, tuple[Any, ...]]:
        xp = array_module(qkv)
        compute = wide(qkv.dtype)
        q, k, v = split_heads(qkv, heads, kv_heads)
        earlier = _joined(past, heads, kv_heads)
        rectangle, triangle = _how(earlier[0].shape[2], q, mask, rows, drop, window, skipped)
        y = xp.empty((*qkv.shape[:2], heads * q.shape[-1]), compute)
        out, more = by_head(y, heads, kv_heads), xp.empty(q.shape, compute)
        lse = attend(q, *earlier, out, **rectangle)
        merge(out, lse, more, attend(q, k, v, more, **triangle))
        y = rounded(y, qkv.dtype)
        return y, (qkv, mask, rows, y, lse, *past)

    @staticmethod
    def backward(
        grad: Array,
        qkv: Array,
        mask: Array | None,
        rows: Array | None,
        y: Array,
        lse: Array,
        *past: Array,
        wanted: tuple[bool, ...],
        heads: int,
        kv_heads: int,
        drop: float,
        window: int | None,
        skipped: int,
    ) -> tuple[Any, ...]:
        xp = array_module(qkv)
        compute = wide(qkv.dtype)
        q, k, v = split_heads(qkv, heads, kv_heads)
        earlier = _joined(past, heads, kv_heads)
        rectangle, triangle = _how(earlier[0].shape[2], q, mask, rows, drop, window, skipped)
        g, y = (by_head(array, heads, kv_heads) for array in (grad, y))
        d_qkv = xp.empty(qkv.shape, compute)
        dq, dk, dv = split_heads(d_qkv, heads, kv_heads)
        attend_backward(g, q, k, v, y, lse, dq, dk, dv, **triangle)
        more, sums = xp.empty(q.shape, compute), [xp.empty(each.shape, compute) for each in earlier]
        attend_backward(g, q, *earlier, y, lse, more, *sums, **rectangle)
        dq += more
        return rounded(d_qkv, qkv.dtype), None, None, *_parted(sums, past, wanted[3:], heads, kv_heads)


def _how(
    c: int, q: Array, mask: Array | None, rows: Array | None, drop: float, window: int | None, skipped: int
) -> list[dict[str, Any]]:
    """How the kernel is told to do the rectangle, with c keys after those that were skipped, and the triangle."""
    masks = [None, None] if mask is None else [mask, mask] if mask.shape[3] == 1 else [mask[..., :c], mask[..., c:]]
    keys: list[Array | None] = [None, None]
    if rows is not None:
        every = array_module(q).arange(skipped, skipped + c + q.shape[3])
        keys = [every[:c], every[c:]]
    since = [None, None] if window is None else [c + 1 - window, 1 - window]
    return [
        {"causal": causal, "mask": masks[i], "rows": rows, "drop": drop, "keys": keys[i], "since": since[i]}
        for i, causal in enumerate((False, True))
    ]


def _joined(past: Sequence[Array], heads: int, kv_heads: int) -> tuple[Array, Array]:
    """Keys and values (b, kv, c, d) of earlier slices."""
    xp = array_module(past[0])
    parts = [split_heads(each, heads, kv_heads) for each in past]
    k, v = (xp.concatenate([part[i] for part in parts], axis=2) for i in (1, 2))
    return k, v


def _parted(
    sums: Sequence[Array], past: Sequence[Array], wanted: Sequence[bool], heads: int, kv_heads: int
) -> list[Array | None]:
    """The gradient of each earlier slice from those of all keys and values; its queries have none."""
    xp = array_module(sums[0])
    grads: list[Array | None] = []
    start = 0
    for each, want in zip(past, wanted, strict=True):
        places = slice(start, start + each.shape[1])
        start = places.stop
        if not want:
            grads.append(None)
            continue
        grad = xp.zeros(each.shape, each.dtype)
        _, dk, dv = split_heads(grad, heads, kv_heads)
        dk[...], dv[...] = (rounded(total[:, :, places], each.dtype) for total in sums)
        grads.append(grad)
    return grads


def slice_attention(
    qkv: Tensor,
    past: Sequence[Tensor],
    heads: int,
    kv_heads: int | None = None,
    *,
    mask: Array | None = None,
    rows: Array | None = None,
    drop: float = 0.0,
    window: int | None = None,
) -> Tensor:
    """Causal attention of one slice of a sequence: softmax(q k^T / sqrt(d)) v over its own keys and all earlier ones.

    Args:
        qkv: (b, l, (heads + 2 kv_heads) * d), packed as for `attention`.
        past: the earlier slices from the beginning of the sequence, in order, (b, l_j, w) each and of qkv's dtype; of
            these only keys and values are used.  Empty: this is the first slice, and the op is `attention`.
        heads: how many heads of queries `qkv` holds.
        kv_heads: how many heads of keys and values it holds; None: as many.
        mask: bool array, True where attention is allowed besides, with t = c + l keys from the beginning on: (b, t) by
            key, (b, l, t) by query and key, or anything that broadcasts to (b, heads, l, t).
        rows: uint64 (b, heads, l) from `Draw.attention_rows`, for dropout of the attention weights; None: no dropout.
        drop: the probability with which a weight is dropped.
        window: a query at place i of the sequence sees places i - window + 1..i only; None: from 0 on.

    Returns:
        (b, l, heads * d), the rows that `attention` gives for these places of the whole sequence.

    Raises:
        ShapeError: as `attention`, or an earlier slice is of other samples, another width or another dtype.

    Cost: 4 l (c + l/2) d operations a head, and 2.5 times that in backward, which makes the scores again; earlier keys
        and values are copied once each way.  With a window there are window keys instead of c + l/2, at most, and
        slices before it are not touched.  Memory for backward: qkv, the output and a number a query; earlier slices
        belong to who made them.
    Source: Li et al. 2021, "TeraPipe", arXiv:2102.07988, section 3.1.
    """
    if not past:
        return attention(qkv, heads, kv_heads, mask=mask, rows=rows, drop=drop, window=window)
    kv_heads = heads if kv_heads is None else kv_heads
    check_heads(qkv, heads, kv_heads)
    b, length, width = qkv.shape
    for i, each in enumerate(past):
        if each.ndim != 3 or (each.shape[0], each.shape[2]) != (b, width) or each.dtype != qkv.dtype:
            raise ShapeError(
                f"slice attention: earlier slice {i} is {each.shape} {each.dtype}; wanted is ({b}, any length, {width})"
                f" {qkv.dtype}, as the slice {qkv.shape} itself"
            )
    t = sum(each.shape[1] for each in past) + length
    mask = checked_mask(mask, (b, heads, length, t))
    rows = checked_rows(rows, drop, (b, heads, length))
    window = checked_window(window, t, causal=True)
    skipped = 0
    if window is not None:
        hidden, past = t - length + 1 - window, list(past)  # keys before the first query's window
        while len(past) > 1 and skipped + past[0].shape[1] <= hidden:
            skipped += past.pop(0).shape[1]
    how: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "drop": drop, "window": window, "skipped": skipped}
    if skipped and mask is not None and mask.shape[3] > 1:
        mask = mask[..., skipped:]
    return SliceAttention.apply(qkv, mask, rows, *past, **how)
