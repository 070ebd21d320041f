"""Context parallelism: the tokens of each sequence divided over the ranks of an axis (cp).

Everything in a transformer but attention treats each token by itself.  So a rank holds s/c tokens of every sequence and
all weights, and only attention sends anything.  Three ways, which give the same numbers:

    ring       keys and values go around, queries stay; the next block is on its way while this one is computed
    ulysses    all-to-all from tokens to heads, ordinary attention on whole sequences, all-to-all back
    rsa        Li et al.'s two rings with whole rows of scores: the first of its kind, kept to be read

A model needs four calls: `check` once, `positions` for the batch, `attention_rows` for dropout, `attention` in a layer.

    check(seq_len, heads, kv_heads, axis, kind)
    here = positions(seq_len, axis, kind)                       # this rank's tokens: inputs[:, here], targets[:, here]
    rows = attention_rows(draw, stream, heads, axis, kind)      # None without dropout
    y = attention(qkv, heads, kv_heads, axis, kind, documents=documents, rows=rows, drop=p)

On an axis of one rank `attention` is `ops.attention`, and `positions` are all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.autograd import ops
from mpitrain.autograd.ops.attention import checked_window
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module
from mpitrain.comm.communicator import Communicator
from mpitrain.config import CONTEXT_KINDS
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.parallel.context import layout
from mpitrain.parallel.context.ring import ring_attention
from mpitrain.parallel.context.rsa import rsa_attention
from mpitrain.parallel.context.ulysses import ulysses_attention
from mpitrain.rng import Draw

KINDS = CONTEXT_KINDS
"""The kinds of context-parallel attention, the default first."""


def check(seq_len: int, heads: int, kv_heads: int, axis: Communicator, kind: str) -> None:
    """Refuse sizes that cannot be divided over the axis; every rank decides alike, without a message.

    Args:
        seq_len: tokens of a whole sequence.
        heads: query heads that each rank holds (all of them, or its share over tp).
        kv_heads: heads of keys and values that it holds.
        axis: the axis over which the sequence is cut.
        kind: one of KINDS.

    Raises:
        ConfigError: no such kind.
        ShapeError: `seq_len` is not divisible by 2c (ring) or c, or the heads not by c (ulysses).
    """
    if kind not in KINDS:
        raise ConfigError(f"context attention {kind!r} is not known; known: {', '.join(KINDS)}")
    c = axis.size
    if c == 1:
        return
    parts = 2 * c if kind == "ring" else c
    if seq_len % parts:
        near = [n for n in (seq_len // parts * parts, (seq_len // parts + 1) * parts) if n]
        why = f"{parts} chunks, two a rank" if kind == "ring" else f"{parts} parts"
        raise ShapeError(
            f"{kind} attention over axis {axis.name} of size {c} cuts a sequence into {why}:"
            f" seq_len {seq_len} is not divisible by {parts}.  Take {' or '.join(map(str, near))}, or another size of"
            f" {axis.name}."
        )
    if kind == "ulysses" and (heads % c or kv_heads % c):
        raise ShapeError(
            f"ulysses attention gives each of the {c} ranks of axis {axis.name} whole heads: {heads} query heads and"
            f" {kv_heads} heads of keys and values are not both divisible by {c}.\n"
            f"  ring attention has no such limit."
        )


def positions(seq_len: int, axis: Communicator, kind: str) -> np.ndarray:
    """Global positions of the tokens that this rank holds, ascending.

    Args:
        seq_len: tokens of a whole sequence.
        axis: the axis over which it is cut.
        kind: one of KINDS: ring holds two chunks in zig-zag order, the others one.

    Returns:
        int64 (seq_len / axis.size,).
    """
    return layout.positions(seq_len, axis.size, axis.rank, kind == "ring")


def attention_rows(draw: Draw, stream: str, heads: Array, axis: Communicator, kind: str) -> Array:
    """The random streams of attention dropout, one for each query and head that this rank computes.

    Args:
        draw: of this rank's part of the batch; its positions are those of `positions`.
        stream: name of the op.
        heads: int64 (n,) global numbers of the query heads that this rank holds before attention.
        axis: the axis over which the sequence is cut.
        kind: one of KINDS.

    Returns:
        uint64 (b, n, s/c), for `attention`; with ulysses (b, n/c, s), for the whole sequence and the heads that come
        here.
    """
    if kind != "ulysses" or axis.size == 1:
        return draw.attention_rows(stream, heads)
    whole = array_module(draw.positions).arange(axis.size * len(draw.positions))
    share = len(heads) // axis.size
    return draw.attention_rows(stream, heads[axis.rank * share : (axis.rank + 1) * share], whole)


def attention(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    axis: Communicator,
    kind: str,
    *,
    causal: bool = True,
    documents: Array | None = None,
    rows: Array | None = None,
    drop: float = 0.0,
    keep_scores: bool = False,
    window: int | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v over whole sequences of which each rank holds a part.   Shard(1) -> Shard(1).

    Args:
        qkv: (b, s/c, (heads + 2 kv_heads) d), as `ops.attention` takes it; the tokens are those of `positions`.
        heads: query heads in qkv.
        kv_heads: heads of keys and values in qkv.
        axis: the axis over which the sequence is cut.
        kind: one of KINDS.
        causal: a query sees keys at its own position and before.
        documents: int (b, s), of the whole sequence on every rank: the number of each token's document, -1 for padding.
            A query sees the keys of its own document only; padding sees nothing and is seen by nobody.  None: the
            sequence is one document.
        rows: from `attention_rows`, for dropout of the attention weights; None: no dropout.
        drop: the probability with which a weight is dropped.
        keep_scores: as for `ops.attention`, on an axis of one rank.  Where a sequence is cut, ring and ulysses make the
            scores again in backward whatever is asked for, and rsa keeps the probabilities.
        window: with `causal`, a query sees so many positions, its own and those before it; None: from 0 on.  What it
            hides is not computed by ring and ulysses; ring's blocks go all the way around nevertheless.

    Returns:
        (b, s/c, heads d).  A query that sees nothing gives 0, and its gradient is exactly 0.

    Raises:
        ShapeError: sizes that do not go together, as in `check`, `documents` or `rows` of another shape, or a window
            as `ops.attention` refuses it.

    Cost: with k and v of this rank together B bytes, and B' in at least float32, each rank sends

            ring       (c-1) B forward, (c-1) B + c B' backward, behind the computing
            ulysses    (c-1)/c of qkv's bytes and of the result's, both ways
            rsa        (c-1) B forward, (c-1) (B + B') backward

        and keeps for backward 1/c of what one rank would; rsa also the probabilities, (b, heads, s/c, s).
    """
    b, length, width = qkv.shape
    s = length * axis.size
    check(s, heads, kv_heads, axis, kind)
    if axis.size == 1:
        mask = None if documents is None else layout.seen_by(documents, causal)
        how: dict[str, Any] = {"causal": causal, "drop": drop, "keep_scores": keep_scores, "window": window}
        return ops.attention(qkv, heads, kv_heads, mask=mask, rows=rows, **how)
    window = checked_window(window, s, causal)
    if heads % kv_heads or width % (heads + 2 * kv_heads):
        raise ShapeError(
            f"attention over {axis.name}: qkv {qkv.shape} is not (batch, sequence, (heads + 2 kv_heads) * width) for"
            f" {heads} heads in {kv_heads} groups"
        )
    if documents is not None and documents.shape != (b, s):
        raise ShapeError(
            f"attention over {axis.name}: documents {documents.shape}; wanted is one a token of the whole sequence,"
            f" ({b}, {s})"
        )
    wanted = (b, heads // axis.size, s) if kind == "ulysses" else (b, heads, length)
    if (drop and rows is None) or (rows is not None and rows.shape != wanted):
        given = "no rows" if rows is None else f"rows {rows.shape}"
        raise ShapeError(
            f"attention over {axis.name}: {given} for dropout; wanted are those of attention_rows, {wanted}"
        )
    ways = {"ring": ring_attention, "ulysses": ulysses_attention, "rsa": rsa_attention}
    return ways[kind](qkv, heads, kv_heads, axis, causal, documents, rows if drop else None, drop, window)
