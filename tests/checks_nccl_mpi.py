"""Arrays of devices over NCCL between real MPI ranks, with strict stand-ins for NCCL and CuPy; the device is late."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("device")))  # where the stand-ins are
import checks_device_messages as checks
import numpy as np
import strict_nccl
from checks_gpu_streams import rounds_of_messages
from strict_cupy import installed
from strict_stream import asynchronous

from mpitrain.backend import to_host
from mpitrain.comm.device_messages import use_device_messages
from mpitrain.comm.world import World
from mpitrain.device import Device
from mpitrain.errors import CommError, DeviceError
from mpitrain.events import Event, listen


def on_late_devices(check: Callable[..., None], *args: Any) -> Callable[[World], None]:
    """The check with the stand-ins."""

    def run(world: World) -> None:
        with installed() as cupy, asynchronous():
            check(world, cupy, *args)

    run.__name__ = check.__name__
    return run


def what_it_cannot_do_is_refused(world: World, cupy: Any) -> None:
    """On every rank, before NCCL begins: ranks that share a device, and no NCCL."""
    cases = (
        ("", 2, True, "2 ranks share one device"),
        ("one for all", 1, True, f"{world.size} ranks share one device"),
        ("", 1, False, "NCCL does not load"),
    )
    for identity, ranks, available, words in cases:
        said = ""
        strict_nccl.available = available or world.rank > 0  # one rank lacks it
        try:
            use_device_messages(world, "nccl", Device("cuda", cupy, ranks=ranks, identity=identity))
        except DeviceError as error:
            said = str(error)
        strict_nccl.available = True
        assert words in said, said
        assert not world.transport.takes_device


def tags_and_sizes_are_told_apart(world: World, cupy: Any) -> None:
    """Messages are received in another order than they were sent; sends cross; one has another size."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    with checks.going(world, cupy, "nccl"):
        for tag in (5, 6, 7, 6):
            world.isend(cupy.full(tag, float(10 * tag + world.rank)), right, tag).wait()
        for tag in (7, 6, 5, 6):
            got = world.recv((tag,), np.float64, left, tag, like=cupy.empty(0))
            assert got.tolist() == [10 * tag + left] * tag
        big = [world.irecv((100_000,), np.float32, left, 1, like=cupy.empty(0)) for _ in range(2)]
        for number in range(2):
            x = cupy.full(100_000, float(number), np.float32)
            request = world.isend(x, right, 1)
            request.wait()
            x[...] = -1.0  # it is the sender's again
        assert [float(request.wait()[-1]) for request in big] == [0.0, 1.0]
        for sends in (np, cupy):
            for takes in (np, cupy):
                world.send(sends.zeros(3), right, 2)
                said = ""
                try:
                    world.recv((2,), np.float64, left, 2, like=takes.empty(0))
                except CommError as error:
                    said = str(error)
                assert f"recv from rank {left} on world: the message has 24 bytes, the array 16" in said, said
        world.isend(cupy.zeros(0), right, 3).wait()
        world.isend(cupy.ones(1), right, 3).wait()
        assert world.recv((0,), np.float64, left, 3, like=cupy.empty(0)).size == 0
        assert world.recv((1,), np.float64, left, 3, like=cupy.empty(0)).tolist() == [1.0]


def either_end_is_the_hosts(world: World, cupy: Any) -> None:
    """What is sent from a host is received on a device and the other way round, early or asked for before; in order."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    kinds = [(sends, takes) for sends in (np, cupy) for takes in (np, cupy)]
    with checks.going(world, cupy, "nccl"):
        for size in (3, 100_000):  # a small message, and one that MPI holds back until it is asked for
            asked = [world.irecv((size,), "f8", left, 1, like=takes.empty(0)) for _, takes in kinds]
            world.barrier()
            for number, (sends, _) in enumerate(kinds):
                x = sends.full(size, float(number))
                world.send(x, right, 1)  # it completes though the receiver is in another call
                x[...] = -1.0
                world.isend(sends.full(size, 10.0 + number), right, 2).wait()
            world.barrier()
            for number, (_, takes) in enumerate(kinds):
                got = asked[number].wait()
                early = world.recv((size,), "f8", left, 2, like=takes.empty(0))
                assert isinstance(got, takes.ndarray)
                assert isinstance(early, takes.ndarray)
                assert [set(got.tolist()), set(early.tolist())] == [{float(number)}, {10.0 + number}]
        out = cupy.zeros((3, 2)).T
        world.send(np.arange(6.0).reshape(2, 3), right)
        assert world.recv((2, 3), "f8", left, out=out) is out
        assert out.tolist() == [[0, 1, 2], [3, 4, 5]]


def what_nccl_cannot_add_is_added(world: World, cupy: Any) -> None:
    """Whole numbers of 16 bits, also beyond their range, complex ones, truth values; nothing at all."""
    n = world.size
    with checks.going(world, cupy, "nccl"):
        for dtype in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8", "c8", "c16"):
            x = (np.arange(2 * n) * (1 + 2j if dtype[0] == "c" else 1)).astype(dtype)
            if dtype[0] in "iu":
                x += np.iinfo(dtype).max // 2 - 9
            total = sum([x] * (n - 1), x)
            mine = cupy.asarray(x)
            for made in (world.all_reduce(mine), world.iall_reduce(mine).wait()):
                assert made.dtype == x.dtype
                assert (made.get() == total).all(), (dtype, made, total)
            assert world.all_reduce(mine, out=mine) is mine
            assert (mine.get() == total).all()
            counts = [2 * n] + [0] * (n - 1)
            wanted = total if world.rank == 0 else total[:0]
            assert (world.reduce_scatter(cupy.asarray(x), counts=counts).get() == wanted).all()
            assert (world.reduce_scatter(cupy.asarray(x)).get() == total.reshape(n, 2)[world.rank]).all()
            if dtype[0] in "iuf":
                low = cupy.asarray(x - np.array(world.rank, dtype))
                assert (world.all_reduce(low, "max").get() == x).all()
        assert world.all_reduce(cupy.asarray([world.rank == 0, False]), "max").tolist() == [True, False]
        for shape in ((0,), (2 * n, 0)):
            nothing = cupy.zeros(shape)
            assert world.all_reduce(nothing).shape == world.broadcast(nothing).shape == shape
            assert world.all_gather(nothing).size == world.reduce_scatter(nothing).size == 0
            assert world.all_to_all(nothing).size == world.iall_to_all(nothing).wait().size == 0
            assert world.shift(nothing).size == 0


def groups_are_made_and_closed(world: World, cupy: Any) -> None:
    """A group's messages arrive although it is closed behind them; it may be closed again, and made again."""
    with checks.going(world, cupy, "nccl"):
        for name in ("one", "again"):
            group = world.group(range(world.size)[::-1], name)
            right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
            x = cupy.full(5000, float(group.rank))
            arrives = group.irecv(x.shape, x.dtype, left, like=x)
            group.send(x, right)
            total, got = group.all_reduce(x), arrives.wait()
            group.transport.close()
            group.transport.close()
            assert set(got.tolist()) == {float(left)}
            assert set(total.tolist()) == {sum(range(group.size))}
        assert world.all_reduce(cupy.ones(1)).tolist() == [world.size]
        alone = world.group([world.rank], "alone")
        assert alone.all_reduce(cupy.ones(1)).tolist() == [1.0]


def what_nccl_refuses_is_told(world: World, cupy: Any) -> None:
    """Of a collective on the spot; of a message from rank to rank where it is waited for, or the next is sent."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    kind = strict_nccl.NcclCommunicator
    with checks.going(world, cupy, "nccl"):

        def refuses(*args: int) -> None:
            raise strict_nccl.NcclError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error\nsecond line")

        before, kind.allReduce, kind.send = (kind.allReduce, kind.send), refuses, refuses  # type: ignore[method-assign]
        kind.recv, receive = refuses, kind.recv  # type: ignore[method-assign]
        world.send(cupy.zeros(3), right)
        said = [
            _refusal(lambda: world.all_reduce(cupy.zeros(3))),
            _refusal(lambda: world.recv((3,), "f8", left, like=cupy.zeros(0))),
            _refusal(lambda: world.send(cupy.zeros(3), right)),
        ]
        (kind.allReduce, kind.send), kind.recv = before, receive  # type: ignore[method-assign]
        system = "NCCL_ERROR_SYSTEM_ERROR: unhandled system error"
        assert said[0] == f"all_reduce on world: NCCL 2.28.3 says {system}", said
        assert said[1:] == [f"a message from rank to rank on world: {system}"] * 2, said


def _refusal(act: Callable[[], Any]) -> str:
    """What is said of something that a thread beside this one may still have to find out."""
    for _ in range(1000):
        try:
            act()
        except CommError as error:
            return str(error)
        time.sleep(0.002)
    return ""


def calls_are_recorded(world: World, cupy: Any) -> None:
    """Listeners are given what each message has brought."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    found: dict[str, Any] = {}

    def note(event: Event) -> None:
        if event.kind in ("message", "arrival") and event.phase == "end" and event.info.get("result") is not None:
            result = event.info["result"]
            found[event.name] = to_host(result[1] if isinstance(result, tuple) else result)

    with checks.going(world, cupy, "nccl"), listen(note):
        world.all_reduce(cupy.ones(3))
        request = world.irecv((2,), "f8", left, like=cupy.zeros(0))
        world.send(cupy.full(2, 7.0), right)
        request.wait()
    assert found["all_reduce"].tolist() == [world.size] * 3
    assert found["irecv"].tolist() == [7.0, 7.0]


def a_late_device_is_waited_for(world: World, cupy: Any) -> None:
    """C82: a kernel still runs when its array is sent, and the next one is put behind what arrives."""
    with checks.going(world, cupy, "nccl") as said:
        assert said == "as they are, by NCCL 2.28.3", said
        assert rounds_of_messages(world, cupy, 21, width=2) == 0


LAST = on_late_devices(what_nccl_refuses_is_told)  # it leaves notes behind that nobody reads
MOST = [
    on_late_devices(tags_and_sizes_are_told_apart),
    on_late_devices(either_end_is_the_hosts),
    on_late_devices(what_nccl_cannot_add_is_added),
    on_late_devices(groups_are_made_and_closed),
    on_late_devices(calls_are_recorded),
    on_late_devices(a_late_device_is_waited_for),
    on_late_devices(checks.arrays_stay_on_their_device, "nccl"),
    on_late_devices(checks.calls_are_compared_and_arrays_watched, "nccl"),
]
CHECKS = [
    on_late_devices(what_it_cannot_do_is_refused),
    *MOST,
    on_late_devices(checks.of_the_door, "nccl", checks.LIGHT),
    LAST,
]
LAYOUTS = [on_late_devices(checks.training_has_the_bits_of_the_host, "nccl")]
ALL = [*MOST, on_late_devices(checks.of_the_door, "nccl", [*checks.OF_THE_DOOR]), LAST]
