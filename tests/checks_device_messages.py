"""What must hold of messages between arrays of a device, whichever way they go: functions of a world and of CuPy.

tests/device runs them on threads, with the stand-in for CuPy; tests/mpi under mpirun, where the stand-in's arrays lie
in memory of the host, which any MPI can take: so both ways are gone without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import checks_comm
import checks_slices
import numpy as np
from checks_data_parallel import train
from on_device import OnDevice

from mpitrain import kernels
from mpitrain.comm import device_messages
from mpitrain.comm.device_messages import STAGED, use_device_messages
from mpitrain.comm.request import Request
from mpitrain.comm.world import World
from mpitrain.device import Device
from mpitrain.errors import CommError

Check = Callable[[World, Any], None]
OF_THE_DOOR = {check.__name__: check for check in (*checks_comm.CHECKS, *checks_slices.CHECKS)}


@contextmanager
def going(world: World, cupy: Any, way: str, seconds: float = 20.0) -> Iterator[str]:
    """Have device arrays go `staged`, `mpi` as if the MPI said that it takes them, or `nccl`; yields what is said."""
    beneath = world.transport
    before = {name: getattr(device_messages, name) for name in PROBE}
    device_messages.takes_device_memory = lambda module: True  # type: ignore[assignment]
    device_messages.BUSY_ELEMENTS, device_messages.BUSY_ROUNDS = 256, 20
    device_messages.PROBE_SECONDS = seconds
    try:
        yield use_device_messages(world, way, Device("cuda", cupy, ranks=1 if way == "nccl" else world.size))
    finally:
        if world.transport is beneath:
            world.transport.takes_device = False  # type: ignore[misc]
        else:
            world.carry(beneath)
        world.device_messages = ""
        world.barrier()
        for name, value in before.items():
            setattr(device_messages, name, value)


PROBE = ("takes_device_memory", "BUSY_ELEMENTS", "BUSY_ROUNDS", "PROBE_SECONDS")


def of_the_door(world: World, cupy: Any, way: str, names: list[str]) -> None:
    """All that the door promises of arrays of the host, of a device's."""
    with going(world, cupy, way) as said:
        assert (said == STAGED) == (way == "staged"), said
        for name in names:
            OF_THE_DOOR[name](OnDevice(world, cupy))  # type: ignore[arg-type]
            world.barrier()


def arrays_stay_on_their_device(world: World, cupy: Any, way: str) -> None:
    """What a message brings is where its array was, and no array crosses but once each way, where it must."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    with going(world, cupy, way):
        x = cupy.arange(12.0).reshape(3, 4) + world.rank
        for made in (world.all_reduce(x.T), world.all_gather(x), world.broadcast(x, 1), world.shift(x)):
            assert isinstance(made, cupy.ndarray)
        arrives = [world.irecv(x.shape, x.dtype, left, tag, like=x) for tag in (1, 2)]
        landing = cupy.zeros((4, 3)).T  # in Fortran's order: nothing can arrive in it as it is
        arrives.append(world.irecv(x.shape, x.dtype, left, 3, out=landing))
        for tag in (1, 2, 3):
            world.isend(x, right, tag).wait()
        for request in arrives:
            got = request.wait()
            assert isinstance(got, cupy.ndarray)
            np.testing.assert_array_equal(got.get(), np.arange(12.0).reshape(3, 4) + left)
        assert got is landing
        assert type(world.all_reduce(np.ones(3))) is np.ndarray  # beside them arrays of the host go as they did


def calls_are_compared_and_arrays_watched(world: World, cupy: Any, way: str) -> None:
    """Checked mode: every verb of the door, and an array that is written while a message still reads it."""
    with going(world, cupy, way), world.checked():
        for name in ("every_number_is_summed_and_compared", "uneven_slices_change_places", "several_are_in_flight"):
            OF_THE_DOOR[name](OnDevice(world, cupy))  # type: ignore[arg-type]
        if way == "staged":  # the copy in page-locked memory is the message's own
            return
        x = cupy.zeros(8)
        request: Request = world.iall_gather(x)
        x[...] = 1.0
        said = ""
        try:
            request.wait()
        except CommError as error:
            said = str(error)
        assert "was written before the message was complete" in said, said
        world.mode.requests.clear()


def every_verb_waits_for_the_device(world: World, cupy: Any, way: str) -> None:
    """C82, verb by verb, on a stream of each rank's own: what is sent is computed, and what arrives is read after it.

    Of a late device (`asynchronous`), or of one that is busy.
    """
    n, me = world.size, world.rank
    left, counts = (me - 1) % n, [3 * (rank + 1) for rank in range(n)]

    def late(length: int) -> Any:
        return cupy.full(length, me, np.float32) + 1.0

    def one_way(send: Callable[..., Any], recv: Callable[..., Any]) -> Any:
        """From rank 0 to rank 1, which has nothing to send."""
        got = late(6)
        if me == 0:
            send(late(6), 1)
        elif me == 1:
            got = recv((6,), np.float32, 0, like=got)
        return got.wait() if isinstance(got, Request) else got

    total, whole = n * (n + 1) / 2, np.arange(1.0, n + 1)
    first = 1 if me < 2 else me + 1
    calls: dict[str, tuple[Callable[[], Any], Any]] = {
        "all_reduce": (lambda: world.all_reduce(late(6)), np.full(6, total)),
        "iall_reduce": (lambda: world.iall_reduce(late(6)).wait(), np.full(6, total)),
        "all_gather": (lambda: world.all_gather(late(2)), np.repeat(whole, 2)),
        "all_gather, counts": (lambda: world.all_gather(late(counts[me]), counts=counts), np.repeat(whole, counts)),
        "iall_gather": (lambda: world.iall_gather(late(2)).wait(), np.repeat(whole, 2)),
        "reduce_scatter": (lambda: world.reduce_scatter(late(2 * n)), np.full(2, total)),
        "ireduce_scatter": (lambda: world.ireduce_scatter(late(2 * n)).wait(), np.full(2, total)),
        "all_to_all": (lambda: world.all_to_all(late(2 * n)), np.repeat(whole, 2)),
        "iall_to_all": (lambda: world.iall_to_all(late(2 * n)).wait(), np.repeat(whole, 2)),
        "broadcast": (lambda: world.broadcast(late(6), n - 1), np.full(6, n)),
        "shift": (lambda: world.shift(late(6)), np.full(6, left + 1)),
        "send": (lambda: one_way(world.send, world.recv), np.full(6, first)),
        "isend": (lambda: one_way(lambda x, to: world.isend(x, to).wait(), world.irecv), np.full(6, first)),
    }
    with going(world, cupy, way), cupy.cuda.Stream(non_blocking=True):
        for name, (call, truth) in calls.items():
            got = call()
            if name in ("all_gather", "all_to_all", "iall_reduce", "isend"):
                world.barrier()  # of threads: others go on before whoever has done the work for all waits for it
            got *= 2.0
            np.testing.assert_array_equal(got.get(), 2.0 * truth, err_msg=name)


def training_has_the_bits_of_the_host(world: World, cupy: Any, way: str) -> None:
    """Two steps, the gradients in flight in buckets meanwhile, summed in rank order; a device that is late."""
    level, deterministic = kernels.level(), world.deterministic
    kernels.select("numpy")
    world.set_deterministic()
    how: dict[str, Any] = {"steps": 2, "bucket_bytes": 4096, "tp": 1 + (world.size == 4)}
    with going(world, cupy, way):
        mine = train(world, 2, xp=cupy, **how)
    theirs = train(world, 2, xp=np, **how)
    for kind, tensors in theirs.items():
        for name, array in tensors.items():
            assert mine[kind][name].tobytes() == array.tobytes(), (kind, name)
    kernels.select(level)
    world.set_deterministic(deterministic)


HEAVY = (
    "a_large_message_arrives messages_above_the_limit_are_cut_and_change_nothing"
    " a_sum_is_cut_into_slices_of_any_lengths slices_above_the_limit_are_cut_and_change_nothing"
    " sums_of_a_few_elements_are_in_order_when_they_are_cut slices_of_any_lengths_are_joined"
    " sums_longer_than_a_segment_are_in_order every_verb_carries_every_size"
).split()
LIGHT = [name for name in OF_THE_DOOR if name not in HEAVY]
