"""Streams and events of the stand-in, and `asynchronous()`: work that runs as late as a device might run it.

Usually work is done when it is put on a stream.  Inside `asynchronous()` it waits in line until somebody waits for it:

    what comes out of it      is 0xFF bytes until then: NaN, -1
    what goes into it         is what is there when it runs: a page-locked buffer that was used again, memory that was
                              freed and is somebody else's, are what the work sees
    the order                 within a stream as it was put; between streams only what events say, and what CUDA says of
                              its default stream, which waits for all others but the non-blocking ones, and they for it

Whoever asks for a value waits as CuPy does: `get`, `float`, `synchronize` ... of one stream or event, no other.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

_LAUNCHES: ContextVar[Counter[str] | None] = ContextVar("launches", default=None)
_LOCK = threading.RLock()
_numbers = itertools.count()
_handles = itertools.count(0x5500_0000, 0x10)
_STREAMS: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def launches() -> Iterator[Counter[str]]:
    """Count by name what is put on streams in this block: kernels, CuPy's functions and ufuncs, products.

    A function of CuPy's counts once, though some launch several kernels; views and uninitialised arrays launch none.
    """
    counter: Counter[str] = Counter()
    token = _LAUNCHES.set(counter)
    try:
        yield counter
    finally:
        _LAUNCHES.reset(token)


def launched(name: str) -> None:
    """Note one launch."""
    counter = _LAUNCHES.get()
    if counter is not None:
        counter[name.rpartition(".")[2]] += 1


class Work:
    """Something that a stream does; `needs` is done before it; `is_shared`: with other ranks, for which it waits."""

    __slots__ = ("done", "is_shared", "lock", "needs", "number", "run")

    def __init__(self, run: Callable[[], None] | None, needs: list[Work], is_shared: bool = False) -> None:
        self.run, self.needs, self.done, self.is_shared = run, needs, False, is_shared
        self.number = next(_numbers)
        self.lock = threading.RLock()

    def finish(self) -> None:
        """Do it, after all that it needs and that is not done yet."""
        found = self.open()
        for number in sorted(found):  # what is needed was put first
            found[number]._do()

    def open(self) -> dict[int, Work]:
        """It and all that it needs, by number, as far as that is not done yet."""
        found: dict[int, Work] = {}
        rest = [self]
        while rest:
            work = rest.pop()
            if not work.done and work.number not in found:
                found[work.number] = work
                rest += work.needs
        return found

    def _do(self) -> None:
        with self.lock:
            if self.done:
                return
            run, self.run, self.needs = self.run, None, []
            try:
                if run is not None:
                    run()
            finally:
                self.done = True


_DONE = Work(None, [])
_DONE.done = True


class Line:
    """The work of one stream, in order; `is_tied`: to the default stream of its device."""

    __slots__ = ("device", "is_default", "is_tied", "last")

    def __init__(self, device: int, is_default: bool, is_tied: bool) -> None:
        self.device, self.is_default, self.is_tied = device, is_default, is_tied
        self.last = _DONE

    def finish(self) -> None:
        """All of it."""
        timeline.bury()
        self.last.finish()


class Timeline:
    """What is on the streams of all devices; there is one."""

    def __init__(self) -> None:
        self.is_late = False
        self.freed: deque[tuple[Line, Callable[[], None]]] = deque()  # what the death of arrays does on their streams
        self._chance: random.Random | None = None
        self._lines: dict[int, list[Line]] = {}

    def default(self, device: int) -> Line:
        """The default stream of a device."""
        with _LOCK:
            return self._lines.setdefault(device, [Line(device, True, True)])[0]

    def put(
        self, stream: Stream, run: Callable[[], None] | None, after: Work | None = None, is_shared: bool = False
    ) -> Work:
        """Work at the end of a stream."""
        if not self.is_late:
            if run is not None:
                run()
            return _DONE
        self.bury()
        with _LOCK:
            work = self._append(stream._on(), run, [after] if after is not None else [], is_shared)
            some = self._some() if self._chance is not None and self._chance.random() < 0.5 else None
        if some is not None:
            some.finish()
        return work

    def bury(self) -> None:
        """Put what the death of arrays does on their streams."""
        while self.freed:
            with contextlib.suppress(IndexError):
                line, run = self.freed.popleft()
                with _LOCK:
                    self._append(line, run, [])

    def _append(self, line: Line, run: Callable[[], None] | None, after: list[Work], is_shared: bool = False) -> Work:
        needs = [*after, line.last]
        self.default(line.device)
        lines = self._lines[line.device]
        if line not in lines:
            lines.append(line)
        if line.is_tied:
            needs += [x.last for x in lines if x.is_tied and x.is_default != line.is_default]
        line.last = Work(run, [work for work in needs if not work.done], is_shared)
        return line.last

    def _some(self) -> Work | None:
        """Of a stream by chance, the earliest work that is not done and needs nothing else first."""
        assert self._chance is not None
        waiting = [x.last for lines in self._lines.values() for x in lines if not x.last.done]
        if not waiting:
            return None
        work = self._chance.choice(waiting)
        while undone := [other for other in list(work.needs) if not other.done]:
            work = undone[0]
        return None if work.is_shared else work

    def finish_device(self, device: int) -> None:
        """All streams of a device."""
        for line in list(self._lines.get(device, ())):
            line.finish()

    def begin(self, chance: random.Random | None) -> None:
        assert not self.is_late, "it is asynchronous already"
        self.freed.clear()
        self.is_late, self._chance = True, chance

    def end(self) -> None:
        for device in list(self._lines):
            self.finish_device(device)
        self.is_late, self._chance = False, None
        for lines in self._lines.values():
            del lines[1:]


timeline = Timeline()


@contextlib.contextmanager
def asynchronous(seed: int | None = None) -> Iterator[None]:
    """Let the devices of this process run late, in all its threads.

    Args:
        seed: let some work run before anybody waits for it, by chance; None: nothing runs before it must.
    """
    timeline.begin(None if seed is None else random.Random(seed))
    try:
        yield
    finally:
        timeline.end()


class CUDARuntimeError(RuntimeError):
    """cupy.cuda.runtime.CUDARuntimeError"""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Machine:
    """What is installed: how many devices, of which compute capability, with how much memory; none: and no driver."""

    devices = 1
    capability = "90"
    memory = 80 << 30

    def check(self, device: int = 0) -> None:
        """Whether there is such a device.

        Raises:
            CUDARuntimeError: as CUDA says it.
        """
        if not self.devices:
            words = "CUDA driver version is insufficient for CUDA runtime version"
            raise CUDARuntimeError(35, f"cudaErrorInsufficientDriver: {words}")
        if not 0 <= device < self.devices:
            raise CUDARuntimeError(101, "cudaErrorInvalidDevice: invalid device ordinal")


machine = Machine()


class _Current(threading.local):
    """Of a thread: its device, and its stream on each."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}
        self.stack: list[tuple[int, Stream]] = []


current = _Current()


class Event:
    """cupy.cuda.Event"""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        if interprocess and not disable_timing:
            raise ValueError("Timing must be disabled for interprocess events")
        self.ptr = next(_handles)
        self._is_timed = not disable_timing
        self._work = _DONE
        self._time = 0.0
        self._asked = 0

    @property
    def done(self) -> bool:
        self._asked = _ask(self._work, self._asked)
        return self._work.done

    def record(self, stream: Stream | None = None) -> None:
        self._work = timeline.put(stream or get_current_stream(), self._note_time)
        self._asked = 0

    def _note_time(self) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        timeline.bury()
        self._work.finish()


def _ask(work: Work, asked: int) -> int:
    """The first question finds it not done; whoever asks again gets there, unless that depends on other ranks."""
    if not work.done and asked:
        timeline.bury()
        if not any(one.is_shared for one in work.open().values()):
            work.finish()
    return asked + 1


class Stream:
    """cupy.cuda.Stream"""

    null: Stream

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        assert not ptds, "the stand-in plays no per-thread default stream"
        self.ptr = 0 if null else next(_handles)
        self.device_id = -1 if null else current.device  # CuPy's default stream is one object for all devices
        self.is_non_blocking = non_blocking and not null
        self.priority = priority or 0
        self._asked = 0
        self._line = None if null else Line(current.device, False, not non_blocking)
        _STREAMS[self.ptr] = self

    def _on(self) -> Line:
        """Its work: of this thread's device, where it is the default stream."""
        return self._line or timeline.default(current.device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __enter__(self) -> Stream:
        self._check_device()
        current.stack.append((current.device, get_current_stream()))
        current.streams[current.device] = self
        return self

    def __exit__(self, *args: Any) -> None:
        device, before = current.stack.pop()
        current.streams[device] = before

    def use(self) -> Stream:
        self._check_device()
        current.streams[current.device] = self
        return self

    def _check_device(self) -> None:
        if self.device_id not in (-1, current.device):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with the current device"
                f" ({current.device})"
            )

    @property
    def done(self) -> bool:
        self._asked = _ask(self._on().last, self._asked)
        return self._on().last.done

    def synchronize(self) -> None:
        self._on().finish()

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        timeline.put(self, None, event._work)

    def launch_host_func(self, callback: Any, arg: Any) -> None:
        timeline.put(self, lambda: callback(arg))


Stream.null = Stream(null=True)


def stream_at(ptr: int) -> Stream:
    """The living stream of this handle."""
    if ptr not in _STREAMS:
        raise RuntimeError(f"cudaErrorInvalidResourceHandle: there is no stream {ptr:#x}")
    return _STREAMS[ptr]


def get_current_stream(device_id: int = -1) -> Stream:
    """This thread's stream on a device, its current one if none is named."""
    return current.streams.get(current.device if device_id < 0 else device_id, Stream.null)


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Milliseconds."""
    if not (start_event._is_timed and end_event._is_timed):
        raise RuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle (an event without timing)")
    if not (start_event._work.done and end_event._work.done):
        raise RuntimeError("cudaErrorNotReady: device not ready")
    return (end_event._time - start_event._time) * 1000
