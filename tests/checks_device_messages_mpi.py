"""Messages of device arrays between real MPI ranks: checks_device_messages.py with the stand-in, and the probe.

The wheels of MPI take no memory of devices.  The stand-in's lies on the host, so they take it nevertheless, once the
library need not answer for itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("device")))  # where the stand-in is
import checks_device_messages as checks
from checks_gpu_streams import rounds_of_messages
from strict_cupy import installed
from strict_stream import asynchronous

from mpitrain.comm import device_messages, mpi_transport
from mpitrain.comm.device_messages import use_device_messages
from mpitrain.comm.world import World
from mpitrain.device import CPU, Device
from mpitrain.errors import DeviceError

WAYS = ("mpi", "staged")


def with_cupy(check: Callable[..., None], *args: Any) -> Callable[[World], None]:
    """The check with the stand-in."""

    def run(world: World) -> None:
        with installed() as cupy:
            check(world, cupy, *args)

    run.__name__ = "_".join([check.__name__, *(word for word in args if isinstance(word, str))])
    return run


def a_library_that_takes_none_is_given_none(world: World, cupy: Any) -> None:
    """It would die of it; so it is asked before."""
    device = Device("cuda", cupy)
    assert use_device_messages(world, "mpi", CPU) == ""
    assert use_device_messages(world, "staged", device) == device_messages.STAGED
    said = use_device_messages(world, "auto", device)
    assert said.startswith(f"{device_messages.STAGED}: {world.library} "), said
    assert said == world.device_messages
    assert not world.transport.takes_device
    refused = ""
    try:
        use_device_messages(world, "mpi", device)
    except DeviceError as error:
        refused = str(error)
    world.device_messages = ""
    assert refused.startswith(f"--device-messages mpi: {world.library} says that it takes no memory"), refused


def a_probe_that_passes_is_taken(world: World, cupy: Any) -> None:
    with asynchronous(), checks.going(world, cupy, "auto") as said:
        assert said == f"as they are, by {world.library}"
        assert world.group([*range(world.size)], "again").transport.takes_device


class Watched:
    """A communicator of MPI that refuses device arrays where an MPI may crash of them."""

    REFUSED = (
        "Allreduce Iallreduce Reduce_scatter Reduce_scatter_block Ireduce_scatter Ireduce_scatter_block"
        " Iallgather Iallgatherv Ialltoallv Ibcast"
    ).split()

    def __init__(self, comm: Any, kind: type) -> None:
        self._comm, self._kind = comm, kind

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._comm, name)

        def look(*args: Any) -> Any:
            buffers = [item for arg in args for item in (arg if isinstance(arg, list) else [arg])]
            assert not any(isinstance(item, self._kind) for item in buffers), f"{name} of device arrays"
            return call(*args)

        return look if name in self.REFUSED else call


def device_arrays_are_only_moved_by_mpi(world: World, cupy: Any) -> None:
    """Whatever the door is asked to add up, and whatever does not block."""
    transport: Any = world.transport
    with checks.going(world, cupy, "mpi"):
        comm, transport._comm = transport._comm, Watched(transport._comm, cupy.ndarray)
        try:
            for dtype in ("f4", "f8", "c8", "i8", "f2"):
                x = cupy.ones((world.size, 3), dtype)
                total = [world.all_reduce(x), world.iall_reduce(x).wait()]
                total += [world.reduce_scatter(x), world.ireduce_scatter(x).wait()]
                assert all((made == world.size).all() for made in total)
                world.iall_gather(x).wait()
                world.iall_to_all(x).wait()
            kept = cupy.zeros(world.size)
            transport.iall_to_all(cupy.ones(world.size), [1] * world.size, kept, [1] * world.size, own=False).wait()
            assert kept.tolist() == [float(rank != world.rank) for rank in range(world.size)]
        finally:
            transport._comm = comm


def late_arrays_are_waited_for(world: World, cupy: Any, way: str) -> None:
    """C82: a kernel still runs when its array is sent, and the next one is put behind what arrives."""
    with asynchronous():
        checks.every_verb_waits_for_the_device(world, cupy, way)
    with asynchronous(1), checks.going(world, cupy, way):
        assert rounds_of_messages(world, cupy, 21, width=2) == 0


def training_goes_well(world: World, cupy: Any, way: str) -> None:
    with asynchronous(2):
        checks.training_has_the_bits_of_the_host(world, cupy, way)


def a_probe_finds_stale_arrays(world: World, cupy: Any) -> None:
    """Of an MPI that sends what was there before."""
    _falls_back(world, cupy, "settle", lambda *arrays: None, "arrived as others")


def a_probe_that_is_refused_is_told(world: World, cupy: Any) -> None:
    """Of an MPI that raises an error on one rank: all say the same, and none goes on alone."""

    def refuse(*arrays: Any) -> None:
        if world.rank == 0 and any(isinstance(array, cupy.ndarray) for array in arrays):
            raise RuntimeError("cudaErrorInvalidValue: invalid argument\nmore")

    _falls_back(world, cupy, "settle", refuse, "cudaErrorInvalidValue: invalid argument")


def a_probe_without_an_answer_has_an_end(world: World, cupy: Any) -> None:
    """Of an MPI whose message never arrives: the last rank's does not even leave."""
    isend = mpi_transport.MpiTransport.isend

    class Never:
        def test(self) -> bool:
            return False

    def lost(self: Any, buf: Any, dest: int, tag: int) -> Any:
        is_last = isinstance(buf, cupy.ndarray) and self.rank == self.size - 1
        return Never() if is_last else isend(self, buf, dest, tag)

    mpi_transport.MpiTransport.isend = lost  # type: ignore[method-assign]
    try:
        _falls_back(world, cupy, "settle", mpi_transport.settle, "no answer within 0.3 s")
    finally:
        mpi_transport.MpiTransport.isend = isend  # type: ignore[method-assign]


def _falls_back(world: World, cupy: Any, name: str, value: Any, why: str) -> None:
    """The probe fails on all ranks, and messages go through the host."""
    before = getattr(mpi_transport, name)
    setattr(mpi_transport, name, value)
    try:
        with asynchronous(), checks.going(world, cupy, "auto", seconds=0.3) as said:
            setattr(mpi_transport, name, before)
            head = f"{device_messages.STAGED}: the probe of {world.library} failed on rank "
            assert said.startswith(head), said
            assert why in said, said
            assert world.exchange(said) == [said] * world.size
            assert (world.all_reduce(cupy.ones(3)).get() == world.size).all()
    finally:
        setattr(mpi_transport, name, before)


CHECKS = [
    with_cupy(a_library_that_takes_none_is_given_none),
    with_cupy(a_probe_that_passes_is_taken),
    with_cupy(device_arrays_are_only_moved_by_mpi),
    with_cupy(checks.of_the_door, "mpi", checks.LIGHT),
    *(with_cupy(late_arrays_are_waited_for, way) for way in WAYS),
    *(with_cupy(checks.arrays_stay_on_their_device, way) for way in WAYS),
    *(with_cupy(checks.calls_are_compared_and_arrays_watched, way) for way in WAYS),
    with_cupy(a_probe_finds_stale_arrays),
    with_cupy(a_probe_that_is_refused_is_told),
    with_cupy(a_probe_without_an_answer_has_an_end),
]
LAYOUTS = [with_cupy(training_goes_well, way) for way in WAYS]
ALL = [*(with_cupy(checks.of_the_door, way, [*checks.OF_THE_DOOR]) for way in WAYS), *LAYOUTS, *CHECKS[4:]]
