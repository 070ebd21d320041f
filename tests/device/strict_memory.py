"""Memory of the stand-in: page-locked memory of the host, pointers into arrays, and CuPy's pools as far as they count.

Page-locked memory goes back to its pool when nobody holds it any more, whether or not a copy still reads it: from then
on it is somebody else's, 0xFF here.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
import weakref
from typing import Any

import numpy as np
from strict_stream import current

ROUNDED = 512  # CuPy hands out memory in multiples of it


def bounds_of(values: np.ndarray) -> tuple[int, int]:
    """The address of the first byte that an array may touch, and the one behind the last."""
    low = high = values.__array_interface__["data"][0]
    if not values.size:
        return low, low
    for length, step in zip(values.shape, values.strides, strict=True):
        low += min(0, (length - 1) * step)
        high += max(0, (length - 1) * step)
    return low, high + values.itemsize


class PinnedMemory:
    """cupy.cuda.PinnedMemory: an allocation."""

    def __init__(self, size: int, flags: int = 0) -> None:
        storage = np.full(max(size, 1), 0xFF, np.uint8)
        self.size = size
        self.ptr = storage.ctypes.data
        pinned.add(self.ptr, storage)
        weakref.finalize(self, pinned.remove, self.ptr)


class _Pinned:
    """Where page-locked memory lies."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._starts: list[int] = []
        self._storage: dict[int, np.ndarray] = {}

    def add(self, start: int, storage: np.ndarray) -> None:
        with self._lock:
            bisect.insort(self._starts, start)
            self._storage[start] = storage

    def remove(self, start: int) -> None:
        with self._lock:
            self._starts.remove(start)
            self._storage.pop(start).fill(0xFF)

    def seen_by_copies(self, host: np.ndarray) -> np.ndarray | None:
        """The same elements, held by nobody: what a copy on a stream sees.  None: it is no page-locked memory."""
        low, high = bounds_of(host)
        with self._lock:
            at = bisect.bisect_right(self._starts, low) - 1
            storage = self._storage.get(self._starts[at]) if at >= 0 else None
        if storage is None or high > storage.ctypes.data + storage.nbytes:
            return None
        first = host.__array_interface__["data"][0] - storage.ctypes.data
        return np.ndarray(host.shape, host.dtype, storage, first, host.strides)


pinned = _Pinned()
_pointer_types: dict[int, Any] = {}


def PinnedMemoryPointer(mem: PinnedMemory, offset: int) -> Any:
    """cupy.cuda.PinnedMemoryPointer: it has the buffer protocol, which before Python 3.12 only such types have."""
    length = mem.size - offset
    kind = _pointer_types.get(length)
    if kind is None:
        members = {"_type_": ctypes.c_ubyte, "_length_": length, "size": lambda self: self._length_}
        kind = _pointer_types[length] = type("PinnedMemoryPointer", (ctypes.Array,), members)
    pointer = kind.from_address(mem.ptr + offset)
    pointer.mem, pointer.ptr = mem, mem.ptr + offset
    return pointer


def alloc_pinned_memory(size: int) -> Any:
    """From the pool, which has powers of two."""
    rounded = 1 << max(9, (size - 1).bit_length())
    return PinnedMemoryPointer(PinnedMemory(rounded), 0)


class Account:
    """How much memory of one device arrays hold, and have held at most."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.used = self.most = 0
        self.limit = 0

    def take(self, nbytes: int) -> int:
        rounded = -(-nbytes // ROUNDED) * ROUNDED
        with self.lock:
            if self.limit and self.used + rounded > self.limit:
                raise OutOfMemoryError(
                    f"Out of memory allocating {rounded:,} bytes (allocated so far: {self.used:,} bytes,"
                    f" limit set to: {self.limit:,} bytes)."
                )
            self.used += rounded
            self.most = max(self.most, self.used)
        return rounded

    def give(self, rounded: int) -> None:
        with self.lock:
            self.used -= rounded


accounts: dict[int, Account] = {}


def account(device: int) -> Account:
    return accounts.get(device) or accounts.setdefault(device, Account())


class OutOfMemoryError(MemoryError):
    """cupy.cuda.memory.OutOfMemoryError"""


class MemoryPool:
    """cupy.cuda.MemoryPool, of the current device: it gives nothing back before it is asked to."""

    def used_bytes(self) -> int:
        return account(current.device).used

    def total_bytes(self) -> int:
        return account(current.device).most

    def free_bytes(self) -> int:
        return self.total_bytes() - self.used_bytes()

    def free_all_blocks(self, stream: Any = None) -> None:
        found = account(current.device)
        with found.lock:
            found.most = found.used

    def get_limit(self) -> int:
        return account(current.device).limit

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        assert fraction is None, "the stand-in plays no fraction"
        account(current.device).limit = size or 0


class PinnedMemoryPool:
    """cupy.cuda.PinnedMemoryPool"""

    def n_free_blocks(self) -> int:
        return 0

    def free_all_blocks(self) -> None:
        pass


_pointed: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class MemoryPointer:
    """cupy.cuda.MemoryPointer: where an array's first element is."""

    def __init__(self, owner: Any, values: np.ndarray) -> None:
        self.mem = owner
        self.device_id = owner._device
        self.ptr = values.__array_interface__["data"][0]
        _pointed[owner._values.__array_interface__["data"][0]] = owner


class _Bytes:
    """What NumPy makes an array of, which keeps the memory."""

    def __init__(self, memory: np.ndarray, ptr: int, nbytes: int) -> None:
        self._memory = memory
        self.__array_interface__ = {"data": (ptr, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def memory_at(ptr: int, nbytes: int) -> np.ndarray:
    """The bytes of a live array of a device at an address that `x.data.ptr` gave.

    Raises:
        RuntimeError: they are not all in one array.
    """
    for owner in list(_pointed.values()):
        low, high = bounds_of(owner._values)
        if low <= ptr and ptr + nbytes <= high:
            return np.asarray(_Bytes(owner._values, ptr, nbytes))
    raise RuntimeError(f"cudaErrorIllegalAddress: {nbytes} bytes at {ptr:#x} are not memory of one live array")
