"""Which tokens of a sequence each rank of an axis holds, and which part of a block of keys its queries may see.

    contiguous   c chunks, rank r holds chunk r                   | 0 | 1 | 2 | 3 |
    zig-zag      2c chunks, rank r holds r and 2c - 1 - r         |0|1|2|3|3|2|1|0|

With causal attention the last tokens see the most keys, so in the contiguous layout the last rank works while the first
has nothing to do.  In zig-zag order every rank holds an early and a late chunk, and whichever rank's keys come by, two
pairs of chunks are to be computed:

    keys of an earlier rank       both query chunks see its early chunk, neither its late one
    own keys                      two halves on the diagonal, and late queries on early keys
    keys of a later rank          the late query chunk sees both its chunks, the early one neither

So what is computed of a block is always a rectangle (`Part`), or the triangle below the diagonal.  The order within a
rank ascends in both layouts: causal by index and causal by position are the same there.

Source: the unevenness, and another order that mends it: Brandon et al. 2023, "Striped Attention", arXiv:2311.09431;
zig-zag itself is common practice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import Array


def positions(seq_len: int, size: int, rank: int, zigzag: bool, xp: Any = np) -> Array:
    """Global positions of the tokens that a rank holds: int64 (seq_len / size,), ascending, on xp's device."""
    if not zigzag:
        length = seq_len // size
        return xp.arange(rank * length, (rank + 1) * length, dtype=np.int64)
    half = seq_len // (2 * size)
    starts = (rank * half, (2 * size - 1 - rank) * half)
    return xp.concatenate([xp.arange(start, start + half, dtype=np.int64) for start in starts])


class Part(NamedTuple):
    """What is computed of a block, by places in it: these queries on these keys; `causal` is the triangle of them."""

    queries: slice
    keys: slice
    causal: bool

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        num_queries, num_keys = (cut.stop - cut.start for cut in (self.queries, self.keys))
        return num_queries * (num_queries + 1) // 2 if self.causal else num_queries * num_keys


def visible(rank: int, source: int, length: int, *, zigzag: bool, causal: bool) -> Part | None:
    """The part of the keys of rank `source` that the queries of `rank` see; None: nothing.

    Args:
        rank: whose queries.
        source: whose keys.
        length: tokens that each rank holds.
        zigzag: the layout.
        causal: a query sees keys at its own position and before; else all.
    """
    early, late, whole = slice(0, length // 2), slice(length // 2, length), slice(0, length)
    if not causal or source == rank:
        return Part(whole, whole, causal)
    if source < rank:
        return Part(whole, early if zigzag else whole, False)
    return Part(late, whole, False) if zigzag else None


def same_document(queries: Array, keys: Array) -> Array:
    """Which keys a query sees when several documents share a sequence: those of its own; padding sees none.

    Args:
        queries: int (b, n) number of each query's document, -1 for padding.
        keys: int (b, m) those of the keys.

    Returns:
        bool (b, n, m).
    """
    mine = queries[:, :, None]
    return (mine == keys[:, None, :]) & (mine >= 0)
