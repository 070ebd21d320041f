"""Ulysses: change the dim that is cut, from tokens to heads, and attention needs no message of its own.

    (b, s/c, heads)  --all_to_all-->  (b, s, heads/c)  -- ordinary attention -->  (b, s, heads/c)  --all_to_all-->  back

The packed columns lie by whole groups of heads, so that one all-to-all carries queries, keys and values together.  Each
rank computes all positions of its heads: the work is even without any order of the tokens.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509.
"""

from __future__ import annotations

from mpitrain import collectives
from mpitrain.autograd import ops
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array
from mpitrain.comm.communicator import Communicator
from mpitrain.parallel.context.layout import seen_by

TOKENS, COLUMNS = 1, 2
"""The two dims of (b, s, w) that are cut in turn."""


def ulysses_attention(
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
    """`attention` of kind ulysses."""
    mine, kv_mine = heads // axis.size, kv_heads // axis.size
    whole = collectives.all_to_all(qkv, axis, TOKENS, COLUMNS)
    mask = None if documents is None else seen_by(documents, causal)
    y = ops.attention(whole, mine, kv_mine, causal=causal, mask=mask, rows=rows, drop=drop, window=window)
    return collectives.all_to_all(y, axis, COLUMNS, TOKENS)
