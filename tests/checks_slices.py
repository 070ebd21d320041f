"""What every transport must do with slices of any lengths: all-gathers and reduce-scatters with `counts`.

Functions of a world that all its ranks call, run as those of checks_comm.py are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from checks_comm import all_data, close, data, in_order, mode, raises, same

from mpitrain.comm.request import Request
from mpitrain.comm.world import World
from mpitrain.errors import CommError, ShapeError

KINDS: list[Any] = ["f8", "f4", "i8", "u1"]
HALVES: list[Any] = ["f2"]
try:
    from ml_dtypes import bfloat16
except ImportError:
    pass
else:
    HALVES.append(bfloat16)


def lengths_of(n: int) -> tuple[list[int], ...]:
    """Of the ranks' slices: all alike, some of none, all on the first or the last rank, none at all."""
    return (
        [3] * n,
        [(2 * rank + 1) % 4 for rank in range(n)],
        [*range(n)],
        [5] + [0] * (n - 1),
        [0] * (n - 1) + [5],
        [0] * n,
    )


def shape(length: int, dim: int) -> tuple[int, ...]:
    """Three dims, of which one is this long."""
    return tuple(length if at == dim else other for at, other in enumerate((2, 3, 2)))


def piece(whole: np.ndarray, counts: list[int], dim: int, rank: int) -> np.ndarray:
    """A rank's slice: a view."""
    return np.split(whole, np.cumsum(counts)[:-1], dim)[rank]


def sum_of(rows: list[np.ndarray]) -> np.ndarray:
    """In rank order; of halves in float32."""
    return in_order([row.astype("f4") if row.dtype.itemsize == 2 else row for row in rows]).astype(rows[0].dtype)


def result(made: Any) -> Any:
    """Of a verb that blocks, or not."""
    return made.wait() if isinstance(made, Request) else made


def slices_of_any_lengths_are_joined(world: World) -> None:
    n, me = world.size, world.rank
    for dtype in (*KINDS, *HALVES, "?", "c8", "m8[s]"):
        for counts in lengths_of(n):
            for dim in (0, 1, 2):
                rows = [data(rank, shape(counts[rank], dim), "i8").astype(dtype) for rank in range(n)]
                whole = np.concatenate(rows, axis=dim)
                same(world.all_gather(rows[me], dim, counts=counts), whole)
                same(world.iall_gather(rows[me], dim - 3, counts=np.array(counts)).wait(), whole)
                same(rows[me], data(me, shape(counts[me], dim), "i8").astype(dtype))


def a_sum_is_cut_into_slices_of_any_lengths(world: World) -> None:
    """In deterministic mode with the bits of a sum in rank order, blocking or not, on every transport."""
    n, me = world.size, world.rank
    for deterministic in (False, True):
        with mode(world, deterministic=deterministic):
            for dtype in (*KINDS, *HALVES):
                alike = same if deterministic or dtype in HALVES else close  # halves are never left to an MPI
                for counts in lengths_of(n):
                    for dim in (0, 1, 2):
                        rows = [data(rank, shape(sum(counts), dim), dtype) for rank in range(n)]
                        mine = piece(sum_of(rows), counts, dim, me).copy()
                        alike(world.reduce_scatter(rows[me], dim, counts=counts), mine)
                        alike(world.ireduce_scatter(rows[me], dim, counts=counts).wait(), mine)
                        same(rows[me], data(me, shape(sum(counts), dim), dtype))


def even_lengths_are_the_call_without_them(world: World) -> None:
    n, me = world.size, world.rank
    rows = all_data(world, (2 * n, 3))
    same(world.all_gather(rows[me], 1, counts=[3] * n if me else None), np.concatenate(rows, axis=1))
    close(world.reduce_scatter(rows[me], counts=None if me else [2] * n), piece(in_order(rows), [2] * n, 0, me))


def slices_above_the_limit_are_cut_and_change_nothing(world: World) -> None:
    """C75.  Some slices are longer than a message may be, others are not, and some are empty."""
    n, me = world.size, world.rank
    for counts in ([*range(n - 1), 3 * n], [4 * n] + [0] * (n - 1)):
        rows = all_data(world, (sum(counts), 5))
        whole = rows[0]
        for deterministic in (False, True):
            for limit in (1, 7, 20, 1000):
                with mode(world, deterministic=deterministic, limit=limit):
                    mine = piece(whole, counts, 0, me).copy()
                    same(world.all_gather(mine, counts=counts), whole)
                    same(world.iall_gather(mine.T, 1, counts=counts).wait(), whole.T.copy())
                    total = piece(in_order(rows), counts, 0, me)
                    close(world.reduce_scatter(rows[me], counts=counts), total)
                    close(world.ireduce_scatter(rows[me].T, 1, counts=counts).wait(), total.T)


def several_are_in_flight(world: World) -> None:
    """Waited for in another order than that of their posting, asked in any rhythm, with other messages between."""
    n, me = world.size, world.rank
    for deterministic in (False, True):
        with mode(world, deterministic=deterministic):
            flying: list[tuple[Request, np.ndarray]] = []
            for number, length in enumerate((3, 40_000, 1, 30_000)):
                counts = [length * ((rank + number) % 3) for rank in range(n)]
                rows = [data(10 * number + rank, (counts[rank], 2), "f4") for rank in range(n)]
                flying.append((world.iall_gather(rows[me], counts=counts), np.concatenate(rows)))
                rows = [data(10 * number + rank, (2, sum(counts)), "f4") for rank in range(n)]
                mine = piece(in_order(rows), counts, 1, me).copy()
                flying.append((world.ireduce_scatter(rows[me], 1, counts=counts), mine))
                if number % 2:
                    rows = all_data(world, length)
                    flying.append((world.iall_reduce(rows[me]), in_order(rows)))
            same(world.broadcast(np.array(me), n - 1), np.array(n - 1))
            for request, truth in reversed(flying):
                while me % 2 and not request.test():
                    pass
                (same if deterministic else close)(request.wait(), truth)
                assert request.wait() is request.wait()


def slices_are_joined_where_it_is_asked_for(world: World) -> None:
    """Also around a slice that stands in its place already, and around one that is in the way."""
    n, me = world.size, world.rank
    for dim in (0, 1):
        for counts in lengths_of(n):
            truth = data(7, shape(sum(counts), dim))
            mine = piece(truth, counts, dim, me).copy()
            places = np.zeros(truth.shape), np.zeros(truth.shape, order="F"), np.zeros((2, *truth.shape))[1]
            for gather in (world.all_gather, world.iall_gather):
                for whole in places:
                    whole[...] = 0
                    assert result(gather(mine, dim, out=whole, counts=counts)) is whole
                    assert (whole == truth).all()
                    own = piece(whole, counts, dim, me)
                    whole[...] = 0
                    own[...] = mine
                    assert result(gather(own, dim, out=whole, counts=counts)) is whole
                    assert (whole == truth).all()
                room = np.zeros(2 * truth.size)
                whole = room[: truth.size].reshape(truth.shape)
                crossing = room[truth.size // 2 :][: mine.size].reshape(mine.shape)
                crossing[...] = mine
                assert result(gather(crossing, dim, out=whole, counts=counts)) is whole
                assert (whole == truth).all()


def sums_are_cut_to_where_it_is_asked_for(world: World) -> None:
    """Also to where the summand stands; nothing else of it changes."""
    n, me = world.size, world.rank
    for deterministic in (False, True):
        with mode(world, deterministic=deterministic):
            for dim in (0, 1):
                for counts in lengths_of(n):
                    rows = [data(rank, shape(sum(counts), dim)) for rank in range(n)]
                    total = piece(in_order(rows), counts, dim, me)
                    for scatter in (world.reduce_scatter, world.ireduce_scatter):
                        summand, expected = rows[me].copy(), rows[me].copy()
                        own = piece(summand, counts, dim, me)
                        piece(expected, counts, dim, me)[...] = total
                        assert result(scatter(summand, dim, out=own, counts=counts)) is own
                        close(summand, expected)
                        summand = rows[me].copy()
                        out = summand if counts[me] == sum(counts) else np.zeros(total.shape)
                        assert result(scatter(summand, dim, out=out, counts=counts)) is out
                        close(out, total)


def halves_go_into_float32(world: World) -> None:
    n, me = world.size, world.rank
    for dtype in HALVES:
        for counts in ([*range(1, n + 1)], [2] * n):
            for dim in (0, 1):
                rows = [data(rank, shape(counts[rank], dim), dtype) for rank in range(n)]
                whole = np.concatenate(rows, axis=dim).astype("f4")
                summands = [data(rank, whole.shape, dtype) for rank in range(n)]
                total = piece(in_order([row.astype("f4") for row in summands]), counts, dim, me).copy()
                for gather, scatter in (
                    (world.all_gather, world.reduce_scatter),
                    (world.iall_gather, world.ireduce_scatter),
                ):
                    wide = np.zeros(whole.shape, "f4")
                    assert result(gather(rows[me], dim, out=wide, counts=counts)) is wide
                    same(wide, whole)
                    wide = np.zeros(total.shape, "f4")
                    assert result(scatter(summands[me], dim, out=wide, counts=counts)) is wide
                    same(wide, total)


def wrong_lengths_are_refused_before_a_message(world: World) -> None:
    n, me = world.size, world.rank
    x = np.zeros((n + 1 if n > 1 else 1, 2))
    for verb in ("all_gather", "iall_gather", "reduce_scatter", "ireduce_scatter"):

        def call(*dim: int, verb: str = verb, **how: Any) -> Callable[[], Any]:
            return lambda: getattr(world, verb)(x, *dim, **how)

        said = f"{verb} on axis world of size {n}: counts "
        raises(ShapeError, f"{verb}: an array of shape {x.shape} has no dim 2", call(2))
        raises(ShapeError, f"{said}are {[1] * (n + 1)}; {n} numbers from 0", call(counts=[1] * (n + 1)))
        raises(ShapeError, f"{said}are {[-1] * n}; {n} numbers from 0", call(counts=[-1] * n))
        if "gather" in verb:
            wrong = f"give rank {me} another length than dim 0 of {x.shape}"
        else:
            wrong = f"add up to {7 * n}, dim 0 of shape {x.shape} does not"
        raises(ShapeError, f"{said}{[7] * n} {wrong}", call(counts=[7] * n))
    if n > 1:
        raises(ShapeError, f"not divisible by axis world of size {n}", lambda: world.ireduce_scatter(x))
        raises(CommError, "sum of bool", lambda: world.ireduce_scatter(np.zeros(2 * n) > 0))
    y, frozen = np.zeros((3, 2)), np.zeros((3 * n, 2))
    frozen.flags.writeable = False
    raises(CommError, "read-only", lambda: world.iall_gather(y, out=frozen))
    raises(ShapeError, "out has shape", lambda: world.iall_gather(y, out=np.zeros((3 * n, 3))))
    raises(CommError, "out is float32", lambda: world.all_gather(y, out=np.zeros((3 * n, 2), "f4")))
    raises(ShapeError, "out has shape", lambda: world.ireduce_scatter(frozen, out=np.zeros((2, 2))))
    raises(CommError, "out is int64", lambda: world.reduce_scatter(frozen, out=np.zeros((3, 2), "i8")))
    world.barrier()


def all_ranks_send_as_much_whatever_the_lengths(world: World) -> None:
    n, me = world.size, world.rank
    line = world.group(range(n), "counted")
    counts = [0, *range(2, n + 1)]
    whole = np.zeros((sum(counts), 5))
    line.all_gather(piece(whole, counts, 0, me), counts=counts)
    line.iall_gather(piece(whole, counts, 0, me).T, 1, counts=counts).wait()
    line.reduce_scatter(whole.T, 1, counts=counts)
    line.ireduce_scatter(whole, counts=counts).wait()
    each = round(2 * whole.nbytes * (n - 1) / n)
    assert line.sent_bytes == ({} if n == 1 else {"all_gather": each, "reduce_scatter": each})


CHECKS: list[Callable[[World], None]] = [
    slices_of_any_lengths_are_joined,
    a_sum_is_cut_into_slices_of_any_lengths,
    even_lengths_are_the_call_without_them,
    slices_above_the_limit_are_cut_and_change_nothing,
    several_are_in_flight,
    slices_are_joined_where_it_is_asked_for,
    sums_are_cut_to_where_it_is_asked_for,
    halves_go_into_float32,
    wrong_lengths_are_refused_before_a_message,
    all_ranks_send_as_much_whatever_the_lengths,
]
