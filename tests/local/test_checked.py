"""Checked mode on threads: mistakes are told at once, right programs are let through, and off means off."""

from __future__ import annotations

import contextvars
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checks_checked
import checks_comm
import checks_data_parallel
import checks_slices
from delay import delayed

from mpitrain.comm.checked import Checks
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.transport import Transport
from mpitrain.comm.world import World, world
from mpitrain.errors import CollectiveMismatch, CommError

NAMES = [check.__name__ for check in checks_checked.CHECKS]
LONG = "every_message_of_the_door_is_let_through"
IN_FLIGHT = [name for name in NAMES if "op_in_flight" in name]
HERE = Path(__file__).name


class AsMpi:
    """Threads that are taken for MPI: data follows its check, since what does not fit must not reach an MPI.

    Its groups have other names than their axes: threads compare the calls of an axis themselves otherwise.
    """

    kind = "mpi"

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank, self.size = transport.rank, transport.size

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._transport, verb)

    def group(self, ranks: tuple[int, ...], name: str) -> Transport:
        return AsMpi(self._transport.group(ranks, f"raw {name}"))


def as_mpi(w: World) -> World:
    return World(AsMpi(w.transport).group(tuple(range(w.size)), "world"), "threads", w.board)


def check_of(name: str) -> Callable[[World], None]:
    return dict(zip(NAMES, checks_checked.CHECKS, strict=True))[name]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in (LONG, *IN_FLIGHT)])
def test_threads(name: str, ranks: int) -> None:
    LocalWorld(ranks, timeout=20).run(lambda: check_of(name)(world()))


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_threads_refuse_calls_in_flight_when_they_meet(name: str) -> None:
    """C73.  Their data is posted at once, so nobody can go on after it."""
    with pytest.raises(CollectiveMismatch, match=r"on axis line, call \d: ranks 0,1 .*; rank 2 iall_reduce"):
        LocalWorld(3, timeout=20).run(lambda: check_of(name)(world()))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", [name for name in NAMES if name != LONG])
def test_data_that_follows_its_check(name: str, ranks: int) -> None:
    LocalWorld(ranks, timeout=20).run(lambda: check_of(name)(as_mpi(world())))


def test_messages_that_are_late_in_checked_mode() -> None:
    check = check_of("calls_in_flight_on_many_axes_end_well")
    LocalWorld(4, timeout=20, wrap=delayed(0.0005)).run(lambda: check(as_mpi(world())))


@pytest.mark.parametrize("kind", ["local", "mpi"])
@pytest.mark.parametrize("check", [*checks_comm.CHECKS, *checks_slices.CHECKS], ids=lambda check: check.__name__)
def test_the_door_in_checked_mode(check: Callable[[World], None], kind: str) -> None:
    def main() -> None:
        w = world() if kind == "local" else as_mpi(world())
        w.set_checked()
        check(w)

    LocalWorld(3, timeout=20).run(main)


def test_training_in_checked_mode_has_the_bits_of_training() -> None:
    def train(checked: bool) -> list[dict[str, dict[str, np.ndarray]]]:
        def main() -> dict[str, dict[str, np.ndarray]]:
            world().set_checked(checked)
            world().set_deterministic()
            return checks_data_parallel.train(world(), 2, steps=4, bucket_bytes=4096)

        return LocalWorld(4).run(main)

    for one, other in zip(train(False), train(True), strict=True):
        for kind, tensors in one.items():
            for name, array in tensors.items():
                assert array.tobytes() == other[kind][name].tobytes(), (kind, name)


# -- ranks that never meet: with threads nobody has to wait for a time limit


def missing_call(w: World) -> None:
    if w.rank:
        w.all_reduce(np.ones(3))


def call_too_many(w: World) -> None:
    w.barrier()
    if w.rank:
        w.barrier()


def another_axis(w: World) -> None:
    mesh = Mesh(w)
    (w if w.rank else mesh.dp).all_reduce(np.ones(3))


def another_order_of_axes(w: World) -> None:
    mesh = Mesh(w)
    for axis in (w, mesh.dp) if w.rank else (mesh.dp, w):
        axis.all_reduce(np.ones(3))


def another_tag(w: World) -> None:
    if w.rank:
        w.recv((3,), "f8", 0, tag=4)
    else:
        w.send(np.ones(3), 1, tag=3)


def crossed_sends(w: World) -> None:
    w.send(np.ones(3), 1 - w.rank)
    w.recv((3,), "f8", 1 - w.rank)


def crossed_receives(w: World) -> None:
    w.recv((3,), "f8", 1 - w.rank)
    w.send(np.ones(3), 1 - w.rank)


def message_that_nobody_sends(w: World) -> None:
    if w.rank:
        w.irecv((3,), "f8", 0).wait()
    else:
        w.barrier()


@pytest.mark.parametrize(
    ("program", "places"),
    [
        (missing_call, ["rank 0 left and never", "rank 1 waits in all_reduce on world, call 1, (3,) float64, at"]),
        (call_too_many, ["rank 0 left after barrier on world, call 1,", "rank 1 waits in barrier on world, call 2,"]),
        (another_axis, ["rank 0 waits in all_reduce on dp, call 1,", "rank 1 waits in all_reduce on world, call 1,"]),
        (another_order_of_axes, ["rank 0 waits in all_reduce on dp, call 1,", "rank 1 waits in all_reduce on world,"]),
        (another_tag, ["rank 0 waits in send on world to rank 1 of it, tag 3, call 1,", "from rank 0 of it, tag 4,"]),
        (crossed_sends, ["rank 0 waits in send on world to rank 1 of it,", "rank 1 waits in send on world to rank 0"]),
        (crossed_receives, ["rank 0 waits in recv on world from rank 1 of it,", "rank 1 waits in recv on world from"]),
        (message_that_nobody_sends, ["rank 0 waits in barrier", "rank 1 waits for irecv on world from rank 0 of it,"]),
    ],
)
def test_ranks_that_never_meet_are_told_where_they_stand(program: Callable[[World], None], places: list[str]) -> None:
    """C73: what no fingerprint can tell, since it does not come."""

    def main() -> None:
        world().set_checked()
        program(world())

    began = time.monotonic()
    with pytest.raises(CommError) as caught:
        LocalWorld(2).run(main)
    assert time.monotonic() - began < 2
    for place in (f" at {HERE}:", *places):
        assert place in str(caught.value)


def test_the_first_call_that_differs_is_told_not_the_last() -> None:
    """A rank takes another way in its third step; what it does later does not hide that."""

    def main() -> None:
        w = world()
        w.set_checked()
        for step in range(6):
            w.all_reduce(np.ones(4))
            if not (step == 2 and w.rank == 1):
                w.all_gather(np.ones(4))

    with pytest.raises(CollectiveMismatch) as caught:
        LocalWorld(2).run(main)
    said = str(caught.value)
    assert said.startswith("on axis world, call 6: rank 0 all_gather (4,) float64 at ")
    assert "; rank 1 all_reduce (4,) float64 at " in said


# -- what it costs


class Counting:
    """A transport that counts its verbs."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank, self.size, self.kind = transport.rank, transport.size, transport.kind
        self.count: dict[str, int] = {}

    def __getattr__(self, verb: str) -> Any:
        do = getattr(self._transport, verb)

        def counted(*args: Any, **how: Any) -> Any:
            self.count[verb] = self.count.get(verb, 0) + 1
            return do(*args, **how)

        return counted


def test_a_checked_collective_sends_one_small_message_to_each_other_rank_and_an_unchecked_one_none() -> None:
    def main() -> list[dict[str, int]]:
        w, found = world(), []
        for checked in (False, True):
            w.set_checked(checked)
            for call in (
                lambda: w.all_reduce(np.ones(5)),
                lambda: w.all_to_all(np.ones(6)),
                lambda: w.all_to_all(np.ones(6), 0, 0, ([1, 2, 3], [1 + w.rank] * 3)),
                lambda: w.send(np.ones(2), 1) if w.rank == 0 else None,
                lambda: w.recv((2,), "f8", 0) if w.rank == 1 else None,
            ):
                w.transport.count.clear()
                call()
                found.append(dict(w.transport.count))
        return found

    first, second, third = LocalWorld(3, wrap=Counting).run(main)
    gathered = {"isend": 2, "irecv": 2}
    assert first[:5] == [{"all_reduce": 1}, {"all_to_all": 1}, {"all_to_all": 1}, {"send": 1}, {}]
    assert first[5:9] == [
        {**gathered, "all_reduce": 1},
        {**gathered, "all_to_all": 1},
        {"isend": 4, "irecv": 4, "all_to_all": 1},  # its blocks are uneven, their lengths are told as well
        {"isend": 1, "send": 1},
    ]
    assert (second[4], second[9]) == ({"recv": 1}, {"irecv": 1, "recv": 1})
    assert third[:3] == first[:3]


def test_nothing_is_checked_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Checks, "post")
    LocalWorld(2).run(lambda: checks_comm.listeners_hear_of_every_message(world()))


def test_checked_mode_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("MPITRAIN_CHECK", text)
        assert contextvars.Context().run(lambda: world().mode.checked) is expected
        assert LocalWorld(2).run(lambda: world().mode.checked) == [expected] * 2


def test_a_world_of_one_has_nothing_to_compare() -> None:
    w = contextvars.Context().run(world)
    with w.checked():
        checks_comm.listeners_hear_of_every_message(w)
        assert w.all_reduce(np.ones(3)).sum() == 3


def test_every_check_is_in_the_list() -> None:
    functions = [
        name
        for name, item in vars(checks_checked).items()
        if getattr(item, "__module__", "") == "checks_checked"
        and getattr(item, "__annotations__", {}) == {"world": "World", "return": "None"}
    ]
    assert set(functions) <= set(NAMES)
    assert len(set(NAMES)) == len(NAMES)
