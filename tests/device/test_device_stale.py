"""Nothing is read too early (CASES.md C82), and if a wait were forgotten, a device that runs late would show it.

Each line that makes somebody wait is taken out, and stale numbers must turn up; with all of them there must be none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strict_stream import Stream, asynchronous

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_device_messages as checks
import checks_gpu_streams as streams

from mpitrain.comm import staging, threads
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.memory import device_copies

WIDTH = 2  # of what keeps the device busy; here it runs as late as it may, whatever it has to do
Patch = pytest.MonkeyPatch


class Heedless(Stream):
    """A stream whose events and ends nobody waits for."""

    def wait_event(self, event: Any) -> None:
        pass


class Unwaited(Stream):
    def synchronize(self) -> None:
        pass


def offloaded(cupy: Any, where: str) -> int:
    return streams.offloaded(cupy, 12, WIDTH, where)


def sent(cupy: Any, way: str) -> int:
    """Each rank computes on a stream of its own, which nothing ties to the others'."""

    def main() -> int:
        with cupy.cuda.Stream(non_blocking=True), checks.going(world(), cupy, way):
            return streams.rounds_of_messages(world(), cupy, 14, WIDTH)

    return sum(LocalWorld(2).run(main))


def with_stream(kind: type[Stream]) -> Callable[[Patch], None]:
    """The store's copies on another kind of stream."""

    def plant(patch: Patch) -> None:
        make = device_copies.DeviceCopies.__init__

        def made(self: Any, *args: Any) -> None:
            make(self, *args)
            self._stream = kind(non_blocking=True)

        patch.setattr(device_copies.DeviceCopies, "__init__", made)

    return plant


def without_settling(patch: Patch) -> None:
    patch.setattr(threads, "settle", lambda *arrays: None)


def without_events_of_buffers(patch: Patch) -> None:
    patch.setattr(staging._Buffer, "is_free", lambda buffer: True)


def without_waiting_for_the_copy(patch: Patch) -> None:
    """Page-locked memory is sent before the device has filled it."""

    def download(self: staging.Pinned, x: Any) -> Any:
        host = self.empty(x.shape, x.dtype)
        self._cupy.ascontiguousarray(x).get(out=host, blocking=False)
        return host

    patch.setattr(staging.Pinned, "download", download)


FORGOTTEN: dict[str, tuple[Callable[[Patch], None], Callable[[Any], int]]] = {
    "offload does not wait for the rank": (with_stream(Heedless), lambda cupy: offloaded(cupy, "host")),
    "offload does not wait for its copies": (with_stream(Unwaited), lambda cupy: offloaded(cupy, "host")),
    "messages as they are do not wait": (without_settling, lambda cupy: sent(cupy, "mpi")),
    "messages are staged before they are there": (without_waiting_for_the_copy, lambda cupy: sent(cupy, "staged")),
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_wait_that_is_forgotten_shows(cuda_kernels: Any, name: str, monkeypatch: Patch) -> None:
    plant, count = FORGOTTEN[name]
    plant(monkeypatch)
    with asynchronous():
        assert count(cuda_kernels) > 0


def test_a_buffer_that_is_handed_out_too_early_shows(cupy: Any, monkeypatch: Patch) -> None:
    def uploads() -> bool:
        pinned, made = staging.Pinned(cupy), []
        for value in (1.0, 2.0):
            host = pinned.empty((1000,), np.float64)
            host[...] = value
            made.append(pinned.upload(host))
            del host
        return all((x.get() == value).all() for x, value in zip(made, (1.0, 2.0), strict=True))

    with asynchronous():
        assert uploads()
        without_events_of_buffers(monkeypatch)
        assert not uploads()


def test_with_all_waits_nothing_is_stale(cuda_kernels: Any, tmp_path: Path) -> None:
    with asynchronous():
        assert offloaded(cuda_kernels, "host") == 0
        assert offloaded(cuda_kernels, f"hdf5:{tmp_path}") == 0
        assert sent(cuda_kernels, "mpi") == sent(cuda_kernels, "staged") == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_stale_whatever_runs_first(cuda_kernels: Any, seed: int, tmp_path: Path) -> None:
    with asynchronous(seed):
        for where in ("host", f"hdf5:{tmp_path}"):
            assert streams.offloaded(cuda_kernels, 200, WIDTH, where) == 0
        assert sent(cuda_kernels, "mpi") == sent(cuda_kernels, "staged") == 0
