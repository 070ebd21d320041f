"""Rows cut over an axis get exactly the places of whole rows: checks that any world can run, threads or MPI's ranks.

Every rank also assigns the whole rows by itself, on an axis of one rank, and looks for its own tokens in that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpitrain.comm.alone import Alone
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.parallel import context
from mpitrain.parallel.expert.assign import Assignment, assign
from mpitrain.routing import Routing

ROUTINGS = (
    Routing(4, capacity_factor=1.0),
    Routing(4, 2, "gshard", 0.7),
    Routing(5, 2, "gshard", 1.25),
    Routing(3, 3, "topk", 0.5),
    Routing(300, 2, "topk", 8.0),
)


class Rows(NamedTuple):
    """Whole rows."""

    codes: np.ndarray
    real: np.ndarray | None
    lengths: np.ndarray | None


def cp_of(world: World) -> Communicator:
    return Mesh(world, cp=world.size).cp


def alone() -> Communicator:
    return Mesh(World(Alone(), "none")).cp


def draw_rows(random: np.random.Generator, routing: Routing, b: int, s: int, padded: bool) -> Rows:
    """Choices of which a few experts have most; some second ones held back; padding anywhere, one row all padding."""
    crowded = random.standard_normal((b, s, routing.experts)) + 2 * random.standard_normal(routing.experts)
    codes = np.argsort(-crowded, axis=-1)[..., : routing.top_k]
    if routing.router == "gshard":
        codes[..., 1] ^= -(random.random((b, s)) < 0.3).astype(np.int64)
    if not padded:
        return Rows(codes, None, None)
    real = random.random((b, s)) < random.random((b, 1))
    real[-1] = False
    return Rows(codes, real, real.sum(1))


def in_place_of_the_whole(
    rows: Rows, routing: Routing, here: np.ndarray, axis: Communicator, training: bool = True
) -> Assignment:
    """Assign the tokens at positions `here`, and compare with the assignment of the whole rows."""
    codes, real, lengths = rows
    b, s, _ = codes.shape
    whole = assign(codes, routing, lengths=lengths, real=real, positions=None, axis=alone(), training=training)
    if lengths is None and here.size * axis.size != s:
        lengths = np.full(b, s)  # ranks that hold different numbers of tokens
    before = axis.sent_bytes
    mine = assign(
        codes[:, here],
        routing,
        lengths=lengths,
        real=None if real is None else real[:, here],
        positions=here,
        axis=axis,
        training=training,
    )
    check_messages(axis, before, mine, codes.shape, routing, training)
    number = np.full(b * s, -1)  # of each token, on this rank
    number[(np.arange(b)[:, None] * s + here).reshape(-1)] = np.arange(b * here.size)
    assert np.array_equal(mine.rows, number[whole.rows][number[whole.rows] >= 0])
    assert np.array_equal(mine.places >= 0, whole.places[:, here] >= 0)
    assert mine.counts.sum() == mine.rows.size
    experts = np.repeat(np.arange(routing.experts), mine.counts)
    kept = mine.places >= 0
    assert np.array_equal(experts[mine.places[kept]], codes[:, here][kept])
    if training:
        assert np.array_equal(mine.load, whole.load)
    numbers = [mine.dropped, mine.held_back, *mine.counts, *mine.asked]
    assert axis.all_reduce(np.array(numbers)).tolist() == [whole.dropped, whole.held_back, *whole.counts, *whole.asked]
    return mine


def check_messages(
    axis: Communicator,
    before: dict[str, int],
    mine: Assignment,
    shape: tuple[int, ...],
    routing: Routing,
    training: bool,
) -> None:
    """What was sent is what the docstring says."""
    sent = {verb: count - before.get(verb, 0) for verb, count in axis.sent_bytes.items()}
    b, _, k = shape
    n, wanted = axis.size, {}
    if training and n > 1 and routing.capacity_factor is not None:
        wanted = {"all_gather": (n - 1) * 4 * (2 + 2 * k * b * routing.experts)}
    elif training and n > 1:
        wanted = {"all_reduce": round(2 * (n - 1) / n * mine.load.nbytes)}
    assert {verb: count for verb, count in sent.items() if count} == wanted


def any_cut_of_a_row_gives_the_places_of_the_whole(world: World) -> None:
    """T16.3: each rank has two runs of positions, of any lengths, some without a token, dealt out at random."""
    axis, random = cp_of(world), np.random.default_rng(world.size)
    for trial in range(40):
        routing, s = ROUTINGS[trial % len(ROUTINGS)], int(random.integers(1, 30))
        rows = draw_rows(random, routing, b=3, s=s, padded=trial % 2 == 1)
        runs = np.split(np.arange(s), np.sort(random.integers(0, s + 1, 2 * axis.size - 1)))
        dealt = random.permutation(2 * axis.size).reshape(axis.size, 2)[axis.rank]
        in_place_of_the_whole(rows, routing, np.concatenate([runs[run] for run in np.sort(dealt)]), axis)


def chunks_of_both_layouts_give_the_places_of_the_whole(world: World) -> None:
    """C53: with padding, with a row of padding, and with everything in one or in no expert."""
    axis, random = cp_of(world), np.random.default_rng(7)
    s = 4 * axis.size
    for kind in context.KINDS:
        here = context.positions(s, axis, kind)
        for routing in (*ROUTINGS, Routing(4, 2, "gshard", None)):
            for padded in (False, True):
                in_place_of_the_whole(draw_rows(random, routing, 3, s, padded), routing, here, axis)
        same = Rows(np.full((2, s, 1), 2), None, None)
        crowded = in_place_of_the_whole(same, Routing(4, capacity_factor=1.0), here, axis)
        assert crowded.counts.tolist() == [0, 0, 2 * int((here < axis.size).sum()), 0]  # T/E, the first ones


def a_rank_without_a_real_token_takes_part(world: World) -> None:
    """C53."""
    axis, random = cp_of(world), np.random.default_rng(8)
    s = 4 * axis.size
    here = context.positions(s, axis, "ulysses")
    for routing in ROUTINGS:
        rows = draw_rows(random, routing, 2, s, padded=False)
        real = np.zeros((2, s), bool)
        real[:, :4] = True  # all of the first rank's
        mine = in_place_of_the_whole(rows._replace(real=real, lengths=real.sum(1)), routing, here, axis)
        assert (mine.asked.sum() > 0) == (axis.rank == 0)


def chunks_in_the_order_of_the_ranks_need_no_positions(world: World) -> None:
    axis, random = cp_of(world), np.random.default_rng(9)
    routing, s = ROUTINGS[1], 5 * axis.size
    codes = draw_rows(random, routing, 2, s, padded=False).codes
    here = context.positions(s, axis, "ulysses")
    how: dict[str, Any] = {"lengths": None, "real": None, "axis": axis, "training": True}
    without, told = (assign(codes[:, here], routing, positions=where, **how) for where in (None, here))
    assert all(np.array_equal(a, b) for a, b in zip(without, told, strict=True))


def in_evaluation_nothing_is_dropped_and_nothing_sent(world: World) -> None:
    axis, random = cp_of(world), np.random.default_rng(10)
    s = 4 * axis.size
    for routing in ROUTINGS:
        rows = draw_rows(random, routing, 3, s, padded=True)._replace(lengths=None)
        rows = rows._replace(codes=np.maximum(rows.codes, ~rows.codes))
        mine = in_place_of_the_whole(rows, routing, context.positions(s, axis, "ring"), axis, training=False)
        assert mine.dropped == mine.held_back == 0


CHECKS = (
    any_cut_of_a_row_gives_the_places_of_the_whole,
    chunks_of_both_layouts_give_the_places_of_the_whole,
    a_rank_without_a_real_token_takes_part,
    chunks_in_the_order_of_the_ranks_need_no_positions,
    in_evaluation_nothing_is_dropped_and_nothing_sent,
)
