"""When a run stops before its end, on purpose: somebody asks for it, or its time is up.

    SIGUSR1 to a rank      what Slurm sends before it takes a job's nodes away, and run_mpi.sh on TERM and INT
    --max-seconds          the time that the job has

Whichever rank it is, all of them agree at the end of a step (its own all-reduce carries the question), save, and leave
with `STOPPED_CODE`: a job script that sees it queues the job again.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType

STOPPED_CODE = 85
"""Exit code of a run that was asked to stop, has saved, and can go on with `--resume`."""


@dataclass
class Request:
    """Whether this process was asked to stop."""

    made: bool = False


_REQUEST: ContextVar[Request | None] = ContextVar("mpitrain.request_to_stop", default=None)


@contextmanager
def hear_signal() -> Iterator[Request]:
    """Take SIGUSR1 as the request to stop while the block runs; without this it would end the process.

    Only a main thread can.  Ranks that are threads of one process share the request of whoever started them.
    """
    shared = _REQUEST.get()
    if shared is not None or threading.current_thread() is not threading.main_thread():
        yield shared or Request()
        return
    request = Request()

    def asked(number: int, frame: FrameType | None) -> None:
        request.made = True

    before = signal.signal(signal.SIGUSR1, asked)
    token = _REQUEST.set(request)
    try:
        yield request
    finally:
        _REQUEST.reset(token)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL if before is None else before)


class Stop:
    """Whether this rank wants the run to stop.

    Args:
        request: of the process.
        limit: seconds that the run has; None: as long as it takes.
        began: when it began, by `time.perf_counter`.

    Attributes:
        reserve: seconds that the next step and a save take; the run stops so much before its limit.
    """

    def __init__(self, request: Request, limit: float | None, began: float) -> None:
        self._request, self._limit, self._began = request, limit, began
        self.reserve = 0.0

    @property
    def wanted(self) -> bool:
        """Now."""
        return self._request.made or self.is_late

    @property
    def is_late(self) -> bool:
        """Whether another step would be over the limit."""
        return self._limit is not None and time.perf_counter() - self._began + self.reserve >= self._limit
