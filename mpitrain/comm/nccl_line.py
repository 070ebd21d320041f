"""NCCL from one rank to another: a communicator of two, whose stream a thread of its own serves.

The making of a communicator waits until the other end makes its own, and a send may wait for its receive.  In the
thread nothing else waits for them: the rank puts messages, and asks for events.
"""

from __future__ import annotations

import queue
import threading
import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from mpitrain.comm.transport import Mode, Transport
from mpitrain.device import Device
from mpitrain.errors import CommError

ENDING = 10.0  # seconds that a line's thread has to end


def bindings() -> Any:
    """`cupy.cuda.nccl`: CuPy does not import it by itself, and tells in a page what to do where NCCL does not load."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module("cupy.cuda.nccl")


def unique_id(nccl: Any) -> bytes:
    """A name for a communicator, 128 bytes; some versions of CuPy give them as numbers."""
    return bytes(byte % 256 for byte in nccl.get_unique_id())


def on_host(x: Any) -> bool:
    """Whether an array is the host's."""
    return isinstance(x, np.ndarray)


@dataclass
class Rank:
    """What all messages of a rank share.

    beneath: the transport of one group; device: of this rank; nccl: CuPy's bindings; mode: of the world; name: of the
    group's axis.
    """

    beneath: Transport
    device: Device
    nccl: Any
    mode: Mode
    name: str

    def mark(self, stream: Any = None) -> Any:
        """The event behind what a stream, without one the rank's, has been given."""
        cuda = self.device.xp.cuda
        event = cuda.Event(disable_timing=True)
        event.record(stream or cuda.get_current_stream())
        return event

    def follow(self, done: Any) -> None:
        """Have the rank's stream wait for an event; in checked mode the host, too, where a report names the call."""
        if self.mode.checked:
            done.synchronize()
        self.device.xp.cuda.get_current_stream().wait_event(done)


class Job:
    """One message at one end of a channel: a `Pending`.

    Args:
        rank: of this end.
        array: what is sent, or filled.
        ready: the event behind which it may be touched.
    """

    def __init__(self, rank: Rank, array: Any, ready: Any) -> None:
        self._rank, self.array, self.ready = rank, array, ready
        self.done: Any = None  # the event behind the message, once it is posted
        self.error: Exception | None = None  # why it is not
        self.posted = threading.Event()

    def test(self) -> bool:
        """True once the array is sent, or filled."""
        if not self.posted.is_set():
            return False
        self._check()
        return bool(self.done.done)

    def wait(self) -> None:
        """Have the rank's stream wait for it."""
        self.posted.wait()
        self._check()
        self._rank.follow(self.done)

    def _check(self) -> None:
        if self.error is not None:
            raise failed(self._rank, self.error)


def failed(rank: Rank, error: Exception) -> CommError:
    """What NCCL has said in the thread of a channel, told in the rank's own."""
    return CommError(f"a message from rank to rank on {rank.name}: {str(error).splitlines()[0]}")


class Line:
    """NCCL from one rank to another: the communicator, its stream, and the thread that serves them.

    Args:
        rank: of this end.
        identity: the name that both ends give the communicator.
        end: 0 sends, 1 receives.
    """

    def __init__(self, rank: Rank, identity: bytes, end: int) -> None:
        self._rank, self._identity, self._end = rank, identity, end
        self.error: Exception | None = None  # after which nothing moves any more
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="nccl", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """The next message."""
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread when all that was put is done."""
        self._jobs.put(None)
        self._thread.join(ENDING)

    def _serve(self) -> None:
        device = self._rank.device
        comm = stream = None
        while True:
            job = self._jobs.get()
            if job is None:
                break
            try:
                if self.error is None and comm is None:
                    device.use()
                    comm = self._rank.nccl.NcclCommunicator(2, self._identity, self._end)
                    stream = device.xp.cuda.Stream(non_blocking=True)
                if self.error is None:
                    self._move(comm, stream, job)
            except Exception as found:  # told to whoever waits for this message or a later one
                self.error = found
            job.error = self.error
            job.posted.set()
            del job  # nor its array kept until the next one comes
        if self.error is None and comm is not None and stream is not None:
            stream.synchronize()
            comm.destroy()

    def _move(self, comm: Any, stream: Any, job: Job) -> None:
        stream.wait_event(job.ready)
        move = comm.recv if self._end else comm.send
        move(job.array.data.ptr, job.array.nbytes, self._rank.nccl.NCCL_UINT8, 1 - self._end, stream.ptr)
        job.done = self._rank.mark(stream)
