"""The door over threads: every check of tests/checks_comm.py, on several numbers of ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checks_comm
from delay import delayed

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.transport import Transport
from mpitrain.comm.world import world

NAMES = [check.__name__ for check in checks_comm.CHECKS]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_door(name: str, ranks: int) -> None:
    check = getattr(checks_comm, name)
    LocalWorld(ranks, timeout=20).run(lambda: check(world()))


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
                assert (w.reduce_scatter(x) == 3 * np.split(x, 3)[w.rank]).all()
                assert (w.all_to_all(x).reshape(3, -1) == np.split(x, 3)[w.rank]).all()
                assert (w.broadcast(x, 2) == x).all()
                assert (w.shift(x) == x).all()

    for limit, counts in ((9, (1, 9, 30, 200)), (1000, (30, 20_000))):
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


def test_messages_are_late_and_all_is_as_before() -> None:
    for name in ("a_sum_has_the_same_bits_however_it_is_cut", "requests_make_progress_by_being_asked"):
        check = getattr(checks_comm, name)
        LocalWorld(3, wrap=delayed(0.002)).run(lambda check=check: check(world()))


def test_every_check_is_in_the_list() -> None:
    functions = [
        name
        for name, item in vars(checks_comm).items()
        if getattr(item, "__module__", "") == "checks_comm"
        and list(getattr(item, "__annotations__", {})) == ["world", "return"]
    ]
    assert sorted(functions) == sorted(NAMES)
