"""Attention of all heads on packed queries, keys and values, of which groups of heads may share the latter two.

    qkv (b, s, w)      the last dim is (kv head, [g queries | key | value], d), so w = (heads + 2 kv_heads) d
    heads = kv_heads   g is 1: (head, query | key | value, d)
    y (b, s, heads d)  head kv * g + member, in this order

A slice of the last dim along whole groups is again such an array, so a rank holds some of the heads by holding some of
the columns.  Whoever brings keys from elsewhere (context parallelism, slices of a sequence) has the same parts to call:
`split_heads` and `by_head` give views, `attend` and `attend_backward` run the kernel on them, `merge` puts results over
different keys together.

Halves are handed to the kernel as they are; what is added up over several of its calls is float32, and rounded once.

Shapes: b sample, kv head of keys and values, g member of its group of queries, s query, t key, d width of a head.
Source: Vaswani et al. 2017, arXiv:1706.03762, eq. 1; groups: Ainslie et al. 2023, "GQA", arXiv:2305.13245; without the
matrix of probabilities: Dao et al. 2022, arXiv:2205.14135.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpitrain import kernels
from mpitrain.autograd.function import Function
from mpitrain.autograd.needs import EXACT, NEAR
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, is_half, wide
from mpitrain.errors import ShapeError
from mpitrain.kernels.blocks import kept_scores


class Attention(Function):
    """Self-attention of all heads on packed queries, keys and values; saves those, its output, a number a query.

    With `keep_scores` also the scores, which backward then does not make again.
    """

    needs = (NEAR, EXACT, EXACT, NEAR)

    @staticmethod
    def forward(
        qkv: Array,
        mask: Array | None,
        rows: Array | None,
        *,
        heads: int,
        kv_heads: int,
        causal: bool,
        drop: float,
        keep_scores: bool,
        window: int | None,
    ) -> tuple[Array, tuple[Any, ...]]:
        xp = array_module(qkv)
        b, s, _ = qkv.shape
        q, k, v = split_heads(qkv, heads, kv_heads)
        y = xp.empty((b, s, heads * q.shape[-1]), qkv.dtype)
        scores = None
        if keep_scores:
            scores = xp.empty((*q.shape[:3], kept_scores(s, s, causal, first_seen(window))), wide(qkv.dtype))
        how: dict[str, Any] = {"causal": causal, "mask": mask, "rows": rows, "drop": drop, "scores": scores}
        how["since"] = first_seen(window)
        lse = attend(q, k, v, by_head(y, heads, kv_heads), **how)
        return y, (qkv, mask, rows, y, lse, scores)

    @staticmethod
    def backward(
        grad: Array,
        qkv: Array,
        mask: Array | None,
        rows: Array | None,
        y: Array,
        lse: Array,
        scores: Array | None,
        *,
        wanted: tuple[bool, ...],
        heads: int,
        kv_heads: int,
        causal: bool,
        drop: float,
        keep_scores: bool,
        window: int | None,
    ) -> tuple[Any, ...]:
        g, y = (by_head(array, heads, kv_heads) for array in (grad, y))
        d_qkv = array_module(qkv).empty(qkv.shape, qkv.dtype)
        into = split_heads(d_qkv, heads, kv_heads)
        how: dict[str, Any] = {"causal": causal, "mask": mask, "rows": rows, "drop": drop, "scores": scores}
        how["since"] = first_seen(window)
        attend_backward(g, *split_heads(qkv, heads, kv_heads), y, lse, *into, **how)
        return d_qkv, None, None


def attention(
    qkv: Tensor,
    heads: int,
    kv_heads: int | None = None,
    *,
    causal: bool = True,
    mask: Array | None = None,
    rows: Array | None = None,
    drop: float = 0.0,
    keep_scores: bool = False,
    window: int | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v for each head.

    Args:
        qkv: (b, s, (heads + 2 kv_heads) * d), the last dim in the order (kv head, [g queries | key | value], d) with
            g = heads / kv_heads.
        heads: how many heads of queries `qkv` holds.
        kv_heads: how many heads of keys and values it holds; None: as many, each query head its own.
        causal: position i sees positions 0..i only.
        mask: bool array, True where attention is allowed besides that: (b, s) by key (padding), (b, s, s) by query and
            key (documents), or anything that broadcasts to (b, heads, s, s).  Or int64 (b, s): the first position that
            each query sees (documents side by side), and what is before is not computed; where that is after its own,
            as for padding, it sees nothing.
        rows: uint64 (b, heads, s) from `Draw.attention_rows`, for dropout of the attention weights; None: no dropout.
        drop: the probability with which a weight is dropped.
        keep_scores: the scores wait for backward, which has one product of five less then and gives the same gradients
            to the last bit; else it makes them again, as selective recomputation does.
        window: with `causal`, position i sees positions i - window + 1..i only; None: from 0 on.

    Returns:
        (b, s, heads * d) of qkv's dtype.  A query that may see no position gives 0, and its gradient is exactly 0.

    Raises:
        ShapeError: heads are no multiple of kv_heads, the width is not that of so many heads, the mask or the rows have
            another shape, or the window holds no position or is not of causal attention.

    Cost: 4 s^2 d operations a head, half of them with `causal`, 4 s window d with a window much shorter than s, and 2.5
        times that in backward; fewer heads of keys and values save none of it, only memory.  Memory for backward: qkv,
        the result, and a number a query and head; with `keep_scores` also b * heads * `kernels.blocks.kept_scores(s, s,
        causal, 1 - window)` numbers, which is s^2, and about half of it with `causal`: s (s + 64) / 2 for a multiple of
        64; at most s (window + 63) with a window.  Numbers are float32 where qkv is a half.
    Source: Vaswani et al. 2017, arXiv:1706.03762, eq. 1; Ainslie et al. 2023, arXiv:2305.13245, section 2.2; Dao et al.
        2022, arXiv:2205.14135; what is kept and what made again: Korthikanti et al. 2022, arXiv:2205.05198, section 5;
        the window: Beltagy et al. 2020, "Longformer", arXiv:2004.05150, section 3.1.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    check_heads(qkv, heads, kv_heads)
    b, s, _ = qkv.shape
    mask = checked_mask(mask, (b, heads, s, s), by_query=True)
    rows = checked_rows(rows, drop, (b, heads, s))
    how: dict[str, Any] = {"causal": causal, "drop": drop, "keep_scores": keep_scores}
    how["window"] = checked_window(window, s, causal)
    return Attention.apply(qkv, mask, rows, heads=heads, kv_heads=kv_heads, **how)


def check_heads(qkv: Tensor, heads: int, kv_heads: int, op: str = "attention") -> None:
    """Refuse what is no packed array of so many heads, with a ShapeError that begins with the op's name."""
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ShapeError(f"{op}: {heads} heads of queries in {kv_heads} groups that are not of one size")
    if qkv.ndim != 3 or qkv.shape[2] % (heads + 2 * kv_heads):
        held = "heads * 3" if heads == kv_heads else "(heads + 2 kv_heads)"
        among = "" if heads == kv_heads else f" and {kv_heads} of keys and values"
        raise ShapeError(f"{op}: qkv {qkv.shape} is not (batch, sequence, {held} * width) for {heads} heads{among}")


def checked_mask(mask: Array | None, shape: tuple[int, int, int, int], by_query: bool = False) -> Array | None:
    """A mask as four dims that broadcast to `shape`, (b, heads, s, t); None for none.

    `by_query`: it may be the first key of each query instead, int64 (b, s).
    """
    if mask is None:
        return None
    b, _, s, t = shape
    if by_query and mask.dtype == np.int64 and mask.shape == (b, s):
        return mask
    given = mask.shape
    if mask.ndim == 2:
        mask = mask[:, None, None, :]
    elif mask.ndim == 3:
        mask = mask[:, None]
    fits = mask.ndim == 4 and all(n in (1, m) for n, m in zip(mask.shape, shape, strict=True))
    if not fits or mask.dtype != bool:
        raise ShapeError(
            f"attention: a mask of shape {given} and dtype {mask.dtype}; wanted is bool, ({b}, {t}) by key or"
            f" ({b}, {s}, {t}) by query and key"
        )
    return mask


def checked_rows(rows: Array | None, drop: float, shape: tuple[int, int, int]) -> Array | None:
    """The random streams of dropout, one for each query of each head; None where nothing is dropped."""
    if drop and rows is None:
        raise ShapeError("attention: dropout needs rows, the random stream of each query")
    if rows is not None and rows.shape != shape:
        b, heads, s = shape
        raise ShapeError(f"attention: rows {rows.shape}; wanted is one a query of each head, ({b}, {heads}, {s})")
    return rows if drop else None


def checked_window(window: int | None, s: int, causal: bool) -> int | None:
    """A sliding window over s positions; None where it hides none of them."""
    if window is None:
        return None
    if window < 1 or not causal:
        raise ShapeError(
            f"attention: a window of {window} positions{'' if causal else ' of attention that is not causal'}; wanted"
            " are at least 1, a query's own and those before it, with causal=True"
        )
    return window if window < s else None


def first_seen(window: int | None) -> int | None:
    """The first key that query 0 sees, as kernels want it, where queries and keys are of the same places."""
    return None if window is None else 1 - window


# ----------------------------------------------------------------------------------------- the parts of a packed array


def split_heads(qkv: Array, heads: int, kv_heads: int) -> tuple[Array, Array, Array]:
    """Queries (b, kv, g, s, d), keys and values (b, kv, s, d) as views of a packed array (b, s, w)."""
    b, s, width = qkv.shape
    g, d = heads // kv_heads, width // (heads + 2 * kv_heads)
    parts = qkv.reshape(b, s, kv_heads, g + 2, d).transpose(0, 2, 3, 1, 4)
    return parts[:, :, :g], parts[:, :, g], parts[:, :, g + 1]


def by_head(y: Array, heads: int, kv_heads: int) -> Array:
    """(b, s, heads d) as (b, kv, g, s, d), a view."""
    b, s, width = y.shape
    return y.reshape(b, s, kv_heads, heads // kv_heads, width // heads).transpose(0, 2, 3, 1, 4)


def attend(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    *,
    causal: bool,
    mask: Array | None,
    rows: Array | None,
    drop: float,
    keys: Array | None = None,
    scores: Array | None = None,
    since: int | None = None,
) -> Array:
    """Write softmax(q k^T / sqrt(d)) v into `out`, for groups of queries on the same keys.

    Args:
        q: (b, kv, g, s, d), any strides; out alike, which may be float32 where q is a half.
        k: (b, kv, t, d); v alike.
        out: written.
        scores: (b, kv, g, kept) as for `kernels.attention`, written; None: scores are not kept.
        causal, mask, rows, drop, keys, since: as for `kernels.attention`, where the head of a query is kv * g + its
            member: the mask broadcasts to (b, kv * g, s, t), rows are (b, kv * g, s).  A mask of whole numbers is
            `firsts` of the kernel.

    Returns:
        lse (b, kv, g, s), at least float32, the logarithm of the sum of each query's exponentials.
    """
    how: dict[str, Any] = {"scale": _scale(q), "causal": causal, "drop": drop, "keys": keys, "since": since}
    made = [kernels.attention(q[one], k, v, out[one], **how, **here) for one, here in _members(q, mask, rows, scores)]
    return made[0][:, :, None] if len(made) == 1 else array_module(q).stack(made, axis=2)


def attend_backward(
    grad: Array,
    q: Array,
    k: Array,
    v: Array,
    y: Array,
    lse: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    *,
    causal: bool,
    mask: Array | None,
    rows: Array | None,
    drop: float,
    keys: Array | None = None,
    scores: Array | None = None,
    since: int | None = None,
) -> None:
    """Write the gradients of q, k and v into dq, dk and dv; dk and dv are sums over the queries of a group.

    Where q, k and v are halves the gradients may be float32, for a caller who adds to them.

    Args:
        grad, y, dq: (b, kv, g, s, d), as q.
        lse: (b, kv, g, s) from `attend`, or over further keys, as for `kernels.attention_backward`.
        dk, dv: as k.
        scores: that `attend` wrote; None: they are made again.
        q, k, v, causal, mask, rows, drop, keys, since: as for `attend`.
    """
    xp = array_module(q)
    sum_k, sum_v = dk, dv
    if q.shape[2] > 1 and is_half(dk.dtype):
        sum_k, sum_v = (xp.empty(x.shape, wide(x.dtype)) for x in (dk, dv))
    into_k, into_v = sum_k, sum_v
    for i, (one, here) in enumerate(_members(q, mask, rows, scores)):
        if i == 1:
            into_k, into_v = xp.empty(k.shape, sum_k.dtype), xp.empty(v.shape, sum_v.dtype)
        given = grad[one], q[one], k, v, y[one], lse[one]
        here |= {"drop": drop, "keys": keys, "since": since}
        kernels.attention_backward(*given, dq[one], into_k, into_v, scale=_scale(q), causal=causal, **here)
        if i:
            sum_k += into_k
            sum_v += into_v
    if sum_k is not dk:
        kernels.narrow(sum_k, dk.dtype, dk)
        kernels.narrow(sum_v, dv.dtype, dv)


def merge(y: Array, lse: Array, more: Array, more_lse: Array) -> None:
    """Make of two softmaxes over different keys the one over all of them, in y and lse.

    A query that saw no key has y = 0 and about the lowest finite number as its lse, which weighs nothing beside any
    other and keeps y = 0 beside its like.  No infinity, so no NaN.

    Args:
        y: (..., d) float32 or float64, written; lse: (...), written.
        more: (..., d), spent; more_lse: (...).
    """
    xp = array_module(y)
    both = xp.logaddexp(lse, more_lse)
    y *= xp.exp(lse - both)[..., None]
    more *= xp.exp(more_lse - both)[..., None]
    y += more
    lse[...] = both


def rounded(x: Array, dtype: Any) -> Array:
    """What was added up in `wide(dtype)`, in this dtype: itself, or rounded, without a word if that gives infinity."""
    return kernels.narrow(x, dtype) if is_half(dtype) else x


def _members(
    q: Array, mask: Array | None, rows: Array | None, scores: Array | None
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """For each place in a group: the index of its queries in (b, kv, g, ...), and what else is theirs."""
    _, kv_heads, g, _, _ = q.shape
    by_group = kv_heads, g
    firsts = mask if mask is not None and mask.dtype != bool else None
    mask = mask if firsts is None else None
    if mask is not None and mask.shape[1] > 1:
        mask = mask.reshape(mask.shape[0], *by_group, *mask.shape[2:])
    if rows is not None:
        rows = rows.reshape(rows.shape[0], *by_group, rows.shape[2])
    for member in range(g):
        one = slice(None), slice(None), member
        yield (
            one,
            {
                "mask": mask[one] if mask is not None and mask.ndim == 5 else mask,
                "firsts": firsts,
                "rows": None if rows is None else rows[one],
                "scores": None if scores is None else scores[one],
            },
        )


def _scale(q: Array) -> float:
    return 1.0 / math.sqrt(max(1, q.shape[-1]))
