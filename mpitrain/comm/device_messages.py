"""How arrays of devices travel; settled once, when a job starts.

    staged    through page-locked memory of the host (staging.py), by any MPI, and between threads
    mpi       MPI is given memory of the device itself
    nccl      NCCL moves them, and adds them up (nccl.py), between processes with a device each
    auto      mpi where it has been proved to work, else staged

An MPI that takes no device memory does not refuse it: it crashes.  One that was built to take it may still fail, or
hang, with the drivers, cards and settings of a host; and one that does not wait for the device sends what was there
before.  So it is asked first (cuda_aware.py), and then has to pass a probe.  What is not proved is not used.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mpitrain.comm.cuda_aware import takes_device_memory
from mpitrain.comm.mpi_transport import MpiTransport
from mpitrain.comm.nccl import agree, connect
from mpitrain.comm.threads import LocalTransport
from mpitrain.comm.transport import Pending, Transport
from mpitrain.comm.world import World
from mpitrain.device import Device
from mpitrain.errors import CommError, DeviceError
from mpitrain.recording.outside import heard

STAGED = "through page-locked memory of the host"
PROBE_SECONDS = 20.0  # the first message of device memory loads libraries and opens devices to each other
STUCK_SECONDS = 60.0  # after which a call of MPI that does not even return is given up, and the job with it
COUNTS = 64, 1 << 18  # elements: a message that goes at once, and one that the receiver has to ask for
BUSY_ELEMENTS, BUSY_ROUNDS = 1 << 22, 200  # what a device is busy with when the messages begin: some milliseconds


def use_device_messages(world: World, choice: str, device: Device) -> str:
    """Settle how arrays of devices travel in this world.  Collective, before any group of its ranks is made.

    Args:
        world: all ranks.
        choice: one of `config.DEVICE_MESSAGES`.
        device: of this rank.

    Returns:
        How, for people; `world.device_messages` from here on.  "" where there is nothing to settle: arrays of the host,
        or one rank.

    Raises:
        DeviceError: what is asked for by its name does not work here.  On every rank.

    Cost: with an MPI that says it takes device memory a short probe, and what the library does before its first
    such message; else one small message.
    """
    if device.kind != "cpu" and world.size > 1:
        world.device_messages = _settled(world, choice, device)
    return world.device_messages


def _settled(world: World, choice: str, device: Device) -> str:
    transport = world.transport
    if choice == "staged":
        return STAGED
    # A replay asks nobody: it is told what the ranks have found, and all messages are answered whichever way they went.
    kind = heard("what carries messages", lambda: _kind(transport))
    if kind == "threads":
        if choice == "nccl":
            raise DeviceError(
                "--device-messages nccl is for ranks that are processes; here they are threads of one.\n"
                "  Start with mpirun or ./run_mpi.sh, or leave it at auto."
            )
        if device.ranks < world.size:
            return f"{STAGED}: the ranks have several devices"
        if os.environ.get("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "0") not in ("", "0"):
            return f"{STAGED}: every thread has a stream of its own"
        if isinstance(transport, LocalTransport):
            transport.takes_device = True
        return "as they are: the ranks are threads with one device"
    if kind != "mpi":
        return STAGED
    if choice == "nccl":
        library = agree(world, device)
        if isinstance(transport, MpiTransport):
            world.carry(connect(world, device))
        return f"as they are, by {library}"
    refusal = _refusal(world, choice, device)
    if not refusal:
        if isinstance(transport, MpiTransport):
            transport.take_device(device.use)
        return f"as they are, by {world.library}"
    if choice == "mpi":
        raise DeviceError(
            f"--device-messages mpi: {refusal}.\n"
            "  Take auto or staged: messages then go through the host.  docs/how-to/use-gpus.md says how to get an MPI"
            " that\n  takes memory of devices."
        )
    return f"{STAGED}: {refusal}"


def _kind(transport: Transport) -> str:
    if isinstance(transport, LocalTransport):
        return "threads"
    return "mpi" if isinstance(transport, MpiTransport) else "others"


def _refusal(world: World, choice: str, device: Device) -> str:
    """Why MPI is not to be given device memory, the same on all ranks; "" if it is."""
    said = world.exchange(heard("whether MPI takes memory of devices", _takes_device_memory))
    if False in said:
        return f"{world.library} says that it takes no memory of devices"
    if None in said and choice != "mpi":
        return f"{world.library} does not say whether it takes memory of devices (--device-messages mpi tries)"
    group = world.transport.group(tuple(range(world.size)), "the probe of device messages")
    if isinstance(group, MpiTransport):
        group.takes_device = True
    for probe in (_ring, _everybody):  # one after the other: who has seen one fail is missing in the next
        found = world.exchange(heard("what went wrong in a probe", partial(_failure, probe, group, device.xp)))
        failed = [f"the probe of {world.library} failed on rank {rank}: {why}" for rank, why in enumerate(found) if why]
        if failed:
            return failed[0]  # the group stays: messages in flight on it must meet no others
    group.close()
    return ""


def _takes_device_memory() -> bool | None:
    return takes_device_memory(sys.modules["mpi4py.MPI"].__file__ or "")


def _failure(probe: Callable[[Transport, Any], None], group: Transport, xp: Any) -> str:
    """What goes wrong on this rank; "": nothing."""
    stuck = threading.Timer(STUCK_SECONDS, _end_stuck)
    stuck.daemon = True
    stuck.start()
    try:
        probe(group, xp)
    except (CommError, RuntimeError, ValueError, TypeError, BufferError) as error:  # of mpi4py and CuPy, too
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    finally:
        stuck.cancel()
    return ""


def _ring(group: Transport, xp: Any) -> None:
    """Messages to the right, of what the device is still computing.

    Raises:
        CommError: something else arrives, or nothing in time.
    """
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    for count in COUNTS:
        came = xp.full(count, -1, np.float32)
        mine = _busy(xp, count, group.rank)
        _wait([group.irecv(came, left, 0), group.isend(mine, right, 0)])
        _compare(came, np.full(count, left, np.float32))


def _everybody(group: Transport, xp: Any) -> None:
    """The same from each rank to each, by a collective.

    Raises:
        CommError: something else arrives.
    """
    each, size = max(1, COUNTS[-1] // group.size), group.size
    came = xp.full(size * each, -1, np.float32)
    group.all_to_all(_busy(xp, size * each, group.rank), [each] * size, came, [each] * size)
    _compare(came, np.repeat(np.arange(size, dtype=np.float32), each))


def _busy(xp: Any, count: int, value: int) -> Any:
    """An array of this value, which the device takes a while to make."""
    work = xp.full(max(count, BUSY_ELEMENTS), value - BUSY_ROUNDS, np.float32)
    for _ in range(BUSY_ROUNDS):
        xp.add(work, 1, out=work)
    return work[:count]


def _compare(came: Any, truth: Any) -> None:
    wrong = int(np.count_nonzero(came.get() != truth))
    if wrong:
        raise CommError(f"of {truth.size} elements {wrong} arrived as others")


def _wait(messages: list[Pending]) -> None:
    """Until all are complete, or it is too late."""
    end = time.monotonic() + PROBE_SECONDS
    while not all([message.test() for message in messages]):
        if time.monotonic() > end:
            raise CommError(f"no answer within {PROBE_SECONDS:g} s")
        time.sleep(0.0005)


def _end_stuck() -> None:
    """A call of MPI does not return: nothing can be saved, but it can be said."""
    sys.stderr.write(
        f"DeviceError: MPI hangs with memory of devices, for {STUCK_SECONDS:g} s in one call.\n"
        "  Start again with --device-messages staged.\n"
    )
    sys.stderr.flush()
    os._exit(1)
