"""Ring attention: queries stay, keys and values go around, and no rank ever holds a row of scores.

    hop 0     1     2     3          rank r computes with the block (k, v) of rank
         r   r-1   r-2   r-3         which has come c hops; the next one travels meanwhile

A block gives a softmax over its own keys and, a query, the logarithm of the sum of its exponentials (lse).  Two such
results are merged exactly:

    lse = log(exp lse_1 + exp lse_2),     y = exp(lse_1 - lse) y_1 + exp(lse_2 - lse) y_2

Backward makes the probabilities of each block again, from lse alone, so the blocks go around once more.  The sum of
their gradients travels behind them: every rank adds its summand, and one hop more brings it home.

Halves travel as they are; the result so far, and the sums of gradients, are float32 and are rounded at the end.

What waits for backward: qkv, the result, a number a query.  In flight: two blocks, backward also two sums.

Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889; the merge: Milakov
and Gimelshein 2018, arXiv:1805.02867, and Rabe and Staats 2021, arXiv:2112.05682; backward from lse: Dao et al. 2022,
arXiv:2205.14135, algorithm 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from mpitrain.autograd.needs import EXACT, NEAR
from mpitrain.autograd.ops.attention import Attention, attend, attend_backward, by_head, merge, rounded, split_heads
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, at_hand, wide
from mpitrain.collectives import Arrow
from mpitrain.comm.communicator import Communicator
from mpitrain.parallel.context.hops import BACKWARD, FORWARD, Sums, around
from mpitrain.parallel.context.layout import Part, parts, positions, same_document
from mpitrain.spec import Shard


class RingAttention(Arrow):
    """Attention over the sequence of all ranks; saves qkv, the result and a number a query."""

    linear = ()
    arrow = (Shard(1), Shard(1))
    like = Attention
    needs = (NEAR, EXACT, EXACT, NEAR)

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
        zigzag: bool,
        axis: Communicator,
    ) -> tuple[Array, tuple[Any, ...]]:
        xp = array_module(qkv)
        compute = wide(qkv.dtype)
        b, length, _ = qkv.shape
        pairing = Pairing(xp, axis, length, zigzag, causal, documents, rows, drop, window)
        q, k, v = split_heads(qkv, heads, kv_heads)
        own = xp.stack([k, v])
        y = xp.zeros((b, length, heads * q.shape[-1]), compute)
        out = by_head(y, heads, kv_heads)
        lse = xp.full(q.shape[:-1], float(xp.finfo(compute).min), compute)
        for source, block in around(axis, own, FORWARD):
            for task in pairing.with_block_of(source):
                k, v = block[..., task.keys, :]
                asking = q[..., task.queries, :]
                more = xp.empty(asking.shape, compute)
                more_lse = attend(asking, k, v, more, **task.how)
                merge(out[..., task.queries, :], lse[..., task.queries], more, more_lse)
        y = rounded(y, qkv.dtype)
        return y, (qkv, documents, rows, y, lse)

    @staticmethod
    def backward(
        grad: Array,
        qkv: Array,
        documents: Array | None,
        rows: Array | None,
        y: Array,
        lse: Array,
        *,
        wanted: tuple[bool, ...],
        heads: int,
        kv_heads: int,
        causal: bool,
        drop: float,
        window: int | None,
        zigzag: bool,
        axis: Communicator,
    ) -> tuple[Any, ...]:
        xp = array_module(qkv)
        compute = wide(qkv.dtype)
        pairing = Pairing(xp, axis, qkv.shape[1], zigzag, causal, documents, rows, drop, window)
        q, k, v = split_heads(qkv, heads, kv_heads)
        own = xp.stack([k, v])
        g, y = (by_head(array, heads, kv_heads) for array in (grad, y))
        d_qkv = xp.zeros(qkv.shape, compute)
        dq, dk, dv = split_heads(d_qkv, heads, kv_heads)
        sums = Sums(xp, axis, own.shape, compute)
        for source, block in around(axis, own, BACKWARD):
            sums.expect()
            summands = []
            for task in pairing.with_block_of(source):
                k, v = block[..., task.keys, :]
                asking = (..., task.queries, slice(None))
                add_q, add_kv = xp.empty(q[asking].shape, compute), xp.empty((2, *k.shape), compute)
                of_block = lse[..., task.queries], add_q, *add_kv
                attend_backward(g[asking], q[asking], k, v, y[asking], *of_block, **task.how)
                dq[asking] += add_q
                summands.append((task.keys, add_kv))
            sums.pass_on(summands)
        dk[...], dv[...] = sums.home()
        return rounded(d_qkv, qkv.dtype), None, None


class Task(NamedTuple):
    """What is computed of a block: these queries on these keys, and how the kernel is told to do it."""

    queries: slice
    keys: slice
    how: dict[str, Any]


@dataclass(frozen=True)
class Pairing:
    """The queries of this rank against the blocks of all: which part of each is computed, and under which masks.

    Attributes:
        xp: numpy, or cupy.
        axis: the ring.
        length: tokens that each rank holds.
        zigzag: how they are dealt out.
        causal: a query sees keys at its own position and before.
        documents: int (b, s) of the whole sequence, or None.
        rows: uint64 (b, heads, length) of dropout, or None.
        drop: its probability.
        window: a query sees so many positions, its own and those before it; None: all.
    """

    xp: Any
    axis: Communicator
    length: int
    zigzag: bool
    causal: bool
    documents: Array | None
    rows: Array | None
    drop: float
    window: int | None

    def with_block_of(self, source: int) -> list[Task]:
        """What to compute with the keys of a rank; nothing where no query sees any of them."""
        how: dict[str, Any] = {"zigzag": self.zigzag, "causal": self.causal, "window": self.window}
        found = parts(self.axis.rank, source, self.length, size=self.axis.size, **how)
        return [task for task in (self._task(part, source) for part in found) if task is not None]

    def _task(self, part: Part, source: int) -> Task | None:
        mask = rows = keys = None
        if self.documents is not None:
            mine, theirs = (self.documents[:, self._positions(rank)] for rank in (self.axis.rank, source))
            mask = same_document(mine[:, part.queries], theirs[:, part.keys])[:, None]
            if at_hand(mask) and not mask.any():
                return None  # only computing is left out, so a rank may decide by itself; a device would have to wait
        if self.rows is not None:
            rows, keys = self.rows[..., part.queries], self._positions(source)[part.keys]
        how = {"causal": part.causal, "mask": mask, "rows": rows, "drop": self.drop, "keys": keys}
        how["since"] = part.since
        return Task(part.queries, part.keys, how)

    def _positions(self, rank: int) -> Array:
        n = self.axis.size
        return positions(self.length * n, n, rank, self.zigzag, self.xp)


def ring_attention(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    axis: Communicator,
    causal: bool,
    documents: Array | None,
    rows: Array | None,
    drop: float,
    window: int | None = None,
    zigzag: bool = True,
) -> Tensor:
    """`attention` of kind ring; not `zigzag`: ranks hold consecutive tokens, and the last ones work the most."""
    how: dict[str, Any] = {"causal": causal, "drop": drop, "window": window, "zigzag": zigzag}
    return RingAttention.apply(qkv, documents, rows, heads=heads, kv_heads=kv_heads, **how, axis=axis)
