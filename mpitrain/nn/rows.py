"""Whose rows: how tensors are dealt out over the ranks that would all hold the same of them.

A tensor is cut along its first dim, into ceil(rows / ranks) rows each; the last ranks may hold fewer, or none.  One
with fewer rows than ranks is not cut: it goes whole to one rank, the largest first, each to the rank that has least of
these by then.  So a rank's share of a tensor is a rectangle of it, which any optimizer, norm and checkpoint knows how
to treat: it is one more Shard(0).

It is a function of the shapes alone, so that all ranks come to the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from mpitrain.errors import ShapeError
from mpitrain.spec import cut

Rows = tuple[int, int]
"""(start, stop), counted from the first row that the ranks hold."""


def assign_rows(
    shapes: Sequence[tuple[int, ...]],
    ranks: int,
    *,
    sizes: Sequence[int] | None = None,
    pinned: Collection[int] = (),
    later: Collection[int] = (),
) -> list[list[Rows]]:
    """The rows of each tensor that each rank has.

    Args:
        shapes: of the tensors, as the ranks hold them.
        ranks: over which they are dealt out.
        sizes: elements of each tensor, by which those that stay whole are ordered; None: those of the shapes.
        pinned: places of tensors that go to the first rank where they stay whole: those that other ranks hold too,
            beside other tensors, and must deal out alike.
        later: places of tensors that are dealt out after the others, whose places must not depend on them.

    Returns:
        For each rank the rows of each tensor, in their order.  Each row is one rank's.

    Raises:
        ShapeError: a tensor has no dims.
    """
    if any(not shape for shape in shapes):
        raise ShapeError("a parameter without dims cannot be cut over ranks: give it the shape (1,).")
    weights = [math.prod(shape) for shape in shapes] if sizes is None else sizes
    found: list[list[Rows]] = [[(0, 0)] * len(shapes) for _ in range(ranks)]
    whole = [place for place, shape in enumerate(shapes) if shape[0] < ranks]
    for place, shape in enumerate(shapes):
        if shape[0] >= ranks:
            for rank in range(ranks):
                found[rank][place] = cut(shape[0], ranks, rank)
    loads = [0] * ranks
    for place in sorted(whole, key=lambda place: (place in later, place not in pinned, -weights[place], place)):
        rank = 0 if place in pinned else loads.index(min(loads))
        loads[rank] += weights[place]
        found[rank][place] = (0, shapes[place][0])
    return found
