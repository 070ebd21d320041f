"""Blocks of rows that stay in a core's cache, and the precision in which a kernel computes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module

# 32 Ki float32 elements are 128 KiB: a block, its result and a scratch or two fit a 512 KiB second-level cache, and the
# 1 us that a NumPy call costs is small against the 3 us and more that it works on the block.
BLOCK = 32_768

VECTOR = 16_384  # elements of a block of an update: five float32 vectors of it are 320 KiB

QUERIES = 64  # of one block of attention, and of one stripe of kept scores; csrc/table.h knows it as MT_STRIPE
SCORES = 32_768  # of one block of attention


def kept_scores(s: int, t: int, causal: bool, since: int | None = None) -> int:
    """How many scores attention keeps of a head of s queries and t keys, if it keeps them.

    All s * t; with causal attention stripes of QUERIES queries, of each the keys that any of its queries sees: for
    whole stripes s * (s + QUERIES) / 2.  Where a query i sees no key before `since` + i, a stripe has at most QUERIES -
    since.
    """
    if not causal:
        return s * t
    stripes, rest = divmod(s, QUERIES)
    growing = stripes if since is None else min(stripes, -since // QUERIES + 1)
    scores = QUERIES * QUERIES * (growing * (growing + 1) // 2) + rest * (s - first_key(s - rest, s, since))
    return scores if since is None else scores + (stripes - growing) * QUERIES * (QUERIES - since)


def first_key(query: int, t: int, since: int | None) -> int:
    """The first of t keys that a query sees, where it sees none before `since` + its number; None: it sees all."""
    return 0 if since is None else min(max(0, query + since), t)


def rows_of(x: Array) -> tuple[int, int]:
    """(number of rows, their length) of an array seen as a matrix of its last dim."""
    return math.prod(x.shape[:-1]), x.shape[-1]


def row_blocks(xp: Any, num_rows: int, width: int) -> Iterator[slice]:
    """Slices of rows of about BLOCK elements each; a device takes all rows at once."""
    height = max(1, BLOCK // max(1, width)) if xp is np else max(1, num_rows)
    for start in range(0, num_rows, height):
        yield slice(start, min(start + height, num_rows))


def vector_blocks(x: Array, scratch: bool = True) -> Iterator[tuple[slice, Array]]:
    """(slice, scratch of its length and x's dtype) over a vector; a device takes all of it at once.

    The scratch is the same memory for all blocks.
    """
    xp = array_module(x)
    length = VECTOR if xp is np else max(1, x.size)
    spare = xp.empty(min(length, x.size) if scratch else 0, x.dtype)
    for start in range(0, x.size, length):
        stop = min(start + length, x.size)
        yield slice(start, stop), spare[: stop - start]
