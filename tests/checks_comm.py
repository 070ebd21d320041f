"""What every transport must do, seen through the door: functions of a world that all its ranks call.

tests/local runs them on threads, tests/mpi under mpirun.  Each leaves the world as it found it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np

from mpitrain.comm import ordered
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.world import World
from mpitrain.errors import CommError, ConfigError, MeshError, ShapeError, UserError
from mpitrain.events import Event, listen

SIZES = (1, 1024, 4095, 4096, 4097, 65535, 65536, 65537, 1024 * 1024)  # bytes
NUMBERS = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")


@contextmanager
def mode(world: World, deterministic: bool | None = None, limit: int | None = None) -> Iterator[None]:
    before = world.mode.deterministic, world.mode.limit
    world.mode.deterministic = before[0] if deterministic is None else deterministic
    world.mode.limit = before[1] if limit is None else limit
    yield
    world.mode.deterministic, world.mode.limit = before


def data(rank: int, shape: int | tuple[int, ...], dtype: str | type = "f8") -> np.ndarray:
    """An array that differs from rank to rank and that every rank can compute for all."""
    dtype = np.dtype(dtype)
    draw = np.random.default_rng(1000 + rank)
    if dtype.kind in "iu":
        return draw.integers(0, 10, shape).astype(dtype)
    if dtype.kind == "b":
        return draw.integers(0, 2, shape).astype(dtype)
    x = draw.standard_normal(shape)
    return (x + 1j * draw.standard_normal(shape) if dtype.kind == "c" else x).astype(dtype)


def all_data(world: Communicator, shape: int | tuple[int, ...], dtype: str | type = "f8") -> list[np.ndarray]:
    return [data(rank, shape, dtype) for rank in range(world.size)]


def in_order(rows: list[np.ndarray]) -> np.ndarray:
    """((x0 + x1) + x2) + ... as deterministic mode promises."""
    total = rows[0].copy()
    for row in rows[1:]:
        total = total + row
    return total


def same(a: np.ndarray, b: np.ndarray) -> None:
    assert isinstance(a, np.ndarray)
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert a.tobytes() == b.tobytes()
    assert a.flags.c_contiguous


def close(a: np.ndarray, b: np.ndarray) -> None:
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    eps = 8e-3 if a.dtype == np.float16 else 1e-5 if a.dtype.char in "fF" else 1e-12
    np.testing.assert_allclose(a.astype("c16"), b.astype("c16"), rtol=eps, atol=eps)


def raises(kind: type[BaseException], text: str, function: Callable[[], object]) -> None:
    said = f"no {kind.__name__} was raised"
    try:
        function()
    except kind as error:
        said = str(error)
    assert text in said, said


# -- sizes, dtypes, layouts


def every_verb_carries_every_size(world: World) -> None:
    n, me = world.size, world.rank
    for size in SIZES:
        rows = all_data(world, size, "u1")
        same(world.all_reduce(rows[me], "max"), np.max(rows, axis=0))
        same(world.all_reduce(rows[me]), in_order(rows))
        same(world.all_gather(rows[me]), np.concatenate(rows))
        same(world.iall_gather(rows[me]).wait(), np.concatenate(rows))
        same(world.broadcast(rows[me], n - 1), rows[n - 1])
        same(world.shift(rows[me], 1), rows[(me - 1) % n])
        blocks = all_data(world, n * size, "u1")
        same(world.reduce_scatter(blocks[me]), in_order(blocks).reshape(n, size)[me])
        same(world.ireduce_scatter(blocks[me]).wait(), in_order(blocks).reshape(n, size)[me])
        same(world.all_to_all(blocks[me]), np.concatenate([b.reshape(n, size)[me] for b in blocks]))
        if n > 1:
            arrives = world.irecv((size,), "u1", (me - 1) % n, 7)
            leaves = world.isend(rows[me], (me + 1) % n, 7)
            same(arrives.wait(), rows[(me - 1) % n])
            assert leaves.wait() is None


def float_sums_of_every_size_are_right_and_in_rank_order_when_deterministic(world: World) -> None:
    for size in SIZES:
        count = -(-size // 4)
        rows = all_data(world, count, "f4")
        close(world.all_reduce(rows[world.rank]), in_order(rows))
        with mode(world, deterministic=True):
            same(world.all_reduce(rows[world.rank]), in_order(rows))
            same(world.iall_reduce(rows[world.rank]).wait(), in_order(rows))


def a_large_message_arrives(world: World) -> None:
    count = 64 * 1024 * 1024 // 8
    x = np.arange(count, dtype=np.int64) if world.rank == 0 else np.empty(count, np.int64)
    got = world.broadcast(x)
    assert got[0] == 0
    assert got[-1] == count - 1
    assert got[count // 3] == count // 3


def every_dtype_travels(world: World) -> None:
    n, me = world.size, world.rank
    for dtype in (*NUMBERS, "?"):
        rows = all_data(world, (n, 3), dtype)
        same(world.all_gather(rows[me]), np.concatenate(rows))
        same(world.broadcast(rows[me], n - 1), rows[n - 1])
        same(world.shift(rows[me]), rows[(me - 1) % n])
        same(world.all_to_all(rows[me]), np.stack([row[me] for row in rows]))
    for dtype in ("M8[s]", "S3", "g", ">f8", ">f2"):
        rows = [np.array([1 + rank, 2, 3]).astype(dtype) for rank in range(n)]
        if dtype == "S3":
            raises(CommError, "cannot travel", lambda rows=rows: world.all_gather(rows[me])) if n > 1 else None
        else:
            got = world.all_gather(rows[me])
            assert got.dtype.isnative
            assert (got == np.concatenate(rows)).all()


def every_number_is_summed_and_compared(world: World) -> None:
    for deterministic in (False, True):
        with mode(world, deterministic=deterministic):
            for dtype in NUMBERS:
                rows = all_data(world, 11, dtype)
                close(world.all_reduce(rows[world.rank]), np.sum(rows, axis=0, dtype=rows[0].dtype))
                if np.dtype(dtype).kind != "c":
                    same(world.all_reduce(rows[world.rank], "max"), np.max(rows, axis=0))
    flags = all_data(world, 9, "?")
    same(world.all_reduce(flags[world.rank], "max"), np.any(flags, axis=0))


def bfloat16_is_summed_in_float32(world: World) -> None:
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        return
    x = np.full(5, 1.0 + world.rank, bfloat16)
    got = world.all_reduce(x)
    assert got.dtype == bfloat16
    assert (got.astype("f4") == sum(range(1, world.size + 1))).all()
    wide = world.all_reduce(np.full(5, 3e38 / world.size, bfloat16), out=np.empty(5, "f4"))
    assert np.isfinite(wide).all()


def any_order_and_stride_arrives_as_it_reads(world: World) -> None:
    """C37."""
    n, me = world.size, world.rank
    table = np.array([[0, 1, 2], [3, 4, 5]])
    frozen = table.copy()
    frozen.flags.writeable = False
    for x in (np.asfortranarray(table), table.T, table[:, ::2], table[::-1], frozen, np.arange(24)[::3].reshape(2, 4)):
        plain = x.copy(order="C")
        before = x.copy()
        same(world.broadcast(x), plain)
        same(world.all_reduce(x), plain * n)
        same(world.all_gather(x), np.concatenate([plain] * n))
        same(world.all_gather(x, dim=1), np.concatenate([plain] * n, axis=1))
        same(world.shift(x), plain)
        if n > 1:
            arrives = world.irecv(x.shape, x.dtype, (me + 1) % n)
            world.isend(x, (me - 1) % n).wait()
            same(arrives.wait(), plain)
        assert (x == before).all()


def arrays_without_dims_and_without_elements_travel(world: World) -> None:
    n = world.size
    same(world.all_reduce(np.float64(2.5)), np.array(2.5 * n))
    same(world.all_reduce(np.array(3)), np.array(3 * n))
    same(world.broadcast(np.array(world.rank), n - 1), np.array(n - 1))
    same(world.shift(np.array(world.rank)), np.array((world.rank - 1) % n))
    empty = np.empty((0, 4), "f4")
    for deterministic in (False, True):
        with mode(world, deterministic=deterministic):
            same(world.all_reduce(empty), empty)
            same(world.iall_reduce(empty).wait(), empty)
            same(world.all_gather(empty), empty)
            same(world.all_gather(empty, 1), np.empty((0, 4 * n), "f4"))
            same(world.iall_gather(empty, 1).wait(), np.empty((0, 4 * n), "f4"))
            same(world.reduce_scatter(empty), empty)
            same(world.ireduce_scatter(empty).wait(), empty)
            same(world.all_to_all(empty), empty)
            same(world.iall_to_all(empty).wait(), empty)
            same(world.broadcast(empty), empty)
    raises(ShapeError, "no dim 0", lambda: world.all_gather(np.array(1.0)))


def gathers_and_scatters_cut_every_dim(world: World) -> None:
    n, me = world.size, world.rank
    shape = (2 * n, 3 * n, n)
    rows = all_data(world, shape)
    for deterministic in (False, True):
        with mode(world, deterministic=deterministic):
            for dim in (0, 1, 2, -1):
                mine = world.reduce_scatter(rows[me], dim)
                close(mine, np.split(np.sum(rows, axis=0), n, dim)[me].copy())
                (same if deterministic else close)(world.ireduce_scatter(rows[me], dim).wait(), mine)
                same(world.all_gather(rows[me], dim), np.concatenate(rows, axis=dim))
                same(world.iall_gather(rows[me], dim).wait(), np.concatenate(rows, axis=dim))
    for i in range(3):
        for j in range(3):
            pieces = [np.split(row, n, j)[me] for row in rows]
            same(world.all_to_all(rows[me], i, j), np.concatenate(pieces, axis=i))
            same(world.iall_to_all(rows[me], i, j).wait(), np.concatenate(pieces, axis=i))


def uneven_slices_change_places(world: World) -> None:
    n, me = world.size, world.rank
    lengths = [[(3 * a + 2 * b) % 4 for b in range(n)] for a in range(n)]  # from a to b; some are 0
    for limit in (None, 5):
        with mode(world, limit=limit):
            for dim in (0, 1):
                sent, received = lengths[me], [lengths[a][me] for a in range(n)]
                shape = (sum(sent), 3) if dim == 0 else (3, sum(sent))
                x = 1000.0 * me + np.arange(3 * sum(sent)).reshape(shape)
                y = world.all_to_all(x, dim, dim, (sent, received))
                assert y.shape[dim] == sum(received)
                same(world.all_to_all(y, dim, dim, (received, sent)), x)
                same(world.iall_to_all(y, dim, dim, (received, sent)).wait(), x)
                start = 0
                for source, piece in enumerate(np.split(y, np.cumsum(received)[:-1], dim)):
                    assert ((piece >= 1000 * source) & (piece < 1000 * (source + 1))).all()
                    start += piece.shape[dim]
            parts = [1 + a for a in range(n)]  # rank a holds parts[a] of dim 0, afterwards of dim 1
            whole = np.arange(sum(parts) ** 2 * 2.0).reshape(sum(parts), sum(parts), 2)
            mine = np.split(whole, np.cumsum(parts)[:-1], 0)[me]
            y = world.all_to_all(mine, 0, 1, (parts, parts))
            same(y, np.split(whole, np.cumsum(parts)[:-1], 1)[me].copy())
            same(world.all_to_all(y, 1, 0, (parts, parts)), mine)


def long_slices_between_some_ranks_are_no_matter_of_the_others(world: World) -> None:
    """A message is cut between two ranks whose slice is long, while others have none that is."""
    n, me = world.size, world.rank
    for long_from, long_to in ((0, n - 1), (n - 1, n - 1), (0, 0)):
        lengths = [[50 if (a, b) == (long_from, long_to) else (a + b) % 3 for b in range(n)] for a in range(n)]
        rows = [data(a, (sum(lengths[a]), 2)) for a in range(n)]
        came = [np.split(rows[a], np.cumsum(lengths[a])[:-1])[me] for a in range(n)]
        counts = lengths[me], [lengths[a][me] for a in range(n)]
        with mode(world, limit=8 * n):
            same(world.all_to_all(rows[me], counts=counts), np.concatenate(came))
            flying = [world.iall_to_all(rows[me], counts=counts) for _ in range(3)]
            for request in reversed(flying):
                same(request.wait(), np.concatenate(came))


def slices_change_places_beside_other_messages(world: World) -> None:
    """Several in flight, waited for in another order than that of their posting, with sums and messages between."""
    n, me = world.size, world.rank
    for deterministic in (False, True):
        with mode(world, deterministic=deterministic):
            rows = [
                [data(10 * number + a, (n, 30_000 if number else 3), "f4") for a in range(n)] for number in range(4)
            ]
            flying = [world.iall_to_all(of[me]) for of in rows[:2]]
            total = world.iall_reduce(np.full(30_000, 1.0))
            flying += [world.iall_to_all(of[me]) for of in rows[2:]]
            same(world.broadcast(np.array(me), n - 1), np.array(n - 1))
            for of, request in reversed([*zip(rows, flying, strict=True)]):
                if me % 2:
                    while not request.test():
                        pass
                same(request.wait(), np.stack([row[me] for row in of]))
                assert request.wait() is request.wait()
            assert (total.wait() == n).all()


def messages_above_the_limit_are_cut_and_change_nothing(world: World) -> None:
    """C75."""
    n, me = world.size, world.rank
    rows = all_data(world, (4 * n, 5))
    for deterministic in (False, True):
        for limit in (1, 3, 7, 20, 1000):
            with mode(world, deterministic=deterministic, limit=limit):
                close(world.all_reduce(rows[me]), np.sum(rows, axis=0))
                close(world.iall_reduce(rows[me]).wait(), np.sum(rows, axis=0))
                x = rows[me].copy()
                assert world.all_reduce(x, out=x) is x
                close(x, np.sum(rows, axis=0))
                same(world.all_gather(rows[me]), np.concatenate(rows))
                same(world.iall_gather(rows[me], 1).wait(), np.concatenate(rows, axis=1))
                close(world.reduce_scatter(rows[me]), np.split(np.sum(rows, axis=0), n)[me])
                close(world.ireduce_scatter(rows[me]).wait(), np.split(np.sum(rows, axis=0), n)[me])
                same(world.all_to_all(rows[me]), np.concatenate([np.split(row, n)[me] for row in rows]))
                same(world.iall_to_all(rows[me]).wait(), np.concatenate([np.split(row, n)[me] for row in rows]))
                same(world.broadcast(rows[me], n - 1), rows[n - 1])
                same(world.shift(rows[me]), rows[(me - 1) % n])
                if n > 1 and me < 2:
                    request = world.irecv(rows[0].shape, "f8", 1 - me)
                    world.isend(rows[me], 1 - me).wait()
                    same(request.wait(), rows[1 - me])
                    if me == 0:
                        world.send(rows[me], 1)
                    else:
                        same(world.recv(rows[0].shape, "f8", 0), rows[0])
    big = all_data(world, 30_000)  # above 64 KiB: the slices of a sum in order are cut, too
    with mode(world, deterministic=True, limit=1000):
        same(world.all_reduce(big[me]), in_order(big))
        same(world.iall_reduce(big[me]).wait(), in_order(big))


# -- sums


def halves_are_summed_in_float32_and_overflow_only_in_a_half(world: World) -> None:
    """C20."""
    n = world.size
    x = np.full(7, 30000, np.float16)
    for deterministic in (False, True):
        with mode(world, deterministic=deterministic):
            wide = world.all_reduce(x, out=np.empty(7, np.float32))
            same(wide, np.full(7, 30000.0 * n, np.float32))
            narrow = world.all_reduce(x)
            same(narrow, np.full(7, 30000 if n == 1 else 60000 if n == 2 else np.inf, np.float16))
            assert np.isfinite(world.iall_reduce(x, out=np.empty(7, np.float32)).wait()).all()
            slices = np.full((n, 5), 30000, np.float16)
            same(world.reduce_scatter(slices, out=np.empty((1, 5), np.float32)), np.full((1, 5), 30000.0 * n, "f4"))
    small = all_data(world, 40_000, "f2")  # above 64 KiB
    wide_rows = [row.astype("f4") for row in small]
    same(world.all_reduce(small[world.rank]), in_order(wide_rows).astype("f2"))


def a_sum_has_the_same_bits_however_it_is_cut(world: World) -> None:
    """Flat, in buckets, blocking or not, in place or not: rank order for every element."""
    count = 300_007  # not divisible by any number of ranks
    rows = all_data(world, count, "f4")
    mine, truth = rows[world.rank], in_order(rows)
    with mode(world, deterministic=True):
        same(world.all_reduce(mine), truth)
        for cuts in ((1,), (16_384,), (16_385, 200_000), (5, 100, 3000, 100_000, 299_999)):
            edges = [0, *cuts, count]
            spans = [slice(a, b) for a, b in pairwise(edges)]
            same(np.concatenate([world.all_reduce(mine[span]) for span in spans]), truth)
            out = np.empty_like(mine)
            requests = [world.iall_reduce(mine[span], out=out[span]) for span in spans]
            for request in requests:
                request.wait()
            same(out, truth)
            place = mine.copy()
            requests = [world.iall_reduce(place[span], out=place[span]) for span in spans]
            for request in reversed(requests):
                request.wait()
            same(place, truth)


def sums_longer_than_a_segment_are_in_order(world: World) -> None:
    rows = all_data(world, 2_300_001, "f4")
    with mode(world, deterministic=True):
        same(world.all_reduce(rows[world.rank]), in_order(rows))


def sums_of_a_few_elements_are_in_order_when_they_are_cut(world: World) -> None:
    """Fewer elements than ranks leave the last ranks nothing to add up; whole or by segments, in place or not."""
    n, me = world.size, world.rank
    small, slice_bytes = ordered.SMALL, ordered.SLICE
    world.barrier()
    try:
        for ordered.SMALL, ordered.SLICE in ((0, slice_bytes), (0, 24)):
            for dtype in ("f4", "f8", "f2", "c8"):
                for count in (0, 1, n - 1, n, n + 1, 5 * n + 3):
                    rows = all_data(world, count, dtype)
                    wide = "f4" if dtype == "f2" else dtype
                    truth = in_order([row.astype(wide) for row in rows]).astype(dtype)
                    largest = np.max(rows, axis=0) if dtype != "c8" else None
                    with mode(world, deterministic=True):
                        same(world.all_reduce(rows[me]), truth)
                        place = rows[me].copy()
                        assert world.all_reduce(place, out=place) is place
                        same(place, truth)
                        place = rows[me].copy()
                        same(world.iall_reduce(place, out=place).wait(), truth)
                        if largest is not None:
                            same(world.all_reduce(rows[me], op="max"), largest)
                    assert (rows[me] == data(me, count, dtype)).all()
    finally:
        world.barrier()
        ordered.SMALL, ordered.SLICE = small, slice_bytes


def the_own_block_of_a_rank_stays_where_it_is(world: World) -> None:
    """Of the raw verbs: an all-to-all without `own`, and a gather of blocks that stand in their places already."""
    n, me, transport = world.size, world.rank, world.transport
    for counts in ([3] * n, [*range(n)], [7, *[0] * (n - 1)]):
        ends = np.cumsum([0, *counts])
        mine = slice(ends[me], ends[me + 1])
        for wait in (False, True):
            joined = np.full(ends[-1], -1.0)
            joined[mine] = me + 0.5
            if wait:
                transport.iall_gather(None, joined, counts).wait()
            else:
                transport.all_gather(None, joined, counts)
            same(joined, np.repeat(np.arange(n) + 0.5, counts))
            sent, rows = np.repeat(np.arange(n) + 100.0 * me, counts), np.full(n * counts[me], -1.0)
            if wait:
                transport.iall_to_all(sent, counts, rows, [counts[me]] * n, own=False).wait()
            else:
                transport.all_to_all(sent, counts, rows, [counts[me]] * n, own=False)
            wanted = np.array([-1.0 if rank == me else 100.0 * rank + me for rank in range(n)])
            same(rows, np.repeat(wanted, counts[me]))


def requests_make_progress_by_being_asked(world: World) -> None:
    n, me = world.size, world.rank
    for deterministic in (False, True):
        with mode(world, deterministic=deterministic):
            large, small = all_data(world, 30_000), all_data(world, 10)
            requests = [world.iall_reduce(x[me]) for x in (large, small, large)]
            if me % 2:  # ranks may ask in whatever rhythm
                while not all([request.test() for request in requests]):
                    pass
            world.barrier()
            close(requests[1].wait(), np.sum(small, axis=0))
            close(requests[0].wait(), np.sum(large, axis=0))
            close(requests[2].wait(), np.sum(large, axis=0))
            assert requests[2].test()
            assert requests[2].wait() is requests[2].wait()
    if n > 1:
        arrives = world.irecv((3,), "f8", (me - 1) % n)
        world.isend(np.full(3, 1.0 * me), (me + 1) % n)  # nobody keeps this request
        other = world.isend(np.full(3, 1.0 * me), (me + 1) % n, 5)
        got = world.irecv((3,), "f8", (me - 1) % n, 5).wait()
        assert (got == (me - 1) % n).all()
        other.wait()
        if world.mode.checked:
            arrives.wait()  # there nobody may forget a request
        del arrives


def a_rank_that_waits_for_something_else_holds_up_no_sum(world: World) -> None:
    """A sum in flight comes to its end also if a rank that has posted it waits in another message meanwhile."""
    if world.size == 1:
        return
    me = world.rank
    with mode(world, deterministic=True):
        rows = all_data(world, 30_000)
        for waits_in_collective in (True, False):
            if me == 0:
                total = world.iall_reduce(rows[0])
                world.isend(np.ones(1), 1, 11).wait()
                if not waits_in_collective:
                    world.recv((1,), "f8", 1, 12)
                world.barrier()
                same(total.wait(), in_order(rows))
                continue
            if me == 1:
                world.recv((1,), "f8", 0, 11)
            same(world.iall_reduce(rows[me]).wait(), in_order(rows))
            if me == 1 and not waits_in_collective:
                world.send(np.ones(1), 0, 12)
            world.barrier()


def results_go_where_they_are_asked_to(world: World) -> None:
    n, me = world.size, world.rank
    rows = all_data(world, (4, 6))
    truth = np.sum(rows, axis=0)
    for deterministic in (False, True):
        with mode(world, deterministic=deterministic):
            x = rows[me].copy()
            assert world.all_reduce(x, out=x) is x
            close(x, truth)
            strided = np.zeros((4, 12))
            view = strided[:, ::2]
            assert world.all_reduce(rows[me], out=view) is view
            close(view.copy(), truth)
            assert not strided[:, 1::2].any()
            base = np.zeros(30)
            base[:24] = rows[me].reshape(-1)
            world.all_reduce(base[:24], out=base[6:])  # overlaps
            close(base[6:].reshape(4, 6), truth)
            fortran = np.zeros((4, 6), order="F")
            assert world.iall_reduce(rows[me], out=fortran).wait() is fortran
            close(fortran.copy(order="C"), truth)
            for dim in (0, 1):
                whole = np.zeros((4 * n, 6) if dim == 0 else (4, 6 * n))
                assert world.all_gather(rows[me], dim, out=whole) is whole
                same(whole, np.concatenate(rows, axis=dim))
                whole[...] = 0
                assert world.iall_gather(rows[me], dim, out=whole).wait() is whole
                same(whole, np.concatenate(rows, axis=dim))
    frozen = np.zeros((4, 6))
    frozen.flags.writeable = False
    raises(CommError, "read-only", lambda: world.all_reduce(rows[me], out=frozen))
    raises(ShapeError, "out has shape", lambda: world.all_reduce(rows[me], out=np.zeros((6, 4))))
    raises(CommError, "out is float32", lambda: world.all_reduce(rows[me], out=np.zeros((4, 6), "f4")))


def results_are_their_owners(world: World) -> None:
    """Writing into a result changes no other rank and no input; alone, a result cannot be written."""
    x = np.arange(6.0)
    for y in (world.all_reduce(x), world.all_gather(x), world.broadcast(x), world.shift(x)):
        if world.size == 1:
            raises(ValueError, "read-only", lambda y=y: y.fill(-1))
        else:
            y.fill(-1)
            assert (x == np.arange(6.0)).all()
            world.barrier()
            assert (y == -1).all()


# -- from rank to rank


def messages_of_one_pair_and_tag_stay_in_order(world: World) -> None:
    if world.size == 1:
        return
    if world.rank == 0:
        sends = [world.isend(np.array([i]), 1, tag=i % 2) for i in range(10)]
        for request in sends:
            request.wait()
    elif world.rank == 1:
        odd = [int(world.recv((1,), "i8", 0, tag=1)[0]) for _ in range(5)]
        even = [int(world.recv((1,), "i8", 0, tag=0)[0]) for _ in range(5)]
        assert odd == [1, 3, 5, 7, 9]
        assert even == [0, 2, 4, 6, 8]


def crossed_large_messages_do_not_hang_when_they_do_not_block(world: World) -> None:
    """C41."""
    if world.size == 1:
        return
    n, me = world.size, world.rank
    for count in (8, 8192, 524_288):
        sends = [world.isend(np.full(count, float(me)), (me + k) % n, 3) for k in (1, -1) if n > 2 or k == 1]
        receives = [world.irecv((count,), "f8", (me + k) % n, 3) for k in (-1, 1) if n > 2 or k == -1]
        for k, request in zip((-1, 1), receives, strict=False):
            assert (request.wait() == (me + k) % n).all()
        for request in sends:
            request.wait()


def wrong_arguments_are_refused_before_a_message(world: World) -> None:
    n, me = world.size, world.rank
    other = (me + 1) % n
    x = np.zeros((n + 1 if n > 1 else 1, 2))
    raises(CommError, "is not on axis world", lambda: world.send(x, n))
    raises(CommError, "itself", lambda: world.send(x, me))
    raises(CommError, "itself", lambda: world.irecv((1,), "f8", me))
    raises(CommError, "is not on axis world", lambda: world.broadcast(x, -1))
    raises(ShapeError, "no dim 2", lambda: world.all_gather(x, 2))
    raises(ShapeError, "no dim", lambda: world.all_to_all(x, 0, 5))
    raises(ShapeError, "numbers from 0", lambda: world.all_to_all(x, 0, 0, ([1] * (n + 1), [1] * n)))
    raises(ShapeError, "numbers from 0", lambda: world.all_to_all(x, 0, 0, ([-1] * n, [1] * n)))
    raises(ShapeError, "add up", lambda: world.all_to_all(x, 0, 0, ([7] * n, [7] * n)))
    if n > 1:
        raises(CommError, "tag", lambda: world.send(x, other, 32767))
        raises(CommError, "tag", lambda: world.send(x, other, -1))
        raises(ShapeError, f"not divisible by axis world of size {n}", lambda: world.reduce_scatter(x))
        raises(ShapeError, f"not divisible by axis world of size {n}", lambda: world.ireduce_scatter(x))
        raises(CommError, "sum of bool", lambda: world.ireduce_scatter(np.zeros(2 * n) > 0))
        raises(ShapeError, f"not divisible by axis world of size {n}", lambda: world.all_to_all(x))
        raises(CommError, "op is 'mean'", lambda: world.all_reduce(x, "mean"))
        raises(CommError, "sum of bool", lambda: world.all_reduce(x > 0))
        raises(CommError, "Python objects", lambda: world.all_gather(np.array([object()])))
        raises(CommError, "no maximum", lambda: world.all_reduce(x + 1j, "max"))
    world.barrier()


# -- what is no array


def exchange_tells_everybody(world: World) -> None:
    told = world.exchange({"rank": world.rank, "text": "ä" * world.rank * 100, "none": None, "list": [1, 2.5, True]})
    assert [t["rank"] for t in told] == list(range(world.size))
    assert [len(t["text"]) for t in told] == [100 * rank for rank in range(world.size)]
    assert world.exchange(0.1 + 0.2) == [0.1 + 0.2] * world.size
    raises(CommError, "JSON", lambda: world.exchange(object()))
    raises(CommError, "at most", lambda: world.exchange("x" * (2**24 if world.rank == 0 else 5)))


def an_error_of_one_rank_becomes_everybodys(world: World) -> None:
    world.agree(None)
    last = world.size - 1
    mine = MeshError(f"no room on rank {world.rank}") if world.rank == last else None
    raises(MeshError, f"no room on rank {last}", lambda: world.agree(mine))
    raises(ConfigError, "rank 0", lambda: world.agree(ConfigError(f"rank {world.rank}")))

    class OwnError(UserError):
        pass

    own = OwnError("mine") if world.rank == 0 else None
    raises(UserError, "mine", lambda: world.agree(own))
    raises(TypeError, "UserError", lambda: world.agree(KeyError("x")))  # type: ignore[arg-type]


def groups_keep_to_themselves(world: World) -> None:
    n, me = world.size, world.rank
    half = [rank for rank in range(n) if rank % 2 == me % 2]
    pair = world.group(half, "half")
    again = world.group(half[::-1], "backwards")
    assert (pair.size, pair.ranks[pair.rank]) == (len(half), me)
    assert again.rank == len(half) - 1 - pair.rank
    assert (pair.name, pair.ranks, again.ranks) == ("half", tuple(half), tuple(half[::-1]))
    assert pair.all_reduce(np.array(me)) == sum(half)
    same(again.all_gather(np.array([me])), np.array(half[::-1]))
    inner = pair.group([pair.rank], "me")
    assert inner.size == 1
    assert inner.ranks == (me,)
    with mode(world, deterministic=True, limit=3):
        rows = [data(rank, 50) for rank in half]
        same(pair.all_reduce(rows[pair.rank]), in_order(rows))
    if me % 2 == 0:  # a group of which the others know nothing
        evens = world.group(half, "evens")
        assert evens.all_reduce(np.array(1)) == len(half)
    world.barrier()


# -- what the door counts and tells


def bytes_are_counted_by_verb(world: World) -> None:
    n = world.size
    line = world.group(range(n), "counted")
    x = np.zeros((n, 100 * n))
    line.all_reduce(x)
    line.iall_reduce(x).wait()
    line.all_gather(x)
    line.iall_gather(x).wait()
    line.reduce_scatter(x)
    line.ireduce_scatter(x).wait()
    line.all_to_all(x)
    line.iall_to_all(x).wait()
    line.broadcast(x)
    line.shift(x)
    line.barrier()
    if n == 1:
        assert line.sent_bytes == {}
        return
    each = x.nbytes * (n - 1) // n
    assert line.sent_bytes == {
        "all_reduce": 4 * each,
        "all_gather": 2 * x.nbytes * (n - 1),
        "reduce_scatter": 2 * each,
        "all_to_all": 2 * each,
        "broadcast": x.nbytes,
        "shift": x.nbytes,
        "barrier": 0,
    }
    if world.rank == 0:
        line.send(x, 1)
        assert line.sent_bytes["send"] == x.nbytes
    elif world.rank == 1:
        line.recv(x.shape, x.dtype, 0)
        assert line.sent_bytes["recv"] == 0


def listeners_hear_of_every_message(world: World) -> None:
    heard: list[Event] = []
    sites: list[str] = []

    def listener(event: Event) -> None:
        heard.append(event)
        if event.phase == "begin":
            sites.append(event.info["site"]())

    line = world.group(range(world.size), "heard")
    with listen(listener):
        line.all_gather(np.zeros((2, 3), "f4"))
        request = line.iall_reduce(np.zeros(3))
        request.wait()
    line.all_reduce(np.zeros(3))
    if world.size == 1:
        assert heard == []
        return
    assert [(e.kind, e.phase, e.name) for e in heard[:4]] == [
        ("message", "begin", "all_gather"),
        ("message", "end", "all_gather"),
        ("message", "begin", "iall_reduce"),
        ("message", "end", "iall_reduce"),
    ]
    assert [e.name for e in heard[4:-1]] in ([], ["wait iall_reduce"] * 2)
    assert heard[-1][:3] == ("arrival", "end", "iall_reduce")
    assert heard[-1].info["result"].tolist() == [0.0, 0.0, 0.0]
    assert heard[-1].info["number"] == heard[2].info["number"]
    first = heard[0].info
    assert (first["axis"], first["number"], first["array"].shape) == ("heard", 1, (2, 3))
    assert first["bytes"] == 24 * (world.size - 1)
    assert heard[1].info["result"].shape == (2 * world.size, 3)
    assert heard[2].info["number"] == 2
    assert all(site.startswith("checks_comm.py:") for site in sites)


CHECKS: list[Callable[[World], None]] = [
    every_verb_carries_every_size,
    float_sums_of_every_size_are_right_and_in_rank_order_when_deterministic,
    a_large_message_arrives,
    every_dtype_travels,
    every_number_is_summed_and_compared,
    bfloat16_is_summed_in_float32,
    any_order_and_stride_arrives_as_it_reads,
    arrays_without_dims_and_without_elements_travel,
    gathers_and_scatters_cut_every_dim,
    uneven_slices_change_places,
    long_slices_between_some_ranks_are_no_matter_of_the_others,
    slices_change_places_beside_other_messages,
    messages_above_the_limit_are_cut_and_change_nothing,
    halves_are_summed_in_float32_and_overflow_only_in_a_half,
    a_sum_has_the_same_bits_however_it_is_cut,
    sums_longer_than_a_segment_are_in_order,
    sums_of_a_few_elements_are_in_order_when_they_are_cut,
    the_own_block_of_a_rank_stays_where_it_is,
    requests_make_progress_by_being_asked,
    a_rank_that_waits_for_something_else_holds_up_no_sum,
    results_go_where_they_are_asked_to,
    results_are_their_owners,
    messages_of_one_pair_and_tag_stay_in_order,
    crossed_large_messages_do_not_hang_when_they_do_not_block,
    wrong_arguments_are_refused_before_a_message,
    exchange_tells_everybody,
    an_error_of_one_rank_becomes_everybodys,
    groups_keep_to_themselves,
    bytes_are_counted_by_verb,
    listeners_hear_of_every_message,
]
