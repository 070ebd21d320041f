"""The door over threads: every check of tests/checks_comm.py and checks_slices.py, on several numbers of ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checks_comm
import checks_slices
from delay import delayed

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.transport import Transport
from mpitrain.comm.world import world
from mpitrain.errors import CollectiveMismatch

CHECKS = {check.__name__: check for check in (*checks_comm.CHECKS, *checks_slices.CHECKS)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_door(name: str, ranks: int) -> None:
    LocalWorld(ranks, timeout=20).run(lambda: CHECKS[name](world()))


class Narrow:
    """A transport that refuses long messages, as MPI does."""

    def __init__(self, transport: Transport, limit: int) -> None:
        self._transport, self._limit = transport, limit
        self.rank, self.size, self.kind = transport.rank, transport.size, transport.kind

    def __getattr__(self, verb: str) -> Any:
        do = getattr(self._transport, verb)

        def narrow(*args: Any, **how: Any) -> Any:
            assert all(arg.size <= self._limit for arg in args if isinstance(arg, np.ndarray))
            return do(*args, **how)

        return narrow

    def group(self, ranks: tuple[int, ...], name: str) -> Transport:
        return Narrow(self._transport.group(ranks, name), self._limit)


def test_no_message_above_the_limit_reaches_the_transport() -> None:
    """C75; sums in order are made in slices of 64 KiB, which the longest is above."""

    def main(*counts: int) -> None:
        w = world()
        for deterministic in (False, True):
            w.mode.deterministic = deterministic
            for count in counts:
                x = np.arange(3.0 * count)
                assert (w.all_reduce(x) == 3 * x).all()
                assert (w.iall_reduce(x).wait() == 3 * x).all()
                assert (w.all_gather(x).reshape(3, -1) == x).all()
                assert (w.iall_gather(x).wait().reshape(3, -1) == x).all()
                assert (w.reduce_scatter(x) == 3 * np.split(x, 3)[w.rank]).all()
                assert (w.ireduce_scatter(x).wait() == 3 * np.split(x, 3)[w.rank]).all()
                for lengths in ([count, 0, 2 * count], [0, 0, 3 * count]):
                    mine = np.split(x, np.cumsum(lengths)[:-1])[w.rank].copy()
                    assert (w.all_gather(mine, counts=lengths) == x).all()
                    assert (w.iall_gather(mine, counts=lengths).wait() == x).all()
                    assert (w.reduce_scatter(x, counts=lengths) == 3 * mine).all()
                    assert (w.ireduce_scatter(x, counts=lengths).wait() == 3 * mine).all()
                assert (w.all_to_all(x).reshape(3, -1) == np.split(x, 3)[w.rank]).all()
                assert (w.broadcast(x, 2) == x).all()
                assert (w.shift(x) == x).all()

    for limit, counts in ((9, (1, 2, 9, 30, 200)), (1000, (30, 20_000))):
        LocalWorld(3, wrap=lambda transport, limit=limit: Narrow(transport, limit), limit=limit).run(main, *counts)


class Watching:
    """A transport that notes which sums were in place."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank, self.size, self.kind = transport.rank, transport.size, transport.kind
        self.in_place: list[bool] = []

    def __getattr__(self, verb: str) -> Any:
        do = getattr(self._transport, verb)

        def watch(send: np.ndarray, recv: np.ndarray, op: str) -> Any:
            self.in_place.append(send is recv)
            return do(send, recv, op)

        return watch


def test_a_sum_into_the_array_it_comes_from_makes_no_copy() -> None:
    def main() -> None:
        w = world()
        flat = np.arange(10.0)
        w.all_reduce(flat[2:6], out=flat[2:6])
        w.iall_reduce(flat[6:], out=flat[6:]).wait()
        w.all_reduce(flat, out=flat)
        w.all_reduce(flat[:4], out=flat[4:8])
        assert w.transport.in_place == [True, True, True, False]
        assert flat.tolist() == [0, 2, 8, 12, 0, 4, 16, 24, 32, 36]

    LocalWorld(2, wrap=Watching).run(main)


class Noting:
    """A transport that notes which blocks stand in their places in the gathered array already."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank, self.size, self.kind = transport.rank, transport.size, transport.kind
        self.landings: list[np.ndarray] = []

    def __getattr__(self, verb: str) -> Any:
        do = getattr(self._transport, verb)

        def note(send: np.ndarray | None, recv: np.ndarray, *counts: Any) -> Any:
            self.landings.append(recv)
            return do(send, recv, *counts)

        return note


def test_a_slice_in_its_place_is_gathered_around_without_another_array() -> None:
    def main() -> None:
        w = world()
        for counts, dim in (([2, 3], 0), ([2, 3], 1), ([2, 2], 0), ([5, 0], 0)):
            start = sum(counts[: w.rank])
            own = (slice(None),) * dim + (slice(start, start + counts[w.rank]),)
            whole = np.full((1, sum(counts)) if dim else (sum(counts), 1), -1.0)
            whole[own] = w.rank
            w.all_gather(whole[own], dim, out=whole, counts=counts)
            w.iall_gather(whole[own], dim, out=whole, counts=counts).wait()
            assert whole.reshape(-1).tolist() == [0.0] * counts[0] + [1.0] * counts[1]
            assert all(np.shares_memory(landing, whole) for landing in w.transport.landings)
            assert len(w.transport.landings) == 2
            w.transport.landings.clear()

    LocalWorld(2, wrap=Noting).run(main)


def test_threads_tell_lengths_that_differ_without_being_asked_to_check() -> None:
    def main(verb: str) -> None:
        w = world()
        mine = [3, 1, 2] if w.rank < 2 else [3, 2, 1]
        x = np.zeros((6, 2) if "scatter" in verb else (mine[w.rank], 2))
        getattr(w, verb)(x, counts=mine)

    for verb in ("all_gather", "iall_gather", "reduce_scatter", "ireduce_scatter"):
        with pytest.raises(CollectiveMismatch) as raised:
            LocalWorld(3).run(main, verb)
        said = str(raised.value)
        assert f"ranks 0,1 {verb} (6, 2) float64 in slices of 6,2,4 elements at test_comm.py:" in said, said
        assert f"rank 2 {verb} (6, 2) float64 in slices of 6,4,2 elements at test_comm.py:" in said, said


def test_messages_are_late_and_all_is_as_before() -> None:
    for name in (
        "a_sum_has_the_same_bits_however_it_is_cut",
        "requests_make_progress_by_being_asked",
        "several_are_in_flight",
    ):
        LocalWorld(3, wrap=delayed(0.002)).run(lambda name=name: CHECKS[name](world()))


def test_every_check_is_in_the_list() -> None:
    functions = [
        name
        for module in (checks_comm, checks_slices)
        for name, item in vars(module).items()
        if getattr(item, "__module__", "") == module.__name__
        and list(getattr(item, "__annotations__", {})) == ["world", "return"]
    ]
    assert sorted(functions) == sorted(CHECKS)
