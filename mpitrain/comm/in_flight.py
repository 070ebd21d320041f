"""Messages of MPI in flight: requests with the buffers that belong to them, and who drives them on.

mpi4py's module comes in as an argument (only mpi.py imports it).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mpitrain.errors import CommError


class MpiPending:
    """A request of MPI, with the buffers that belong to it."""

    __slots__ = ("_buffers", "_expected", "_flight", "_request", "_status")

    def __init__(self, flight: InFlight, request: Any, buffers: tuple[Any, ...], expected: int = -1) -> None:
        """`expected`: bytes that a receive must bring, -1 for other messages."""
        self._flight = flight
        self._request = request
        self._buffers = buffers
        self._expected = expected
        self._status = flight.mpi.Status() if expected >= 0 else None
        flight.add(self)

    def test(self) -> bool:
        if self._request is None:
            return True
        try:
            done = self._request.Test(self._status)
        except self._flight.mpi.Exception as error:
            raise self._failed(error) from None
        if done:
            self._completed()
        return bool(done)

    def wait(self) -> None:
        if self._request is None:
            return
        try:
            self._request.Wait(self._status)
        except self._flight.mpi.Exception as error:
            raise self._failed(error) from None
        self._completed()

    def _completed(self) -> None:
        self._request, self._buffers = None, ()
        self._flight.discard(self)
        if self._status is not None:
            check_size(self._flight.mpi, self._status, self._expected)

    def _failed(self, error: Exception) -> CommError:
        self._request, self._buffers = None, ()
        self._flight.discard(self)
        return comm_error("a message in flight", error)


class InFlight:
    """All messages in flight of this process.

    It keeps their buffers alive even if nobody keeps the request, and wakes the helper thread, if there is one.

    Attributes:
        use_device: makes the device whose memory MPI is given that of a thread; None: it is given none.
    """

    def __init__(self, mpi: ModuleType) -> None:
        self.mpi = mpi
        self._messages: set[MpiPending] = set()
        self._wake: threading.Event | None = None
        self._driver: threading.Thread | None = None
        self._stopped = False
        self._sweep_at = 256
        self.use_device: Callable[[], None] | None = None
        self._threads = threading.local()

    def add(self, message: MpiPending) -> None:
        messages = self._messages
        messages.add(message)
        if self._wake is not None:
            self._wake.set()
        if len(messages) >= self._sweep_at:  # requests that were dropped: nobody else will ever ask for them
            for old in list(messages):
                old.test()
            self._sweep_at = max(256, 2 * len(messages))

    def discard(self, message: MpiPending) -> None:
        self._messages.discard(message)

    def enter(self) -> None:
        """Of a thread beside the rank's own, before it calls MPI, which may move any message then."""
        if self.use_device is not None and not hasattr(self._threads, "has_device"):
            self.use_device()
            self._threads.has_device = True

    def drive(self, comm: Any, pause: float = 0.0005) -> None:
        """Start the helper thread: while a message is in flight it looks into MPI, which moves all of them."""
        wake = self._wake = threading.Event()

        def run() -> None:
            while not self._stopped:
                wake.wait()
                wake.clear()
                while self._messages and not self._stopped:
                    self.enter()
                    comm.Iprobe(self.mpi.ANY_SOURCE, self.mpi.ANY_TAG)
                    time.sleep(pause)

        self._driver = threading.Thread(target=run, name="mpitrain-progress", daemon=True)
        self._driver.start()

    def stop(self) -> None:
        """End the helper thread; before MPI is left."""
        self._stopped = True
        if self._wake is not None and self._driver is not None:
            self._wake.set()
            self._driver.join(timeout=2.0)


def check_size(mpi: ModuleType, status: Any, expected: int) -> None:
    """Refuse a message that was received with another number of bytes."""
    found = status.Get_count(mpi.BYTE)
    if found != expected:
        raise CommError(f"a message from rank {status.source} has {found} bytes; this rank expects {expected}")


def comm_error(what: str, error: Exception) -> CommError:
    """What MPI says about a failed call, as one line."""
    return CommError(f"{what}: MPI says: {str(error).splitlines()[0]}")
