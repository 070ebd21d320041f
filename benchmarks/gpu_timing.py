"""Time on a GPU: of the device between two points of a stream, of the host without its waits, and of each kernel.

The host only puts work on the stream and goes on, so its clock says nothing of the device's.  `device_ms` has the
device stamp the stream before and after; `ahead` first gives it something long to do, so that the host is always ahead
and no gap between launches counts; `waits` finds how long the host stood still; `by_kernel` stamps each kernel.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpitrain import backend, kernels
from mpitrain.kernels import reference


class Waits:
    """Seconds that the host has stood still for the device."""

    seconds = 0.0
    times = 0


@contextmanager
def waits(xp: Any) -> Iterator[Waits]:
    """Count how long the host waits in `backend.to_host`, which is where a step waits for the device."""
    found, own = Waits(), backend.to_host

    def to_host(array: Any) -> Any:
        if isinstance(array, xp.ndarray):
            began = time.perf_counter()
            xp.cuda.get_current_stream().synchronize()
            found.seconds += time.perf_counter() - began
            found.times += 1
        return own(array)

    modules = [m for m in list(sys.modules.values()) if getattr(m, "to_host", None) is own]
    for module in modules:
        module.to_host = to_host  # type: ignore[attr-defined]
    try:
        yield found
    finally:
        for module in modules:
            module.to_host = own  # type: ignore[attr-defined]


class CupyClock:
    """Stamps on CuPy's current stream, and something for the device to do meanwhile."""

    def __init__(self, xp: Any, width: int = 4096) -> None:
        self._xp = xp
        self._a = xp.full((width, width), 1.0 / width, np.float32)
        self._c = xp.empty((width, width), np.float32)

    def stamp(self) -> Any:
        event = self._xp.cuda.Event()
        event.record()
        return event

    def between(self, first: Any, last: Any) -> float:
        """Milliseconds; waits for the second."""
        last.synchronize()
        return float(self._xp.cuda.get_elapsed_time(first, last))

    def keep_busy(self, times: int) -> None:
        for _ in range(times):
            self._xp.matmul(self._a, self._a, out=self._c)

    def wait(self) -> None:
        self._xp.cuda.get_current_stream().synchronize()


class TorchClock:
    """The same of PyTorch; on the CPU, where its logic is tried, stamps are times of the host."""

    def __init__(self, torch: Any, device: str, width: int = 4096) -> None:
        self._torch, self._cuda = torch, device == "cuda"
        self._a = torch.full((width, width), 1.0 / width, device=device)

    def stamp(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, last: Any) -> float:
        if not self._cuda:
            return 1e3 * float(last - first)
        last.synchronize()
        return float(first.elapsed_time(last))

    def keep_busy(self, times: int) -> None:
        for _ in range(times):
            self._torch.mm(self._a, self._a)

    def wait(self) -> None:
        if self._cuda:
            self._torch.cuda.synchronize()


def device_ms(clock: Any, work: Callable[[], Any], busy: int) -> float:
    """Milliseconds of the device for some work, with the host ahead of it."""
    clock.keep_busy(busy)
    first = clock.stamp()
    work()
    return float(clock.between(first, clock.stamp()))


def repeated_ms(clock: Any, work: Callable[[], Any], rounds: int = 5, least: float = 4.0) -> float:
    """Milliseconds of the device for one call of some work: the median of rounds of several calls each."""
    for _ in range(3):
        work()
    once = max(1e-3, device_ms(clock, work, 1))
    times = min(50, max(1, round(least / once)))
    found = [device_ms(clock, lambda: [work() for _ in range(times)], 1) / times for _ in range(rounds)]
    return float(np.median(found))


@contextmanager
def by_kernel(clock: Any) -> Iterator[Callable[[], dict[str, tuple[float, int]]]]:
    """Stamp every call of a kernel of the library in the block.

    Yields:
        What gives, after the block, milliseconds of the device and calls by name; a kernel that calls another counts
        that one's time as its own.
    """
    stamps: list[tuple[str, Any, Any]] = []
    inside = False

    def stamped(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal inside
            if inside:
                return kernel(*args, **named)
            inside = True
            first = clock.stamp()
            try:
                return kernel(*args, **named)
            finally:
                stamps.append((name, first, clock.stamp()))
                inside = False

        return call

    own = {name: getattr(kernels, name) for name in reference.__all__}
    for name, kernel in own.items():
        setattr(kernels, name, stamped(name, kernel))

    def found() -> dict[str, tuple[float, int]]:
        table: dict[str, tuple[float, int]] = {}
        for name, first, last in stamps:
            ms, calls = table.get(name, (0.0, 0))
            table[name] = ms + clock.between(first, last), calls + 1
        return dict(sorted(table.items(), key=lambda item: -item[1][0]))

    try:
        yield found
    finally:
        for name, kernel in own.items():
            setattr(kernels, name, kernel)
