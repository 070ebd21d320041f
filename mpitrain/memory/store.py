"""A store: vectors that live somewhere else than in the memory where one computes.

    store = open_store("hdf5:/scratch", [Region("optimizer/first_moment", 10**6, np.float32)], ...)
    store.prefetch(name, 0, 1000)          begin to bring them back
    m = store.get(name, 0, 1000)           they are here
    store.put(name, 0, m)                  written behind; the array is the store's until then

Bytes move in the rank's I/O thread, while the rank computes.  Where nothing is prefetched a `get` waits: what is
fetched when, and what is put when, is the caller's to say, and a function of the settings alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.errors import ConfigError
from mpitrain.memory.device_copies import DeviceCopies
from mpitrain.memory.io_thread import READ, WRITE, IoThread, Job, Moved
from mpitrain.memory.media import File, HostMemory, Medium, Region
from mpitrain.memory.resident import Resident

__all__ = ["MemoryStore", "Region", "Resident", "Store", "open_store"]

Spans = Sequence[tuple[int, int]]
"""Ranges of elements: start and stop of each."""

HOST, HDF5, DEVICE = "host", "hdf5", "device"


class Store(Protocol):
    """Named vectors that live elsewhere; of one rank."""

    def put(self, region: str, start: int, array: Array) -> None:
        """Write an array, as a vector, from an element of a region on.

        It is written behind: the array must not be changed any more, until a `flush` or a `get` of the same elements.
        """

    def put_each(self, region: str, parts: Sequence[tuple[int, Array]]) -> None:
        """Write several arrays, each from an element on, in one go; they do not overlap."""

    def prefetch(self, region: str, start: int, stop: int, out: Array | None = None) -> None:
        """Begin to read elements, for a `get` of exactly these.

        Args:
            region: name.
            start, stop: elements.
            out: a vector of as many elements into which they are read; it is the store's until `get` returns it.
        """

    def get(self, region: str, start: int, stop: int, out: Array | None = None) -> Array:
        """Elements of a region as a vector; what was put before is what comes."""

    def prefetch_each(self, region: str, spans: Spans) -> None:
        """Begin to read several ranges in one go, for a `get_each` of exactly these."""

    def get_each(self, region: str, spans: Spans) -> list[Array]:
        """Several ranges of elements, each as a vector of its own."""

    def room(self, elements: int, dtype: Any) -> Array:
        """A new array where one computes, as `get` gives them."""

    def flush(self) -> None:
        """Return when all that was put is written."""

    def close(self) -> None:
        """Give everything back; nothing can be read any more."""

    @property
    def moved(self) -> Moved:
        """Bytes and seconds so far."""


class Moves(Protocol):
    """Makes the work of jobs."""

    def out(self, region: str, pieces: Sequence[tuple[int, Array]]) -> Callable[[], None]:
        """What copies vectors of bytes into a region, each from a byte on."""

    def back(self, region: str, pieces: Sequence[tuple[int, Array]]) -> Callable[[], None]:
        """What fills vectors of bytes from a region, each from a byte on."""


class Plain:
    """Between arrays of the host and a medium."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium

    def out(self, region: str, pieces: Sequence[tuple[int, Array]]) -> Callable[[], None]:
        def work() -> None:
            for offset, data in pieces:
                self._medium.write(region, offset, data)

        return work

    def back(self, region: str, pieces: Sequence[tuple[int, Array]]) -> Callable[[], None]:
        def work() -> None:
            for offset, into in pieces:
                self._medium.read(region, offset, into)

        return work


class _Fetch(NamedTuple):
    """A read that was asked for: ranges, job, the arrays that it fills."""

    spans: tuple[tuple[int, int], ...]
    job: Job
    arrays: list[Array]


class _Behind(NamedTuple):
    """A write that may not be done yet."""

    spans: tuple[tuple[int, int], ...]
    job: Job


class MemoryStore:
    """A store whose bytes lie in a medium (host memory, a file).

    Args:
        regions: all of them, from the start.
        medium: where they lie; its regions begin with zeros.
        io: the rank's thread.
        like: an array of the kind that it gives.
        pending: bytes that may wait to be written; a `put` beyond them waits for earlier ones.

    Attributes:
        regions: by name.
    """

    def __init__(
        self, regions: Sequence[Region], medium: Medium, io: IoThread, like: Array, pending: int = 2**26
    ) -> None:
        self.regions = {region.name: region for region in regions}
        assert len(self.regions) == len(regions), "two regions of one name"
        self._medium = medium
        self._io = io
        self._xp = array_module(like)
        self._moves: Moves = Plain(medium) if self._xp is np else DeviceCopies(self._xp, medium)
        self._pending = pending
        self._fetches: dict[str, list[_Fetch]] = {name: [] for name in self.regions}
        self._behind: dict[str, list[_Behind]] = {name: [] for name in self.regions}
        self._queue: list[Job] = []  # of all writes, the oldest first

    @property
    def moved(self) -> Moved:
        return self._io.moved

    def put(self, region: str, start: int, array: Array) -> None:
        self.put_each(region, [(start, array)])

    def put_each(self, region: str, parts: Sequence[tuple[int, Array]]) -> None:
        vectors = [(start, array.reshape(-1)) for start, array in parts if array.size]
        if not vectors:
            return
        spans = [(start, start + vector.size) for start, vector in vectors]
        for (start, stop), (_, vector) in zip(spans, vectors, strict=True):
            self._check(region, start, stop, vector)
        for fetch in [f for f in self._fetches[region] if _overlap(f, spans)]:
            self._io.wait(fetch.job)  # whoever gets these elements later shall not be given what was there before
            self._fetches[region].remove(fetch)
        pieces = [(start * vector.itemsize, vector.view(np.uint8)) for start, vector in vectors]
        nbytes = sum(data.nbytes for _, data in pieces)
        self._make_room(nbytes)
        job = Job(WRITE, region, nbytes, self._moves.out(region, pieces))
        self._forget_done(region)
        self._behind[region].append(_Behind(tuple(spans), job))
        self._queue.append(job)
        self._io.submit(job)

    def prefetch(self, region: str, start: int, stop: int, out: Array | None = None) -> None:
        if stop > start:
            self._begin(region, ((start, stop),), out)

    def get(self, region: str, start: int, stop: int, out: Array | None = None) -> Array:
        if stop <= start:
            return self._xp.empty(0, self.regions[region].dtype) if out is None else out
        (array,) = self._end(region, ((start, stop),), out)
        if out is not None and out is not array:
            out[...] = array
            return out
        return array

    def prefetch_each(self, region: str, spans: Spans) -> None:
        if spans:
            self._begin(region, tuple(spans))

    def get_each(self, region: str, spans: Spans) -> list[Array]:
        return self._end(region, tuple(spans)) if spans else []

    def _begin(self, region: str, spans: tuple[tuple[int, int], ...], out: Array | None = None) -> _Fetch:
        """The read of these ranges, begun if it was not."""
        for fetch in self._fetches[region]:
            if fetch.spans == spans:
                return fetch
        dtype = self.regions[region].dtype
        arrays = [self._xp.empty(stop - start, dtype) for start, stop in spans] if out is None else [out]
        for (start, stop), array in zip(spans, arrays, strict=True):
            self._check(region, start, stop, array)
        self._forget_done(region)
        after = [write.job for write in self._behind[region] if _overlap(write, spans)]
        pieces = [(start * a.itemsize, a.view(np.uint8)) for (start, _), a in zip(spans, arrays, strict=True)]
        job = Job(READ, region, sum(array.nbytes for array in arrays), self._moves.back(region, pieces), after)
        self._io.submit(job)
        self._fetches[region].append(_Fetch(spans, job, arrays))
        return self._fetches[region][-1]

    def _end(self, region: str, spans: tuple[tuple[int, int], ...], out: Array | None = None) -> list[Array]:
        fetch = self._begin(region, spans, out)
        self._fetches[region].remove(fetch)
        self._io.wait(fetch.job)
        return fetch.arrays

    def room(self, elements: int, dtype: Any) -> Array:
        return self._xp.empty(elements, dtype)

    def flush(self) -> None:
        self._io.flush()
        self._queue.clear()

    def close(self) -> None:
        """The thread is the rank's and ends here too."""
        self._io.close()
        self._medium.close()

    def _make_room(self, nbytes: int) -> None:
        """Wait until so many more bytes may wait to be written."""
        self._queue = [job for job in self._queue if not job.done]
        waiting = sum(job.nbytes for job in self._queue)
        while self._queue and waiting + nbytes > self._pending:
            oldest = self._queue.pop(0)
            self._io.wait(oldest)
            waiting -= oldest.nbytes

    def _forget_done(self, region: str) -> None:
        self._behind[region] = [write for write in self._behind[region] if not write.job.done]

    def _check(self, region: str, start: int, stop: int, vector: Array) -> None:
        found = self.regions[region]
        assert 0 <= start <= stop <= found.elements, (found, start, stop)
        assert (vector.shape, vector.dtype) == ((stop - start,), found.dtype), (found, vector.shape, vector.dtype)


def open_store(
    where: str, regions: Sequence[Region], *, like: Array, rank: int = 0, pending: int = 2**26
) -> MemoryStore | Resident:
    """Make a store.

    Args:
        where: `device`, `host`, or `hdf5:DIR`.
        regions: all of them; they begin with zeros.
        like: an array of the kind that is put and got.
        rank: in names of files.
        pending: bytes that may wait to be written.

    Raises:
        ConfigError: `where` is none of these.
        StoreError: the folder cannot be used, or has too little room.
    """
    kind, folder = kind_of(where)
    if kind == DEVICE:
        return Resident(regions, like)
    medium: Medium
    if kind == HOST:
        medium = HostMemory(regions, array_module(like))
    else:
        medium = File(Path(folder), regions, rank)
    return MemoryStore(regions, medium, IoThread(f"store of rank {rank}"), like, pending)


def kind_of(where: str) -> tuple[str, str]:
    """`host` or `hdf5:DIR` as kind and folder ('' where there is none).

    Raises:
        ConfigError: it is neither.
    """
    kind, colon, folder = where.partition(":")
    if kind in (HOST, DEVICE) and not colon:
        return kind, ""
    if kind == HDF5 and folder:
        return kind, folder
    raise ConfigError(f"--offload-to {where}: must be host, or hdf5:DIR with a folder on a disk of this host.")


def _overlap(moving: _Fetch | _Behind, spans: Spans) -> bool:
    return any(start < other and begin < stop for start, stop in moving.spans for begin, other in spans)
