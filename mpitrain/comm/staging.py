"""Between a device and the host: page-locked buffers for messages, and when each may be used again.

    x on the device  -> (C order, where it has another) -> page-locked buffer -> the transport
    the transport    -> page-locked buffer -> the result on the device

A transport that knows no devices is given the buffers.  So each array crosses once each way, and never by way of
ordinary memory, from which a driver would copy it a second time.

A buffer is an ordinary NumPy array for whoever holds it.  It comes back by itself when the last view of it is gone:
when the message is complete, and no listener, recorder or request keeps its array.  What it holds may still be on its
way to the device then; so it is handed out again only after the event that stands behind that copy.
"""

from __future__ import annotations

import weakref
from math import prod
from typing import Any

import numpy as np

from mpitrain.backend import address, array_module
from mpitrain.comm.transport import Array

LEAST = 4096  # bytes of the smallest buffer
MOST_WAITING = 4  # buffers of one size whose copies are under way, before the oldest is waited for


class Pinned:
    """The page-locked buffers of one rank.

    Args:
        cupy: the array module of the device.

    Attributes:
        held: bytes of all buffers, idle and in use.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._idle: dict[int, list[_Buffer]] = {}
        self._lent: dict[int, _Buffer] = {}  # by the address at which it begins
        self.held = 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An uninitialised C-contiguous array in a buffer, which comes back when the array and its views are gone."""
        dtype = np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        if not nbytes:
            return np.empty(shape, dtype)
        buffer = self._take(_rounded(nbytes))
        whole = np.frombuffer(buffer.memory, np.uint8, nbytes)
        start = address(whole)

        def back(_: object) -> None:
            del self._lent[start]
            self._idle.setdefault(buffer.size, []).append(buffer)

        self._lent[start] = buffer
        buffer.lent = weakref.ref(whole, back)
        return whole.view(dtype).reshape(shape)

    def download(self, x: Any) -> Array:
        """A device array's values in a buffer, C-contiguous; waits until they are there."""
        x = x if x.flags.c_contiguous else self._cupy.ascontiguousarray(x)
        host = self.empty(x.shape, x.dtype)
        if host.size:
            x.get(out=host)
        return host

    def upload(self, host: Array, out: Any = None) -> Any:
        """A host array's values on the device, in `out` if given; the copy may still be under way.

        Args:
            host: C-contiguous.  Of a buffer nobody may write it any more; other memory has been read on return.
            out: a device array of that shape and dtype.
        """
        straight = out is not None and out.flags.c_contiguous
        into = out if straight else self._cupy.empty(host.shape, host.dtype)
        if host.size:
            stream = self._cupy.cuda.get_current_stream()
            into.set(host, stream)
            buffer = self._lent.get(address(host))
            if buffer is None:
                stream.synchronize()
            else:
                buffer.copied(self._cupy, stream)
        if out is None:
            return into
        if not straight:
            out[...] = into
        return out

    def _take(self, size: int) -> _Buffer:
        idle = self._idle.get(size, [])
        for at, buffer in enumerate(idle):
            if buffer.is_free():
                del idle[at]
                return buffer
        if len(idle) >= MOST_WAITING:
            idle[0].wait()
            return idle.pop(0)
        self.held += size
        return _Buffer(self._cupy, size)


class _Buffer:
    """One piece of page-locked memory."""

    __slots__ = ("_copy", "_is_copying", "lent", "memory", "size")

    def __init__(self, cupy: Any, size: int) -> None:
        # Not from CuPy's pool of such memory: it gives out the next power of two, and gives it away again as soon as
        # nobody on the host holds it, while a copy out of it may be under way.
        self.memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(size), 0)
        self.size = size
        self.lent: object = None  # tells when nobody holds it any more
        self._copy: Any = None  # the event behind the last copy out of it
        self._is_copying = False

    def copied(self, cupy: Any, stream: Any) -> None:
        """A copy out of it has been put on a stream."""
        if self._copy is None:
            self._copy = cupy.cuda.Event(disable_timing=True)
        self._copy.record(stream)
        self._is_copying = True

    def is_free(self) -> bool:
        self._is_copying = self._is_copying and not self._copy.done
        return not self._is_copying

    def wait(self) -> None:
        self._copy.synchronize()
        self._is_copying = False


def settle(*arrays: Any) -> None:
    """Before somebody who knows no streams sees arrays: wait until the device has done what they wait for.

    It is not enough for arrays that are read.  Memory that shall be written may have belonged to another array, which
    a kernel still reads: CuPy's pool hands it out as soon as nobody on the host holds it.
    """
    for array in arrays:
        if array is not None and type(array) is not np.ndarray:
            array_module(array).cuda.get_current_stream().synchronize()
            return


def _rounded(nbytes: int) -> int:
    """A size of which there are few: sizes of messages that change from step to step share buffers."""
    quarter = max(LEAST, 1 << max(0, (nbytes - 1).bit_length() - 1)) // 4
    return max(LEAST, -(-nbytes // quarter) * quarter)
