"""Checked mode, seen through the door: what ranks do wrong is told on all of them, and what is right is let through.

Functions of a world that all its ranks call.  The last rank is the one that goes astray.  Each mistake is survived: the
ranks catch the same error and go on, so that one launch of mpirun serves for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import checks_comm
import checks_slices
import numpy as np

from mpitrain.comm.communicator import Communicator
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.errors import CollectiveMismatch, CommError

HERE = "checks_checked.py:"


def line_of(world: World) -> tuple[Communicator, bool]:
    """A new axis, and whether this rank is the one that goes astray."""
    line = world.group(range(world.size), "line")
    return line, world.rank == world.size - 1


def refused(call: Callable[[], Any], *words: str) -> str:
    """What checked mode says about a call; the same error on every rank of the axis."""
    try:
        call()
    except CollectiveMismatch as error:
        said = str(error)
    else:
        raise AssertionError("nothing was said")
    for word in words:
        assert word in said, said
    assert len(said.splitlines()) <= 5, said
    return said


def told_alike(world: World, call: Callable[[], Any], *words: str) -> None:
    """`refused`, with the same text on all ranks and both sides' places in it."""
    with world.checked():
        said = refused(call, "on axis line, call ", f" at {HERE}", *words)
    assert said.splitlines()[0].count(HERE) == 2, said
    assert set(world.exchange(said)) == {said}


ZEROS = np.zeros((4, 6))

# What all others call, what the last rank calls, and what must be told of the two.
PAIRS: dict[str, tuple[Callable[[Communicator], Any], Callable[[Communicator], Any], str, str]] = {
    "op": (
        lambda w: w.all_reduce(ZEROS),
        lambda w: w.all_reduce(ZEROS, "max"),
        "all_reduce (4, 6) float64 sum at",
        "all_reduce (4, 6) float64 max at",
    ),
    "no_op": (lambda w: w.all_reduce(ZEROS), lambda w: w.all_reduce(ZEROS, "a|b" * 99), "sum at", "a/ba/b"),
    "root": (
        lambda w: w.broadcast(ZEROS),
        lambda w: w.broadcast(ZEROS, 1),
        "broadcast (4, 6) float64 root 0 at",
        "broadcast (4, 6) float64 root 1 at",
    ),
    "count": (
        lambda w: w.all_reduce(ZEROS),
        lambda w: w.all_reduce(ZEROS[:3]),
        "all_reduce (4, 6) float64 at",
        "all_reduce (3, 6) float64 at",
    ),
    "count_of_a_broadcast": (lambda w: w.broadcast(ZEROS), lambda w: w.broadcast(ZEROS[0]), "(4, 6)", "(6,)"),
    "shape_of_one_count": (lambda w: w.all_gather(ZEROS), lambda w: w.all_gather(ZEROS.T), "(4, 6)", "(6, 4)"),
    "dtype": (
        lambda w: w.all_reduce(ZEROS),
        lambda w: w.all_reduce(ZEROS.astype(np.float32)),
        "all_reduce (4, 6) float64 at",
        "all_reduce (4, 6) float32 at",
    ),
    "dtype_of_one_size": (lambda w: w.shift(ZEROS), lambda w: w.shift(ZEROS.astype(int)), "float64 at", "int64 at"),
    "verb": (
        lambda w: w.all_reduce(ZEROS),
        lambda w: w.broadcast(ZEROS),
        "all_reduce (4, 6) float64 at",
        "broadcast (4, 6) float64 at",
    ),
    "gather_and_scatter": (
        lambda w: w.all_gather(np.zeros((4, 512), "f4")),
        lambda w: w.reduce_scatter(np.zeros((12, 512), "f4")),
        "all_gather (4, 512) float32 at",
        "reduce_scatter (12, 512) float32 at",
    ),
    "a_barrier": (lambda w: w.all_reduce(ZEROS), lambda w: w.barrier(), "all_reduce", "barrier (0,) uint8 at"),
    "an_exchange": (lambda w: w.exchange(1), lambda w: w.all_reduce(np.zeros(1, int)), "exchange (1,)", "all_reduce"),
    "dim_to_join": (lambda w: w.all_gather(ZEROS), lambda w: w.all_gather(ZEROS, 1), "dim 0 at", "dim 1 at"),
    "dim_to_cut": (
        lambda w: w.reduce_scatter(np.zeros((12, 12))),
        lambda w: w.reduce_scatter(np.zeros((12, 12)), -1),
        "dim 0 at",
        "dim 1 at",
    ),
    "dims_to_exchange": (
        lambda w: w.all_to_all(np.zeros((12, 12)), 0, 1),
        lambda w: w.all_to_all(np.zeros((12, 12)), 1, 0),
        "dims 0 1 of 2 at",
        "dims 1 0 of 2 at",
    ),
    "number_of_dims": (
        lambda w: w.all_to_all(np.zeros((12, 12))),
        lambda w: w.all_to_all(np.zeros(12)),
        "dims 0 0 of 2 at",
        "dims 0 0 of 1 at",
    ),
    "distance": (lambda w: w.shift(ZEROS, 1), lambda w: w.shift(ZEROS, -1), "by 1 at", "by -1 at"),
    "blocking": (
        lambda w: w.all_reduce(ZEROS),
        lambda w: w.iall_reduce(ZEROS).wait(),
        "all_reduce (4, 6) float64 at",
        "iall_reduce (4, 6) float64 at",
    ),
    "op_in_flight": (
        lambda w: w.iall_reduce(ZEROS).wait(),
        lambda w: w.iall_reduce(ZEROS, "max").wait(),
        "iall_reduce (4, 6) float64 sum at",
        "iall_reduce (4, 6) float64 max at",
    ),
    "op_in_flight_when_polled": (
        lambda w: poll(w.iall_reduce(ZEROS)),
        lambda w: poll(w.iall_reduce(ZEROS, "max")),
        "sum at",
        "max at",
    ),
    "exchange_in_flight": (
        lambda w: w.iall_to_all(np.zeros((12, 12)), 0, 1).wait(),
        lambda w: w.iall_to_all(np.zeros((12, 12)), 1, 0).wait(),
        "iall_to_all (12, 12) float64 dims 0 1 of 2 at",
        "dims 1 0 of 2 at",
    ),
    "dim_to_join_in_flight": (
        lambda w: w.iall_gather(ZEROS).wait(),
        lambda w: w.iall_gather(ZEROS, 1).wait(),
        "iall_gather (4, 6) float64 dim 0 at",
        "iall_gather (4, 6) float64 dim 1 at",
    ),
    "dim_to_cut_in_flight": (
        lambda w: w.ireduce_scatter(np.zeros((12, 12))).wait(),
        lambda w: w.ireduce_scatter(np.zeros((12, 12)), 1).wait(),
        "ireduce_scatter (12, 12) float64 dim 0 at",
        "ireduce_scatter (12, 12) float64 dim 1 at",
    ),
}


IN_FLIGHT = {
    "blocking",
    "op_in_flight",
    "op_in_flight_when_polled",
    "exchange_in_flight",
    "dim_to_join_in_flight",
    "dim_to_cut_in_flight",
}  # data is posted before anybody compares


def poll(request: Any) -> None:
    while not request.test():
        pass


def check_pair(name: str) -> Callable[[World], None]:
    """The check of one entry of PAIRS, with calls before it that are right."""
    usual, astray, *words = PAIRS[name]

    def check(world: World) -> None:
        line, is_astray = line_of(world)
        with world.checked():
            line.barrier()
            line.shift(ZEROS)
        told_alike(
            world,
            lambda: (astray if is_astray else usual)(line),
            f"rank {world.size - 1} ",
            ", call 3:",
            "Last common call: shift on line, call 2, (4, 6) float64, at checks_checked.py:",
            *([f"Rank {world.size - 1} left the path: the other {world.size - 1} are together."] * (world.size > 2)),
            *words,
        )
        if name not in IN_FLIGHT:
            assert line.all_reduce(1) == world.size  # nothing of the refused call is left on the axis

    check.__name__ = f"another_{name}_is_told"
    return check


def another_op_in_flight_is_told_by_the_next_call(world: World) -> None:
    line, is_astray = line_of(world)
    with world.checked():
        request = line.iall_reduce(ZEROS, "max" if is_astray else "sum")
        said = refused(lambda: line.all_reduce(ZEROS), "on axis line, call 1: ", " sum at ", " max at ")
        assert refused(request.wait) == said
    assert not world.mode.unfinished
    assert set(world.exchange(said)) == {said}


def sums_in_rank_order_on_one_rank_only_are_told(world: World) -> None:
    line, is_astray = line_of(world)
    with checks_comm.mode(world, deterministic=is_astray), world.checked():
        said = refused(lambda: line.all_reduce(ZEROS), "float64 sum at", "float64 sum in rank order at")
    assert set(world.exchange(said)) == {said}


# -- two calls that look alike, swapped


def told_at_the_second(world: World, calls: list[Callable[[], Any]], number: int) -> None:
    """The last of several calls is refused."""
    with world.checked():
        for call in calls[:-1]:
            call()
        said = refused(calls[-1], f", call {number}: ", f" at {HERE}", "the same calls in another order")
    assert set(world.exchange(said)) == {said}


def calls_that_are_swapped_in_two_branches_are_told(world: World) -> None:
    """C73: four lines of source, and no rank ever comes to a line of the others."""
    line, is_astray = line_of(world)
    a, b = np.ones(4), np.ones(4)

    def both() -> None:
        if is_astray:
            line.all_reduce(b)
            line.all_reduce(a)
        else:
            line.all_reduce(a)
            line.all_reduce(b)

    with world.checked():
        line.all_reduce(a)
        said = refused(
            both, ", call 3: ", f"Since call 2 ranks {world.size - 2} and {world.size - 1} have made the same calls"
        )
    assert set(world.exchange(said)) == {said}


def functions_that_are_called_in_another_order_are_told(world: World) -> None:
    line, is_astray = line_of(world)

    def first(x: np.ndarray) -> None:
        line.all_gather(x)

    def second(x: np.ndarray) -> None:
        line.all_gather(x)

    order = [second, first] if is_astray else [first, second]
    told_at_the_second(world, [lambda f=f: f(ZEROS) for f in order], 2)


def three_calls_in_another_order_are_told_at_the_third(world: World) -> None:
    line, is_astray = line_of(world)
    a = b = c = ZEROS
    calls = [
        lambda: line.broadcast(a),
        lambda: line.broadcast(b),
        lambda: line.broadcast(c),
    ]
    told_at_the_second(world, calls[1:] + calls[:1] if is_astray else calls, 3)


def swapped_calls_in_flight_are_told(world: World) -> None:
    line, is_astray = line_of(world)
    a, b = np.ones(4), np.ones(4)
    calls = [
        lambda: line.iall_reduce(a),
        lambda: line.iall_reduce(b),
    ]
    with world.checked():
        requests = [call() for call in (reversed(calls) if is_astray else calls)]
        said = refused(lambda: [request.wait() for request in requests], "call 2: ", "in another order")
    assert set(world.exchange(said)) == {said}


def a_call_too_many_in_a_loop_is_told_within_a_turn(world: World) -> None:
    """From then on every call of the last rank meets the next one of the others."""
    line, is_astray = line_of(world)
    a = b = c = extra = ZEROS

    def loop() -> None:
        line.all_reduce(a)
        line.all_reduce(b)
        if is_astray:
            line.all_reduce(extra)
        for _ in range(3):
            line.all_reduce(c)
            line.all_reduce(a)
            line.all_reduce(b)

    with world.checked():
        said = refused(loop, "on axis line, call 6: ", "Since call 4 ", "in another order")
    assert set(world.exchange(said)) == {said}


# -- slices that do not fit


def counts_that_do_not_fit_are_told_on_all_ranks(world: World) -> None:
    line, is_astray = line_of(world)
    n, last = world.size, world.size - 1
    sent, received = [1] * n, [1] * n
    if is_astray:
        received[0] = 2
    x = np.zeros((n, 3), "f4")
    told_alike(
        world,
        lambda: line.all_to_all(x, 0, 0, (sent, received)),
        f"rank 0 sends (1, 3) to rank {last}, which expects (2, 3): ",
        f"rank {last} all_to_all ({n}, 3) float32",
    )
    received[0] = 1
    even = line.all_to_all(x)
    with world.checked():
        checks_comm.same(line.all_to_all(x, 0, 0, (sent, received)), even)


def counts_in_flight_that_do_not_fit_are_told_before_data_moves(world: World) -> None:
    """By MPI, to which no block that does not fit may be given; threads refuse it by themselves."""
    if world.transport.kind != "mpi":
        return
    line, is_astray = line_of(world)
    n, last = world.size, world.size - 1
    sent, received = [1] * n, [1] * n
    if is_astray:
        received[0] = 2
    x = np.zeros((n, 3), "f4")
    words = f"rank 0 sends (1, 3) to rank {last}, which expects (2, 3): "
    told_alike(world, lambda: line.iall_to_all(x, counts=(sent, received)).wait(), words)
    told_alike(world, lambda: poll(line.iall_to_all(x, counts=(sent, received))), words)
    uneven = [[(a + b) % 3 for b in range(n)] for a in range(n)]
    counts = uneven[world.rank], [uneven[a][world.rank] for a in range(n)]
    with world.checked():
        rows = np.full((sum(counts[0]), 3), float(world.rank))
        flying = [line.iall_to_all(rows, counts=counts) for _ in range(3)]
        for request in reversed(flying):
            assert (request.wait()[:, 0] == np.repeat(np.arange(n), counts[1])).all()
    assert not world.mode.unfinished


def lengths_of_slices_that_differ_are_told_on_all_ranks(world: World) -> None:
    """Each rank's own slice has the length that it says; only all of them together do not fit."""
    line, is_astray = line_of(world)
    n, last = world.size, world.size - 1
    usual, other = [2, 3, 1, 0][:n], [3, 2, 1, 0][:n]
    counts, total = other if is_astray else usual, sum(usual)
    told = ",".join(map(str, usual)), ",".join(map(str, other))
    for verb in ("all_gather", "reduce_scatter", "iall_gather", "ireduce_scatter"):
        shape = (counts[world.rank] if "gather" in verb else total, 3)
        if verb[0] == "i" and world.transport.kind != "mpi":
            continue  # threads refuse by themselves what is posted at once
        told_alike(
            world,
            lambda verb=verb, shape=shape: checks_slices.result(getattr(line, verb)(np.zeros(shape), counts=counts)),
            f"{verb} ({total}, 3) float64 dim 0 in slices of {told[0]} at",
            f"rank {last} {verb} ({total}, 3) float64 dim 0 in slices of {told[1]} at",
        )
    wider = np.zeros((usual[world.rank], 4 if is_astray else 3))
    told_alike(world, lambda: line.all_gather(wider, counts=usual), f"({total}, 3) float64 at", f"({total}, 4) float64")
    one_more = [1] * n
    one_more[0] += is_astray
    told_alike(world, lambda: line.all_gather(np.zeros((1, 3)), counts=one_more), "(1, 3)", f"({n + 1}, 3)")
    with world.checked():
        mine = np.full((usual[world.rank], 3), float(world.rank))
        flying = [line.iall_gather(mine, counts=usual) for _ in range(3)]
        sums = [line.ireduce_scatter(np.ones((total, 3)), counts=usual) for _ in range(3)]
        for request in reversed(sums):
            checks_comm.same(request.wait(), np.full((usual[world.rank], 3), float(n)))
        for request in reversed(flying):
            assert (request.wait()[:, 0] == np.repeat(np.arange(n), usual)).all()
    assert not world.mode.unfinished


def shapes_beside_the_cut_that_do_not_fit_are_told(world: World) -> None:
    line, is_astray = line_of(world)
    n, last = world.size, world.size - 1
    width = 4 if is_astray else 3
    told_alike(
        world,
        lambda: line.all_to_all(np.zeros((2 * n, width))),
        f"rank 0 sends (2, 3) to rank {last}, which expects (2, 4): ",
    )
    told_alike(
        world,
        lambda: line.all_to_all(np.zeros((n * width, 2 * n)), 0, 1),
        f"rank 0 sends ({3 * n}, 2) to rank {last}, which expects ({4 * n}, 2): ",
    )


# -- between two ranks


def messages_that_do_not_fit_are_told_by_the_receiver(world: World) -> None:
    """Rank 0 sends, the last rank receives; every case has a tag of its own, since nobody takes the message."""
    line, is_astray = line_of(world)
    last = world.size - 1
    x = np.zeros((2, 3))
    wrong = (((3, 2), "f8"), ((6,), "f8"), ((2, 3), "i8"), ((2, 3), "f4"), ((2, 2), "f8"), ((7, 3), "f8"))
    for tag, (shape, dtype) in enumerate(wrong, start=1):
        ways: dict[str, Callable[[], Any]] = {"recv": lambda: line.recv(shape, dtype, 0, tag)}  # noqa: B023
        if np.zeros(shape, dtype).nbytes == x.nbytes:  # else threads see it when the two meet, before anybody asks
            ways["irecv"] = lambda: line.irecv(shape, dtype, 0, 100 + tag).wait()  # noqa: B023
        for verb, receive in ways.items():
            used = tag if verb == "recv" else 100 + tag
            with world.checked():
                if world.rank == 0:
                    line.isend(x, last, used)
                elif is_astray:
                    refused(
                        receive,
                        f"on axis line, call 1: rank 0 isend (2, 3) float64 to rank {last} tag {used} at {HERE}",
                        f"; rank {last} {verb} {shape} {np.dtype(dtype)} from rank 0 tag {used} at {HERE}",
                    )
            line.barrier()
    world.mode.requests.clear()  # nobody receives them any more


def an_array_that_is_written_while_it_is_sent_is_told(world: World) -> None:
    line, is_astray = line_of(world)
    last = world.size - 1
    x, y = np.zeros((2, 3)), np.zeros(5)
    words = "was written before the message was complete"
    with world.checked():
        if world.rank == 0:
            request = line.isend(x, last, 3)
            x[0] = 1
            line.barrier()
            checks_comm.raises(CommError, f"isend on axis line, call 1, (2, 3) float64 at {HERE}", request.wait)
        else:
            line.barrier()
            if is_astray:
                line.recv((2, 3), "f8", 0, 3)
        request = line.iall_reduce(y)
        y[0] = 1
        checks_comm.raises(CommError, words, request.wait)
        rows = np.zeros((world.size, 3))
        request = line.iall_to_all(rows)
        rows[0] = 1
        checks_comm.raises(CommError, "iall_to_all on axis line, call 3, ", request.wait)
        for number, verb in enumerate(("iall_gather", "ireduce_scatter"), start=4):
            rows = np.zeros((world.size, 3))
            request = getattr(line, verb)(rows, 0)
            rows[0] = 1
            checks_comm.raises(CommError, f"{verb} on axis line, call {number}, ", request.wait)
        counts = [2] + [1] * (world.size - 1)
        whole = np.full((sum(counts), 3), float(world.rank))
        own = np.split(whole, np.cumsum(counts)[:-1])[world.rank]
        joined = line.iall_gather(own, out=whole, counts=counts).wait()
        assert (joined[:, 0] == np.repeat(np.arange(world.size), counts)).all()
        request = line.iall_gather(own, out=whole, counts=counts)
        own[0, 0] += 1  # also where it stands in the result already
        checks_comm.raises(CommError, "iall_gather on axis line, call 7, ", request.wait)
        place, strided = np.ones(4), np.ones(8)
        request = line.iall_reduce(place, out=place)
        assert (request.wait() == world.size).all()  # MPI itself writes it
        request = line.iall_reduce(strided[::2])
        strided[:] = 7  # it was a copy that was sent
        assert (request.wait() == world.size).all()


# -- which axis, and when


def only_the_ranks_of_the_axis_are_told(world: World) -> None:
    """Of a mesh of two rows, the axis of the last rank: the other row knows nothing of it."""
    if world.size != 4:
        return
    mesh = Mesh(world, tp=2)
    with world.checked():
        if world.rank < 2:
            mesh.tp.all_reduce(ZEROS)
        else:
            call = mesh.tp.all_gather if world.rank == 3 else mesh.tp.all_reduce
            refused(
                lambda: call(ZEROS), "on axis tp, call 1: rank 2 all_reduce (4, 6) float64 at ", "; rank 3 all_gather"
            )
        mesh.dp.barrier()
        world.barrier()


def what_is_switched_on_for_a_block_ends_with_it(world: World) -> None:
    line, is_astray = line_of(world)
    asked = world.mode.asked
    world.set_checked(False)
    with world.checked():
        with world.checked():
            assert world.mode.checked
            refused(lambda: line.all_reduce(ZEROS[: 3 if is_astray else 4]))
        assert world.mode.checked
        world.set_checked(False)
        assert world.mode.checked
    assert not world.mode.checked
    world.hold_checks()
    world.set_checked()
    world.release_checks()
    assert world.mode.checked
    world.set_checked(asked)


def checks_are_no_events_and_no_bytes(world: World) -> None:
    with world.checked():
        checks_comm.bytes_are_counted_by_verb(world)
        checks_comm.listeners_hear_of_every_message(world)


# -- what is right


def one_call_in_two_branches_is_no_mistake(world: World) -> None:
    """A rank may make a call in a line of its own, time after time; roots take turns."""
    line, is_astray = line_of(world)
    loss, mine, n = np.ones(3), np.ones(3), world.size
    with world.checked():
        for turn in range(3 * n):
            if is_astray:
                total = line.all_reduce(loss).sum()
            else:
                total = line.all_reduce(mine).sum()
            assert total == 3 * n
            if turn % n == world.rank:
                got = line.broadcast(np.full(3, 1.0 * turn), turn % n)
            else:
                got = line.broadcast(np.empty(3), turn % n)
            assert (got == turn).all()
            if turn % n == world.rank:
                line.all_reduce(loss)
            else:
                line.all_reduce(loss)


def ranks_that_listen_and_ranks_that_do_not_make_the_same_calls(world: World) -> None:
    from mpitrain.autograd import ops  # noqa: F401
    from mpitrain.autograd.tape import Tape
    from mpitrain.autograd.tensor import Tensor
    from mpitrain.collectives import all_gather, sum_everywhere
    from mpitrain.events import listen

    line, is_astray = line_of(world)
    x = Tensor(np.ones((2, 2)), requires_grad=True)

    def both_ways() -> None:
        with Tape() as tape:
            y = sum_everywhere(all_gather(x, line), line)
        tape.run_backward([(y, np.ones(y.shape))])

    with world.checked():
        if is_astray:
            with listen(lambda event: None):
                both_ways()
        else:
            both_ways()
        both_ways()


def long_names_and_many_dims_are_compared_too(world: World) -> None:
    line, is_astray = line_of(world)
    deep = np.zeros((1,) * 50)
    scope: dict[str, Any] = {}
    exec(compile("def call(w, x): w.all_reduce(x)", "ä" * 90 + "/" + "long" * 60 + ".py", "exec"), scope)
    with world.checked():
        scope["call"](line, deep)
        refused(lambda: scope["call"](line, deep[0] if is_astray else deep), "long.py:1", "(50 dims, ", "(49 dims, ")


def calls_in_flight_on_many_axes_end_well(world: World) -> None:
    """A program drawn by lot: calls of all kinds on all axes, some in flight for long, ranks that ask in any rhythm."""
    shape = {2: 2, 4: 2}.get(world.size, 1)
    mesh = Mesh(world, tp=shape)
    axes = [axis for axis in (world, mesh.tp, mesh.dp) if axis.size > 1]
    same_on_all, own = np.random.default_rng(7), np.random.default_rng(100 + world.rank)

    def begin(axis: Communicator, kind: int, length: int) -> tuple[Any, Any]:
        """A request, and every element of its result."""
        x = np.full(length, 1.0 + axis.rank)
        if kind == 6:
            counts = [[(a + b) % 3 * length for b in range(axis.size)] for a in range(axis.size)]
            mine = counts[axis.rank], [row[axis.rank] for row in counts]
            request = axis.iall_to_all(np.full(sum(mine[0]), 1.0 + axis.rank), counts=mine)
            return request, np.repeat(1.0 + np.arange(axis.size), mine[1])
        if kind == 7:
            lengths = [(a + length) % 3 * length for a in range(axis.size)]
            mine = np.full(lengths[axis.rank], 1.0 + axis.rank)
            return axis.iall_gather(mine, counts=lengths), np.repeat(1.0 + np.arange(axis.size), lengths)
        if kind == 8:
            lengths = [(a + length) % 3 * length for a in range(axis.size)]
            request = axis.ireduce_scatter(np.full(sum(lengths), 1.0 + axis.rank), counts=lengths)
            return request, axis.size * (axis.size + 1) / 2
        if kind < 3:
            return axis.iall_reduce(x, out=x if kind else None), axis.size * (axis.size + 1) / 2
        tag = kind
        before, behind = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size
        sent = axis.isend(x, behind, tag)
        return _Pair(axis.irecv((length,), "f8", before, tag), sent), 1.0 + before

    for deterministic in (False, True):
        flying: list[tuple[Any, Any]] = []
        with checks_comm.mode(world, deterministic=deterministic), world.checked():
            for _ in range(80):
                axis, kind = axes[same_on_all.integers(len(axes))], int(same_on_all.integers(9))
                flying.append(begin(axis, kind, int(same_on_all.choice([3, 40, 10_000, 50_000]))))
                if own.random() < 0.3:
                    flying[int(own.integers(len(flying)))][0].test()
                if same_on_all.random() < 0.2:
                    assert axes[same_on_all.integers(len(axes))].all_reduce(np.ones(3)).min() > 1
                while len(flying) > same_on_all.integers(12):
                    request, value = flying.pop(0)
                    assert (request.wait() == value).all()
            for request, value in flying:
                assert (request.wait() == value).all()
            world.barrier()
    assert not world.mode.unfinished


class _Pair:
    """A receive and the send that goes with it."""

    def __init__(self, received: Any, sent: Any) -> None:
        self._received, self._sent = received, sent

    def test(self) -> bool:
        return bool(self._received.test() and self._sent.test())

    def wait(self) -> Any:
        self._sent.wait()
        return self._received.wait()


def every_message_of_the_door_is_let_through(world: World) -> None:
    with world.checked():
        for check in (*checks_comm.CHECKS, *checks_slices.CHECKS):
            check(world)
    assert not world.mode.unfinished


CHECKS: list[Callable[[World], None]] = [
    *map(check_pair, PAIRS),
    another_op_in_flight_is_told_by_the_next_call,
    sums_in_rank_order_on_one_rank_only_are_told,
    calls_that_are_swapped_in_two_branches_are_told,
    functions_that_are_called_in_another_order_are_told,
    three_calls_in_another_order_are_told_at_the_third,
    swapped_calls_in_flight_are_told,
    a_call_too_many_in_a_loop_is_told_within_a_turn,
    counts_that_do_not_fit_are_told_on_all_ranks,
    counts_in_flight_that_do_not_fit_are_told_before_data_moves,
    lengths_of_slices_that_differ_are_told_on_all_ranks,
    shapes_beside_the_cut_that_do_not_fit_are_told,
    messages_that_do_not_fit_are_told_by_the_receiver,
    an_array_that_is_written_while_it_is_sent_is_told,
    only_the_ranks_of_the_axis_are_told,
    what_is_switched_on_for_a_block_ends_with_it,
    checks_are_no_events_and_no_bytes,
    one_call_in_two_branches_is_no_mistake,
    ranks_that_listen_and_ranks_that_do_not_make_the_same_calls,
    long_names_and_many_dims_are_compared_too,
    calls_in_flight_on_many_axes_end_well,
    every_message_of_the_door_is_let_through,
]
