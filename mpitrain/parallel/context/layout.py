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

With a sliding window each pair of chunks is a part of its own, cut to the queries and keys that are near enough to see
each other; a block of which none is left is passed on unread (`parts`).

Source: the unevenness, and another order that mends it: Brandon et al. 2023, "Striped Attention", arXiv:2311.09431;
zig-zag itself is common practice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import Array, at_hand
from mpitrain.kernels.blocks import first_key


def positions(seq_len: int, size: int, rank: int, zigzag: bool, xp: Any = np) -> Array:
    """Global positions of the tokens that a rank holds: int64 (seq_len / size,), ascending, on xp's device."""
    if not zigzag:
        length = seq_len // size
        return xp.arange(rank * length, (rank + 1) * length, dtype=np.int64)
    half = seq_len // (2 * size)
    starts = (rank * half, (2 * size - 1 - rank) * half)
    return xp.concatenate([xp.arange(start, start + half, dtype=np.int64) for start in starts])


class Part(NamedTuple):
    """What is computed of a block, by places in it: these queries on these keys; `causal` is the triangle of them.

    The i-th of the queries sees none before the (`since` + i)-th of the keys; None: it sees them from the first on.
    """

    queries: slice
    keys: slice
    causal: bool
    since: int | None = None

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        num_queries, num_keys = (cut.stop - cut.start for cut in (self.queries, self.keys))
        if self.since is not None:
            stops = range(1, num_queries + 1) if self.causal else [num_keys] * num_queries
            return sum(stop - first_key(i, stop, self.since) for i, stop in enumerate(stops))
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


def parts(
    rank: int, source: int, length: int, *, zigzag: bool, causal: bool, size: int, window: int | None = None
) -> list[Part]:
    """The parts of the keys of rank `source` that the queries of `rank` see, also through a sliding window.

    Args:
        rank, source, length, zigzag, causal: as for `visible`.
        size: of the axis.
        window: a query sees so many positions, its own and those before it; None: all that causal attention shows.
    """
    if window is None:
        part = visible(rank, source, length, zigzag=zigzag, causal=causal)
        return [] if part is None else [part]
    found = []
    for at, of_queries in _chunks(rank, length, zigzag, size):
        for place, of_keys in _chunks(source, length, zigzag, size):
            chunk = length // 2 if zigzag else length
            ahead = at - place  # how far the first query is after the first key
            if ahead == 0:
                found.append(Part(of_queries, of_keys, True, None if window >= chunk else 1 - window))
            elif 0 < ahead < chunk + window - 1:
                since = ahead + 1 - window  # the first query sees the keys from there on
                skipped = max(0, since)
                queries = slice(of_queries.start, of_queries.start + min(chunk, chunk - since))
                keys = slice(of_keys.start + skipped, of_keys.stop)
                cuts = since - skipped + queries.stop - queries.start - 1 > 0
                found.append(Part(queries, keys, False, since - skipped if cuts else None))
    return found


def _chunks(rank: int, length: int, zigzag: bool, size: int) -> list[tuple[int, slice]]:
    """(global position of its first token, its places in the rank's block) of each chunk of a rank."""
    if not zigzag:
        return [(rank * length, slice(0, length))]
    half = length // 2
    return [(rank * half, slice(0, half)), ((2 * size - 1 - rank) * half, slice(half, length))]


def first_keys(documents: Array) -> Array | None:
    """The first key that each query sees when documents lie side by side; None: they do not, or are on a device.

    Args:
        documents: int (b, s) number of each token's document, -1 for padding, which sees nothing: its first key is the
            one after its own.

    Returns:
        int64 (b, s).
    """
    if not at_hand(documents) or documents.ndim != 2:
        return None
    here = np.arange(documents.shape[1])
    borders = np.ones(documents.shape, bool)
    borders[:, 1:] = documents[:, 1:] != documents[:, :-1]
    numbers = [row[border & (row >= 0)] for row, border in zip(documents, borders, strict=True)]
    if any(len(set(row.tolist())) != len(row) for row in numbers):
        return None  # one goes on behind another
    begins = np.maximum.accumulate(np.where(borders, here, 0), axis=1)
    firsts: Array = np.where(documents >= 0, begins, here + 1)
    return firsts


def seen_by(documents: Array, causal: bool) -> Array:
    """The mask of whole sequences for `ops.attention`: the first key of each query where that says all, else by key."""
    firsts = first_keys(documents) if causal else None
    return same_document(documents, documents) if firsts is None else firsts


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
