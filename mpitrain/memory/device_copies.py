"""Copies between a device and the medium of a store, on a stream of their own.

The I/O thread copies; the rank goes on.  Three things keep the two apart:

    what is put      is copied after what the rank had started when it put it (an event)
    what is fetched  is written after what the rank had started when it made the array, whose memory may have been
                     another's (an event); whoever gets it has waited for the copy
    the stream       is the thread's own, so nothing that the rank starts waits for a copy

Host memory of a store is page-locked and copied from and to directly.  A file is reached over one page-locked buffer,
piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpitrain.backend import Array
from mpitrain.memory.media import HostMemory, Medium

PIECE = 2**23  # bytes of the buffer


class DeviceCopies:
    """Makes the work of jobs; CuPy's streams and events are called as CuPy calls them.

    Args:
        xp: the array module of the device.
        medium: of the store.
    """

    def __init__(self, xp: Any, medium: Medium) -> None:
        self._xp = xp
        self._medium = medium
        self._stream = xp.cuda.Stream(non_blocking=True)
        self._buffer: Array | None = None
        self._device = xp.cuda.Device().id

    def out(self, region: str, pieces: Sequence[tuple[int, Array]]) -> Callable[[], None]:
        """What copies bytes of the device into a region."""
        started = self._xp.cuda.get_current_stream().record()

        def work() -> None:
            with self._xp.cuda.Device(self._device):
                self._stream.wait_event(started)
                for offset, data in pieces:
                    for at, piece in self._pieces(region, offset, data.nbytes):
                        data[at : at + piece.size].get(stream=self._stream, out=piece)
                        self._stream.synchronize()
                        if not isinstance(self._medium, HostMemory):
                            self._medium.write(region, offset + at, piece)

        return work

    def back(self, region: str, pieces: Sequence[tuple[int, Array]]) -> Callable[[], None]:
        """What fills arrays of bytes on the device from a region."""
        started = self._xp.cuda.get_current_stream().record()

        def work() -> None:
            with self._xp.cuda.Device(self._device):
                self._stream.wait_event(started)
                for offset, into in pieces:
                    for at, piece in self._pieces(region, offset, into.nbytes):
                        if not isinstance(self._medium, HostMemory):
                            self._medium.read(region, offset + at, piece)
                        into[at : at + piece.size].set(piece, stream=self._stream)
                        self._stream.synchronize()

        return work

    def _pieces(self, region: str, offset: int, nbytes: int) -> Iterator[tuple[int, Array]]:
        """Page-locked memory of the host for each piece of a range: the region itself, or the buffer."""
        if isinstance(self._medium, HostMemory):
            yield 0, self._medium.view(region, offset, nbytes)
            return
        if self._buffer is None:
            memory = self._xp.cuda.alloc_pinned_memory(PIECE)
            self._buffer = np.frombuffer(memory, np.uint8, PIECE)
        for at in range(0, nbytes, PIECE):
            yield at, self._buffer[: min(PIECE, nbytes - at)]
