"""The door: device arrays go through page-locked memory and come back to the device, or go as they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strict_array import crossings, ndarray
from strict_stream import asynchronous

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_device_messages as checks
from checks_gpu_streams import rounds_of_messages

from mpitrain.backend import to_host
from mpitrain.collectives import ARROWS, AllToAll, MaxOver, Pick, Shift
from mpitrain.comm.device_messages import STAGED, use_device_messages
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.device import CPU, Device
from mpitrain.errors import CommError, DeviceError, ShapeError
from mpitrain.events import Event, listen


def arrived(y: Any, truth: np.ndarray) -> None:
    assert isinstance(y, ndarray)
    np.testing.assert_array_equal(y.get(), truth)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_verb_takes_and_gives_device_arrays(cupy, ranks, deterministic):
    def main() -> None:
        w = world()
        w.set_deterministic(deterministic)
        n, me = w.size, w.rank
        host = np.arange(6.0 * n).reshape(2 * n, 3) + me
        total = np.arange(6.0 * n).reshape(2 * n, 3) * n + sum(range(n))
        x = cupy.asarray(host)
        of_rank = [host - me + rank for rank in range(n)]

        arrived(w.all_reduce(x), total)
        arrived(w.iall_reduce(x).wait(), total)
        arrived(w.all_reduce(x, "max"), of_rank[-1])
        arrived(w.all_reduce(x[::2].T), total[::2].T)
        out = cupy.zeros((2 * n, 3))
        assert w.all_reduce(x, out=out) is out
        arrived(out, total)
        half = cupy.asarray(host.astype(np.float16))
        wide = cupy.zeros((2 * n, 3), np.float32)
        assert w.all_reduce(half, out=wide) is wide
        arrived(wide, total.astype(np.float32))
        assert w.iall_reduce(x, out=x).wait() is x
        arrived(x, total)
        x = cupy.asarray(host)
        arrived(w.reduce_scatter(x), np.split(total, n)[me])
        arrived(w.reduce_scatter(x.T, 1), np.split(total.T, n, 1)[me])
        arrived(w.ireduce_scatter(x).wait(), np.split(total, n)[me])
        arrived(w.ireduce_scatter(x.T, 1).wait(), np.split(total.T, n, 1)[me])
        arrived(w.all_gather(x), np.concatenate(of_rank))
        arrived(w.iall_gather(x).wait(), np.concatenate(of_rank))
        arrived(w.iall_gather(x.T, 1).wait(), np.concatenate([part.T for part in of_rank], 1))
        arrived(w.all_gather(x, -1), np.concatenate(of_rank, 1))
        arrived(w.all_to_all(x), np.concatenate([np.split(part, n)[me] for part in of_rank]))
        arrived(w.iall_to_all(x, 1, 0).wait(), np.concatenate([np.split(part, n)[me] for part in of_rank], 1))
        arrived(w.all_to_all(x, 1, 0), np.concatenate([np.split(part, n)[me] for part in of_rank], 1))
        arrived(w.broadcast(x, n - 1), of_rank[-1])
        arrived(w.shift(x), of_rank[(me - 1) % n])
        if n > 1:
            landing = cupy.zeros((2 * n, 3))
            arrives = w.irecv((2 * n, 3), "f8", (me - 1) % n, out=landing)
            w.isend(x, (me + 1) % n).wait()
            assert arrives.wait() is landing
            arrived(landing, of_rank[(me - 1) % n])
            into = cupy.zeros((2 * n, 3))
            sends = w.isend(x, (me + 1) % n)
            assert w.recv((2 * n, 3), "f8", (me - 1) % n, out=into) is into
            sends.wait()
            arrived(into, of_rank[(me - 1) % n])

    LocalWorld(ranks).run(main)


def test_slices_of_different_lengths_change_places(cupy):
    def main() -> None:
        w = world()
        counts = ([1, 2], [1, 2])[w.rank], ([1, 1], [2, 2])[w.rank]
        x = cupy.asarray(np.arange(6.0).reshape(3, 2) + 10 * w.rank)
        expected = {0: [[0, 1], [10, 11]], 1: [[2, 3], [4, 5], [12, 13], [14, 15]]}
        arrived(w.all_to_all(x, counts=counts), np.array(expected[w.rank], float))
        arrived(w.iall_to_all(x, counts=counts).wait(), np.array(expected[w.rank], float))

    LocalWorld(2).run(main)


@pytest.mark.parametrize("deterministic", [False, True])
def test_slices_of_different_lengths_are_joined_and_summed(cupy, deterministic):
    def main() -> None:
        w = world()
        w.set_deterministic(deterministic)
        counts, whole = [0, 3, 1], np.arange(8.0).reshape(4, 2)
        place = slice(sum(counts[: w.rank]), sum(counts[: w.rank + 1]))
        mine, wide = cupy.asarray(whole[place]), cupy.asarray(whole.T)
        for begin in (w.all_gather, lambda *x, **how: w.iall_gather(*x, **how).wait()):
            arrived(begin(mine, counts=counts), whole)
            arrived(begin(mine.T, 1, counts=counts), whole.T)
            out = cupy.zeros((4, 2))
            out[place] = mine
            assert begin(out[place], out=out, counts=counts) is out
            arrived(out, whole)
        for begin in (w.reduce_scatter, lambda *x, **how: w.ireduce_scatter(*x, **how).wait()):
            arrived(begin(wide.T, counts=counts), 3 * whole[place])
            out = cupy.zeros((2, counts[w.rank]), np.float32)
            assert begin(wide.astype(np.float16), 1, out=out, counts=counts) is out
            arrived(out, 3 * whole[place].T)

    LocalWorld(3).run(main)


def test_a_message_crosses_once_each_way(cupy):
    def main() -> None:
        x = cupy.zeros(1000)
        with crossings() as counted:
            world().all_reduce(x, out=x)
        assert counted == {"get": 1, "set": 1}

    LocalWorld(2).run(main)


def test_a_message_that_goes_as_it_is_does_not_cross(cupy):
    def main() -> None:
        with checks.going(world(), cupy, "mpi") as said, crossings() as counted:
            assert said == "as they are: the ranks are threads with one device"
            for deterministic in (False, True):
                world().set_deterministic(deterministic)
                x = cupy.ones(20_000, np.float16)
                arrived(world().all_reduce(x[::-1]), np.full(20_000, 2, np.float16)) if deterministic else None
                world().iall_reduce(x, out=x).wait()
                world().all_gather(x.reshape(100, 200), 1)
        assert counted == {"get": 1}

    LocalWorld(2).run(main)


WAYS = ("mpi", "staged")


FEW = (
    "any_order_and_stride_arrives_as_it_reads every_dtype_travels results_go_where_they_are_asked_to"
    " halves_are_summed_in_float32_and_overflow_only_in_a_half slices_are_joined_where_it_is_asked_for"
).split()


@pytest.mark.parametrize(("way", "names"), [("mpi", checks.LIGHT), ("staged", FEW)], ids=WAYS)
def test_device_arrays_go_as_those_of_the_host_do(cupy, way, names):
    def main() -> None:
        checks.of_the_door(world(), cupy, way, names)
        checks.arrays_stay_on_their_device(world(), cupy, way)
        checks.calls_are_compared_and_arrays_watched(world(), cupy, way)

    LocalWorld(2, timeout=20).run(main)


@pytest.mark.parametrize("way", ["mpi", pytest.param("staged", marks=pytest.mark.slow)])
def test_training_on_a_late_device_has_the_bits_of_the_host(cupy, way):
    with asynchronous(3):
        LocalWorld(2).run(lambda: checks.training_has_the_bits_of_the_host(world(), cupy, way))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3])
@pytest.mark.parametrize("way", WAYS)
def test_all_that_the_door_promises_holds_of_device_arrays(cupy, way, ranks):
    LocalWorld(ranks, timeout=60).run(lambda: checks.of_the_door(world(), cupy, way, [*checks.OF_THE_DOOR]))


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_late_device_has_yet_to_write_is_waited_for(cupy, way, seed):
    """C82: nothing stale is sent, and no page-locked buffer is used again under a copy."""

    def main() -> int:
        with checks.going(world(), cupy, way):
            return rounds_of_messages(world(), cupy, 28, width=2)

    with asynchronous(seed):
        assert LocalWorld(2).run(main) == [0, 0]


@pytest.mark.parametrize("way", WAYS)
def test_every_verb_waits_for_what_it_sends_and_is_waited_for(cupy, way):
    with asynchronous():
        LocalWorld(3).run(lambda: checks.every_verb_waits_for_the_device(world(), cupy, way))


def test_ranks_with_several_devices_do_not_hand_arrays_over(cupy):
    def main() -> str:
        return use_device_messages(world(), "auto", Device("cuda", cupy, ranks=1))

    assert LocalWorld(2).run(main) == [f"{STAGED}: the ranks have several devices"] * 2


def test_threads_do_not_pretend_to_be_processes(cupy):
    def main() -> None:
        with pytest.raises(DeviceError, match="--device-messages nccl is for ranks that are processes"):
            use_device_messages(world(), "nccl", Device("cuda", cupy))

    LocalWorld(2).run(main)


def test_one_rank_and_arrays_of_the_host_have_nothing_to_settle(cupy):
    assert LocalWorld(1).run(lambda: use_device_messages(world(), "auto", Device("cuda", cupy))) == [""]
    assert LocalWorld(2).run(lambda: use_device_messages(world(), "mpi", CPU)) == ["", ""]


@pytest.mark.parametrize("way", WAYS)
def test_listeners_may_keep_what_they_are_shown(cupy, way):
    """A buffer of a message is nobody else's as long as somebody looks at it."""

    def main() -> None:
        kept: list[Any] = []

        def note(event: Event) -> None:
            if event.kind == "message" and event.phase == "end":
                kept.append((event.info["array"], event.info["result"]))

        with checks.going(world(), cupy, way), listen(note):
            for step in range(6):
                world().all_reduce(cupy.full(1000, float(step)))
        for step, (sent, summed) in enumerate(kept[-6:]):
            np.testing.assert_array_equal(to_host(sent), np.full(1000, float(step)))
            np.testing.assert_array_equal(to_host(summed), np.full(1000, 2.0 * step))

    LocalWorld(2).run(main)


@pytest.mark.parametrize("arrow", [*ARROWS, MaxOver], ids=lambda arrow: arrow.title())
def test_every_differentiable_message_has_the_bits_of_numpy(cupy, arrow):
    statics: list[dict[str, Any]] = [{"dim": 0}, {"dim": 1}]
    if arrow is AllToAll:
        statics = [{"i": 0, "j": 0}, {"i": 1, "j": 0}]
    elif arrow is Shift:
        statics = [{"dim": 0, "k": 1}]
    elif arrow is Pick:
        statics = [{"dim": 1, "start": 2, "stop": 5}]
    elif arrow is MaxOver or not any(hasattr(side, "argument") for side in arrow.arrow):
        statics = [{}]

    def main() -> None:
        axis = world()
        axis.set_deterministic(True)
        x = np.random.default_rng(axis.rank).standard_normal((4, 6, 2))
        for static in statics:
            y, saved = arrow.forward(cupy.asarray(x), axis=axis, **static)
            z, other = arrow.forward(x, axis=axis, **static)
            arrived(y, z)
            (dx,) = arrow.backward(y * 2, *saved, wanted=(True,), axis=axis, **static)
            (dz,) = arrow.backward(z * 2, *other, wanted=(True,), axis=axis, **static)
            assert dx is dz is None or isinstance(dx, ndarray)
            if dx is not None:
                arrived(dx, dz)

    LocalWorld(2).run(main)


def test_mistakes_are_told_as_for_host_arrays(cupy):
    def main() -> None:
        w = world()
        x = cupy.zeros((3, 2))
        with pytest.raises(ShapeError, match=r"shape \(3, 2\) has no dim 2"):
            w.all_gather(x, 2)
        with pytest.raises(ShapeError, match="dim 0 of shape"):
            w.reduce_scatter(x)
        with pytest.raises(ShapeError, match="out has shape"):
            w.all_reduce(x, out=cupy.zeros(3))
        with pytest.raises(CommError, match="out is float32, the array float64"):
            w.all_reduce(x, out=cupy.zeros((3, 2), np.float32))

    LocalWorld(2).run(main)
