"""The one thread of a rank that moves bytes to and from a store while the rank computes.

It never touches MPI, HDF5 or the library's events: its jobs copy memory, or call `os.preadv` and `os.pwritev`, which
leave Python's lock alone.

    reads first       whoever waits, waits for a read; a write is in nobody's way
    what is written   is read after it: a read that asks for a range which is still to be written has those writes done
                      before it, and they are done in order
    what is read      is written after it: when the thread comes to a write, no read is left

So a range may be asked for and written again without a thought about who is faster.  What a job raises is raised in the
rank's own thread, by its next call.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpitrain.events import LISTENERS, Event, tell

READ, WRITE = "read", "write"
KEPT_COPIES = 100_000  # that nobody has listened to


class Copy(NamedTuple):
    """What a job moved, in seconds of `time.perf_counter`."""

    kind: str
    name: str
    nbytes: int
    start: float
    stop: float


@dataclass
class Moved:
    """What was moved so far.

    read, written: bytes; busy: seconds in which the thread moved them; waited: seconds in which the rank waited.
    """

    read: int = 0
    written: int = 0
    busy: float = 0.0
    waited: float = 0.0

    def since(self, before: Moved) -> Moved:
        """What came after an earlier copy of this."""
        return Moved(
            self.read - before.read,
            self.written - before.written,
            self.busy - before.busy,
            self.waited - before.waited,
        )


class Job:
    """Bytes to move.

    Args:
        kind: READ or WRITE.
        name: of what they are, for whoever looks.
        nbytes: how many.
        work: moves them.
        after: writes that must come before; only of a read.
    """

    __slots__ = ("after", "done", "kind", "name", "nbytes", "work")

    def __init__(self, kind: str, name: str, nbytes: int, work: Callable[[], None], after: Sequence[Job] = ()) -> None:
        self.kind = kind
        self.name = name
        self.nbytes = nbytes
        self.work: Callable[[], None] | None = work
        self.after = tuple(after)
        self.done = False


class IoThread:
    """The thread, and the jobs that wait for it.

    Args:
        name: of the thread, for whoever looks at stacks.

    Attributes:
        moved: bytes and seconds so far.
    """

    def __init__(self, name: str = "input and output") -> None:
        self.moved = Moved()
        self._news = threading.Condition()
        self._reads: deque[Job] = deque()
        self._writes: deque[Job] = deque()
        self._running: Job | None = None
        self._error: BaseException | None = None
        self._closing = False
        self._copies: deque[Copy] = deque(maxlen=KEPT_COPIES)
        # A copy of the context: where ranks are threads, the thread belongs to the rank that starts it.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._live,), name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Job:
        """Have a job done."""
        self._raise()
        self._tell()
        with self._news:
            (self._reads if job.kind == READ else self._writes).append(job)
            self._news.notify_all()
        return job

    def wait(self, job: Job) -> None:
        """Return when a job is done.

        Raises:
            BaseException: what this job, or one before it, raised.
        """
        if not job.done:
            began = time.perf_counter()
            with self._news:
                while not job.done and self._error is None:
                    self._news.wait()
            self.moved.waited += time.perf_counter() - began
        self._raise()
        self._tell()

    def flush(self) -> None:
        """Return when all jobs are done; raises as `wait`."""
        with self._news:
            while (self._reads or self._writes or self._running) and self._error is None:
                self._news.wait()
        self._raise()
        self._tell()

    def close(self) -> None:
        """Leave what is still to be done undone, and end the thread."""
        with self._news:
            self._closing = True
            self._reads.clear()
            self._writes.clear()
            self._news.notify_all()
        self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _tell(self) -> None:
        """Tell the rank's listeners what was moved since the last time: in its own thread, as all events are."""
        listeners = LISTENERS.get()
        while self._copies:
            copy = self._copies.popleft()
            if listeners:
                tell(listeners, Event("copy", "end", copy.name, copy._asdict()))

    # -- the thread's own ---------------------------------------------------------------------------------------------

    def _live(self) -> None:
        while True:
            with self._news:
                while not (self._reads or self._writes or self._closing):
                    self._news.wait()
                if self._closing:
                    return
                job = self._running = self._next()
            error = self._do(job)
            del job  # the arrays that it held are the rank's to free
            with self._news:
                self._running = None
                self._error = error
                self._news.notify_all()
            if error is not None:
                return

    def _next(self) -> Job:
        """The job whose turn it is."""
        if not self._reads:
            return self._writes.popleft()
        if any(not write.done for write in self._reads[0].after):
            return self._writes.popleft()  # in order: the one that is asked for comes
        return self._reads.popleft()

    def _do(self, job: Job) -> BaseException | None:
        work, job.work = job.work, None
        assert work is not None
        start = time.perf_counter()
        try:
            work()
        except BaseException as error:
            return error
        stop = time.perf_counter()
        self.moved.busy += stop - start
        if job.kind == READ:
            self.moved.read += job.nbytes
        else:
            self.moved.written += job.nbytes
        self._copies.append(Copy(job.kind, job.name, job.nbytes, start, stop))
        job.done = True
        return None
