"""Attention without the matrix of probabilities: made block by block, forward and again backward.

A block is some heads, some queries and the keys that they may see.  Its scores live in cache; what waits for backward
is one number a query, the logarithm of the sum of its exponentials.  With causal attention the keys after a block's
last query are never touched.

Scores are held keys first, (b, h, keys, queries): then maxima and sums run along whole vectors of queries, twice as
fast as along short rows, and all products stay plain BLAS calls on views.

Halves are storage only: here they are widened first, and results narrowed last.

Shapes: b sample, h head, s query, t key, d width of a head.
Source: Dao et al. 2022, "FlashAttention", arXiv:2205.14135, algorithms 1 and 4; the running maximum is not needed here,
since a block sees all keys of its queries at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module, is_half, wide
from mpitrain.kernels import blocks
from mpitrain.kernels.reference.halves import narrow, widen
from mpitrain.kernels.reference.residual import keep_scale
from mpitrain.rng import keep_mask

Part = tuple[slice, slice]  # samples, heads


def attention(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    *,
    scale: float,
    causal: bool,
    mask: Array | None,
    rows: Array | None,
    drop: float,
    keys: Array | None = None,
    scores: Array | None = None,
    since: int | None = None,
    firsts: Array | None = None,
) -> Array:
    """Write softmax(scale q k^T) v into `out`.

    Args:
        q: (b, h, s, d), any strides; out alike.  Float32 or float64; or float16 or bfloat16, of which any of the arrays
            may stand where others are float32: what is computed is float32 then.
        k: (b, h, t, d); v alike.  These may be some of the keys that the queries see: results over others are put
            together by `lse`, each output weighed by exp(its lse - the logarithm of the sum of exp(lse)).
        out: written.
        scale: factor of the scores.
        causal: query i sees keys 0..i only; then t is s.
        mask: bool, broadcastable to (b, h, s, t), True where query i may attend to key j; None: everywhere.
        rows: uint64 (b, h, s), the random stream of each query's dropout mask over its keys; None: no dropout.
        drop: probability that one attention weight is dropped; the others are scaled by 1 / (1 - drop).
        keys: int64 (t,), the global number of each key, which is its column in the dropout mask; None: 0, 1, ...
        scores: (b, h, `blocks.kept_scores` of s, t and causal) in the precision of what is computed, written: scale
            q k^T by query and key, whatever is masked, for `attention_backward` to read; None: it makes them again.
            With causal attention the keys after the last query of each stripe of `blocks.QUERIES` queries are left out,
            and so are those before the first key of its first; what no query sees within a stripe is 0.
        since: query i sees no key before key `since` + i, so 1 - window with causal attention and a sliding window;
            where queries and keys are chunks of a sequence, those of the chunk at a and the other at b, a - b + 1 -
            window.  None: it sees them from the first on.  With `causal` it is not above 0.
        firsts: int64 (b, s), a key before which a query sees none either, as the first one of its document; None: there
            is none.  Blocks before the first key of all their queries are left out.

    Returns:
        lse (b, h, s) in the precision of what is computed: the logarithm of the sum of a query's exponentials.  A query
        that may see no key gives 0, and its lse is the lowest finite number, which changes no sum of exponentials that
        it is added to.
    """
    xp = array_module(q)
    if any(is_half(x.dtype) for x in (q, k, v, out)):
        y = xp.empty(out.shape, wide(q.dtype))
        how: dict[str, Any] = {"scale": scale, "causal": causal, "mask": mask, "rows": rows, "drop": drop, "keys": keys}
        lse = attention(_widened(q), _widened(k), _widened(v), y, scores=scores, since=since, firsts=firsts, **how)
        _deliver(y, out)
        return lse
    lowest = float(xp.finfo(q.dtype).min)
    lse = xp.full(q.shape[:3], lowest, q.dtype)
    if k.shape[2] == 0:
        out[...] = 0.0
    kept_by = keep_scale(drop) if rows is not None else 1.0
    later = _later_keys(xp, q, causal)
    assert scores is None or causal or since is None
    for part, queries, seen in _blocks(xp, q, k, causal, since, firsts):
        stripe = None if scores is None else _kept_stripe(scores, part, queries, seen, causal, since)
        if seen.start == seen.stop:
            out[part][:, :, queries] = 0.0
            if stripe is not None:
                stripe[...] = 0.0
            continue
        scaled = q[part][:, :, queries] * scale
        s = _scores(xp, k[part][:, :, seen], scaled)
        if stripe is not None:
            first, by_query = stripe.shape[3] - s.shape[2], s.swapaxes(2, 3)
            stripe[..., :first] = 0.0
            stripe[..., first:] = xp.tril(by_query, queries.start - seen.start) if causal else by_query
            early = _earlier_keys(xp, part, queries, seen, since, firsts)
            if early is not None:
                xp.copyto(stripe[..., first : first + early.shape[2]], 0.0, where=early.swapaxes(2, 3))
        _hide(xp, s, later, mask, part, queries, seen, since, firsts)
        # A query without any key has maximum -inf; less the lowest finite number that stays -inf, and its exp is 0.
        highest = xp.maximum(s.max(axis=2), lowest)
        s -= highest[:, :, None]
        xp.exp(s, out=s)
        total = xp.maximum(s.sum(axis=2), 1.0)  # the largest score contributes exactly 1
        if rows is not None:
            s *= _weights_left(xp, rows[part][:, :, queries], s, keys, seen, drop)
        y = out[part][:, :, queries]
        xp.matmul(s.swapaxes(2, 3), v[part][:, :, seen], out=y)
        y *= (kept_by / total)[..., None]
        xp.log(total, out=total)
        total += highest
        lse[part][:, :, queries] = total
    return lse


def attention_backward(
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
    scale: float,
    causal: bool,
    mask: Array | None,
    rows: Array | None,
    drop: float,
    keys: Array | None = None,
    scores: Array | None = None,
    since: int | None = None,
    firsts: Array | None = None,
) -> None:
    """Write the gradients of q, k and v into dq, dk and dv; the other arguments as in `attention`.

    With P the probabilities and M the scaled dropout mask:  dV = (P M)^T dO,  dP = M (dO V^T),
    dS = P (dP - rowsum(dO O)),  dQ = scale dS K,  dK = scale dS^T Q.

    Where k and v are some of the keys, y and lse are the output and the logarithm over all of them; dq is then the part
    of the gradient that comes from these.  With the scores that forward kept one product of five is saved, and every
    bit is the same.
    """
    xp = array_module(q)
    if any(is_half(x.dtype) for x in (grad, q, k, v, y, dq, dk, dv)):
        d_q, d_k, d_v = (xp.empty(x.shape, wide(x.dtype)) for x in (dq, dk, dv))
        grad, q, k, v, y = (_widened(x) for x in (grad, q, k, v, y))
        how: dict[str, Any] = {"scale": scale, "causal": causal, "mask": mask, "rows": rows, "drop": drop, "keys": keys}
        attention_backward(grad, q, k, v, y, lse, d_q, d_k, d_v, scores=scores, since=since, firsts=firsts, **how)
        for made, out in ((d_q, dq), (d_k, dk), (d_v, dv)):
            _deliver(made, out)
        return
    if q.shape[2] == 0 or k.shape[2] == 0:
        for gradient in (dq, dk, dv):
            gradient[...] = 0.0
        return
    kept_by = keep_scale(drop) if rows is not None else 1.0
    later = _later_keys(xp, q, causal)
    delta = xp.einsum("bhsd,bhsd->bhs", grad, y)
    # From the last queries to the first: with causal attention the last block sees all keys, so it writes dk and dv and
    # the others add.  Where queries do not see the first keys no block sees all.
    skips = since is not None or firsts is not None
    if skips:
        dk[...] = 0.0
        dv[...] = 0.0
    for part, queries, seen in _blocks(xp, q, k, causal, since, firsts, backwards=True):
        first = not skips and queries.stop == q.shape[2]
        if seen.start == seen.stop:
            dq[part][:, :, queries] = 0.0
            continue
        g = grad[part][:, :, queries]
        scaled = q[part][:, :, queries] * scale
        if scores is None:
            p = _scores(xp, k[part][:, :, seen], scaled)
        else:  # laid out as the product is: BLAS may round one layout otherwise than another
            kept = _kept_stripe(scores, part, queries, seen, causal, since)
            p = kept[..., kept.shape[3] - (seen.stop - seen.start) :].swapaxes(2, 3).copy()
        _hide(xp, p, later, mask, part, queries, seen, since, firsts)
        p -= lse[part][:, :, None, queries]
        xp.exp(p, out=p)
        dp = xp.matmul(v[part][:, :, seen], g.swapaxes(2, 3))
        dropped = p
        if rows is not None:
            kept = _weights_left(xp, rows[part][:, :, queries], p, keys, seen, drop)
            kept *= kept_by
            dp *= kept
            kept *= p
            dropped = kept
        _put(xp, dropped, g, dv[part][:, :, seen], first)
        dp -= delta[part][:, :, None, queries]
        dp *= p
        _put(xp, dp, scaled, dk[part][:, :, seen], first)
        d_queries = dq[part][:, :, queries]
        xp.matmul(dp.swapaxes(2, 3), k[part][:, :, seen], out=d_queries)
        d_queries *= scale


def _blocks(
    xp: Any,
    q: Array,
    k: Array,
    causal: bool,
    since: int | None,
    firsts: Array | None,
    backwards: bool = False,
) -> Iterator[tuple[Part, slice, slice]]:
    """(samples and heads, queries, keys): about SCORES scores each.  A device takes all samples and heads at once."""
    b, h, s, _ = q.shape
    t = k.shape[2]
    assert s == t or not causal, (s, t)
    assert not causal or since is None or since <= 0, since
    height = max(1, min(blocks.QUERIES, s))
    samples, heads = (1, min(h, max(1, blocks.SCORES // (height * max(1, t))))) if xp is np else (b, h)
    starts = range(0, s if t else 0, height)
    for sample in range(0, b, max(1, samples)):
        for head in range(0, h, max(1, heads)):
            part = slice(sample, sample + samples), slice(head, head + heads)
            for start in reversed(starts) if backwards else starts:
                stop = min(start + height, s)
                last = stop if causal else t
                first = blocks.first_key(start, last, since)
                if firsts is not None and xp is np:  # a device does not wait to be told
                    first = max(first, min(last, int(firsts[part[0], start:stop].min())))
                yield part, slice(start, stop), slice(first, last)


def _later_keys(xp: Any, q: Array, causal: bool) -> Array | None:
    """(keys, queries) of a block on the diagonal: -inf where the key comes after the query, else 0."""
    if not causal:
        return None
    place = xp.arange(min(blocks.QUERIES, q.shape[2]))
    return xp.where(place[:, None] > place[None, :], -math.inf, 0.0).astype(q.dtype)


def _scores(xp: Any, k: Array, scaled: Array) -> Array:
    """(b, h, keys, queries) scores of a block."""
    return xp.matmul(k, scaled.swapaxes(2, 3))


def _earlier_keys(
    xp: Any, part: Part, queries: slice, keys: slice, since: int | None, firsts: Array | None
) -> Array | None:
    """(1 or b, 1, keys, queries), True where a key is before the first that a query sees: of the first keys of a block,
    perhaps not all.

    None: there are no such keys.
    """
    stop = keys.stop if firsts is not None else 0 if since is None else min(keys.stop, queries.stop - 1 + since)
    if stop <= keys.start:
        return None
    places = xp.arange(keys.start, stop)[:, None]
    early: Array | None = None
    if since is not None:
        early = (places < since + xp.arange(queries.start, queries.stop))[None, None]
    if firsts is not None:
        before = places < firsts[part[0], None, None, queries]
        early = before if early is None else early | before
    return early


def _kept_stripe(scores: Array, part: Part, queries: slice, keys: slice, causal: bool, since: int | None) -> Array:
    """(b, h, queries, keys) of a block, a view of the scores that are kept: those of its last keys, at least `keys`."""
    height, width = queries.stop - queries.start, keys.stop - blocks.first_key(queries.start, keys.stop, since)
    first = blocks.kept_scores(queries.start, width, causal, since)
    of_block = scores[part][:, :, first : first + height * width]
    return of_block.reshape(*of_block.shape[:2], height, width)


def _hide(
    xp: Any,
    s: Array,
    later: Array | None,
    mask: Array | None,
    part: Part,
    queries: slice,
    keys: slice,
    since: int | None,
    firsts: Array | None,
) -> None:
    """Make the scores of a block -inf where a query may not look."""
    if later is not None:
        height = queries.stop - queries.start
        cut = max(0, keys.start - queries.start)  # of the keys of the queries' own places
        s[:, :, max(0, queries.start - keys.start) :] += later[cut:height, :height]
    early = _earlier_keys(xp, part, queries, keys, since, firsts)
    if early is not None:
        xp.copyto(s[:, :, : early.shape[2]], -math.inf, where=early)
    if mask is not None:
        which = [
            cut if length > 1 else slice(None) for cut, length in zip((*part, queries, keys), mask.shape, strict=True)
        ]
        xp.copyto(s, -math.inf, where=~mask[tuple(which)].swapaxes(2, 3))


def _weights_left(xp: Any, rows: Array, scores: Array, keys: Array | None, seen: slice, drop: float) -> Array:
    """(b, h, keys, queries) the dropout mask as numbers 0 and 1."""
    if keys is None and seen.start:
        keys = xp.arange(seen.stop)
    keep = keep_mask(rows, seen.stop if keys is None else keys[seen], drop)
    return xp.ascontiguousarray(keep.swapaxes(2, 3)).astype(scores.dtype)


def _put(xp: Any, a: Array, b: Array, out: Array, first: bool) -> None:
    """Write a @ b into `out` if it is the first contribution, else add it."""
    if first:
        xp.matmul(a, b, out=out)
    else:
        out += xp.matmul(a, b)


def _widened(x: Array) -> Array:
    """Halves in float32; others as they are."""
    return widen(x) if is_half(x.dtype) else x


def _deliver(made: Array, out: Array) -> None:
    """Write what was computed where it belongs, rounded once if that is in a half precision."""
    if is_half(out.dtype):
        narrow(made, out.dtype, out)
    else:
        out[...] = made
