"""Which tokens go to which experts, and which of them find a place: one sort for it all.

In training an expert has C places for each row of the batch.  They go to the row's first choices in the order of their
positions, then to its second choices, and so on; who comes when all are taken is dropped.  A choice that comes too late
is counted all the same, and so is a second choice that GShard's draw does not send (Lepikhin et al. 2020,
arXiv:2006.16668, algorithm 1), so the place of a choice is the number of choices of that expert before it:

    slot = those of earlier choices in the whole row  +  those of the same choice at earlier positions

Sorted by expert, stably, choices lie in *groups* of one (expert, row, choice), each in order of position.  With the
number of choices in each group it is known which place each group's first would get, hence how many of it have one.

A row that is cut over an axis (context parallelism) has its chunks in one or two runs of positions on each rank.  Its
groups are of one (expert, row, choice, run), and the ranks tell each other how many they have of each:

    (2 + 2 k b E) int32 a rank, one all-gather        positions at which the runs begin, choices in each group

Every rank then knows what stands before its own tokens, so any cut of a row gives the places of the whole row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpitrain.backend import Array, array_module, to_host
from mpitrain.comm.communicator import Communicator
from mpitrain.routing import Routing


class Assignment(NamedTuple):
    """Where this rank's tokens go.  Whoever they are, they are numbered as the rows of (b s, h).

    Attributes:
        rows: int64 (n,) the token of each row that is sent, sorted by (expert, row of the batch, choice, position).
        counts: int64 (E,) rows sent to each expert; their sum is n.
        places: int64 (b, s, k) where in `rows` each choice of each token is; -1: nowhere.
        load: int64 (b, E) tokens of each row of the batch that chose each expert, sent or not, by the choices that
            count for the balance loss.  In training of the whole row, on all ranks of the axis alike; in evaluation of
            this rank's part of it.
        asked: int64 (E,) choices of each expert by this rank's tokens, by all their choices, sent or not.
        dropped: choices that found no place.
        held_back: choices that GShard's draw did not send.
    """

    rows: Array
    counts: Array
    places: Array
    load: Array
    asked: Array
    dropped: int
    held_back: int


def choose(p: Array, k: int) -> Array:
    """The k likeliest experts of each token.

    Args:
        p: (..., E) probabilities.
        k: from 1 to E.

    Returns:
        int64 (..., k), no expert twice: the likeliest first, of equals the lowest.  NaN counts as more than any number.

    Cost: k passes over p.
    """
    if k == 1:
        return p.argmax(-1)[..., None]
    xp = array_module(p)
    rest = p.copy()  # C-contiguous, whatever p is
    flat = rest.reshape(-1)
    firsts = xp.arange(0, flat.size, p.shape[-1]).reshape(p.shape[:-1])
    ids = xp.empty((*p.shape[:-1], k), np.int64)
    for choice in range(k):
        ids[..., choice] = best = rest.argmax(-1)
        flat[firsts + best] = -np.inf
    return ids


def assign(
    codes: Array,
    routing: Routing,
    *,
    lengths: Array | None,
    real: Array | None,
    positions: Array | None,
    axis: Communicator,
    training: bool,
) -> Assignment:
    """Give each choice its place, or none.

    Args:
        codes: int64 (b, s, k) the experts of each token, first choice first; ~expert for one that was chosen and counts
            but is not sent.
        routing: number of experts and their capacity.
        lengths: (b,) tokens of each whole row that are no padding; None: all of it.
        real: bool (b, s) False for padding, which goes nowhere and counts nowhere; None: there is none.
        positions: (s,) of this rank's tokens in the row, ascending, in one run or two; None: equal chunks in the order
            of the ranks.
        axis: over which the rows are cut.
        training: else every choice is sent, and the axis is not used.

    Returns:
        The assignment; without a capacity factor nothing is dropped.

    Cost: in training on an axis of more than one rank one all-gather of 4 (2 + 2 k b E) bytes a rank, or without a
    capacity factor one all-reduce of 8 b E bytes.  One sort of b s k small integers; memory of the order of b s k
    and of b k E.
    """
    xp = array_module(codes)
    b, s, k = codes.shape
    experts = routing.experts
    limited = training and routing.capacity_factor is not None
    cut = limited and axis.size > 1

    # In the order (row, choice, position), which a stable sort by expert keeps; padding comes last.
    ranked = xp.ascontiguousarray(codes.transpose(0, 2, 1))
    wanted = xp.maximum(ranked, ~ranked)
    if real is not None:
        wanted = xp.where(real[:, None, :], wanted, experts)
    order = wanted.reshape(-1).astype(np.min_scalar_type(experts)).argsort(kind="stable")

    runs = 2 if cut else 1
    run = xp.arange(0, b * k * runs, runs).reshape(b, k, 1)
    if cut:
        begins, second = _runs(positions, s, axis)
        run = run + (xp.arange(s) >= second)
    group = (wanted * (b * k * runs) + run).reshape(-1)
    groups = experts * b * k * runs
    counts = xp.bincount(group, minlength=groups)[:groups]  # what lies beyond is padding
    order = order[: int(counts.sum())]
    by_group = counts.reshape(experts, b, k, runs)
    asked = by_group.sum((1, 2, 3))
    in_row = by_group.sum(3)
    waits = ranked.reshape(-1)[order] < 0
    held_back = int(waits.sum())
    sent = ~waits if held_back else None

    if limited:
        if cut:
            in_row, before = _exchange(by_group, begins, axis)
        else:
            before = xp.zeros((experts, b, k, 1), np.int64)
        before = before + (xp.cumsum(in_row, 2) - in_row)[..., None]
        firsts = (xp.cumsum(counts) - counts).reshape(by_group.shape)
        # In the sorted order each group has places up to this index.
        ends = firsts + (_capacity(routing, lengths, s * axis.size, xp) - before)
        placed = xp.arange(order.size) < ends.reshape(-1)[group[order]]
        sent = placed if sent is None else placed & sent

    load = xp.ascontiguousarray(in_row[:, :, : routing.counted_choices].sum(2).T)
    if training and axis.size > 1 and not cut:
        load = axis.all_reduce(load)

    total, of_expert = order.size, asked
    if sent is not None:
        order = order[sent]
        # Not bincount: CuPy's refuses an empty array, which is what a rank without a token has.
        so_far, last = xp.concatenate([xp.zeros(1, np.int64), xp.cumsum(sent)]), xp.cumsum(asked)
        of_expert = so_far[last] - so_far[last - asked]
    places = xp.full(b * k * s, -1, np.int64)
    places[order] = xp.arange(order.size)
    return Assignment(
        rows=order if k == 1 else order // (k * s) * s + order % s,
        counts=of_expert,
        places=xp.ascontiguousarray(places.reshape(b, k, s).transpose(0, 2, 1)),
        load=load,
        asked=asked,
        dropped=total - held_back - order.size,
        held_back=held_back,
    )


def _capacity(routing: Routing, lengths: Array | None, tokens: int, xp: Array) -> Array | int:
    """Places of an expert for each row: one number, or (b, 1, 1)."""
    if lengths is None:
        return routing.capacity(tokens)
    return xp.asarray(routing.capacities(to_host(lengths))).reshape(-1, 1, 1)


def _runs(positions: Array | None, length: int, axis: Communicator) -> tuple[list[int], int]:
    """Positions at which this rank's two runs begin, and the index at which the second does (which may be empty)."""
    if positions is None:
        return [axis.rank * length, 0], length
    where = to_host(positions)
    steps = where[1:] - where[:-1]
    breaks = np.flatnonzero(steps != 1) + 1
    assert breaks.size < 2, f"positions in more than two runs: {where}"
    assert (steps > 0).all(), f"positions that do not ascend: {where}"
    second = int(breaks[0]) if breaks.size else length
    return [int(where[at]) if at < length else 0 for at in (0, second)], second


def _exchange(by_group: Array, begins: list[int], axis: Communicator) -> tuple[Array, Array]:
    """What all ranks have.

    Args:
        by_group: (E, b, k, 2) choices in each group of this rank.
        begins: positions at which its two runs begin.
        axis: over which the rows are cut.

    Returns:
        (E, b, k) choices in the whole row, and (E, b, k, 2) those of the same choice before each run of this rank.
    """
    xp = array_module(by_group)
    shape = by_group.shape[:-1]
    here = xp.asarray(np.array(begins, np.int32))
    message = xp.concatenate([here, by_group.transpose(3, 0, 1, 2).reshape(-1).astype(np.int32)])
    gathered = axis.all_gather(message).reshape(axis.size, -1)
    there = gathered[:, :2].reshape(-1)
    counts = gathered[:, 2:].reshape(there.size, -1)
    before = (there < here[:, None]).astype(np.int32) @ counts
    return counts.sum(0).reshape(shape), before.T.reshape(*shape, 2)
