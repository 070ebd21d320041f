"""Where the bytes of a store lie: in memory of the host, or in a file.

A medium has named regions of bytes, and copies between them and arrays.  It is called by the I/O thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpitrain.backend import Array
from mpitrain.errors import StoreError
from mpitrain.memory.store_file import StoreFile

GIB = 2**30


class Region(NamedTuple):
    """A vector that lives in a store.

    name: path-like, as `optimizer/first_moment`; elements: how many; dtype: of them.
    """

    name: str
    elements: int
    dtype: Any

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.elements * int(np.dtype(self.dtype).itemsize)


class Medium(Protocol):
    """Named regions of bytes."""

    def read(self, region: str, offset: int, into: Array) -> None:
        """Fill a vector of bytes (NumPy, uint8) from a region."""

    def write(self, region: str, offset: int, data: Array) -> None:
        """Copy a vector of bytes into a region."""

    def close(self) -> None:
        """Give everything back."""


class HostMemory:
    """Regions in the memory of the host; not the memory that an array on a device takes.

    Args:
        regions: sized now; pages are the operating system's until they are written.
        xp: of the device that copies from and to it by itself, for which it is page-locked; numpy: none does.
    """

    def __init__(self, regions: Sequence[Region], xp: Any = np) -> None:
        self._memory = {region.name: _zeros(region.nbytes, xp) for region in regions}

    def read(self, region: str, offset: int, into: Array) -> None:
        into[...] = self._memory[region][offset : offset + into.size]

    def write(self, region: str, offset: int, data: Array) -> None:
        self._memory[region][offset : offset + data.size] = data

    def view(self, region: str, offset: int, size: int) -> Array:
        """The bytes themselves."""
        return self._memory[region][offset : offset + size]

    def close(self) -> None:
        self._memory.clear()


def _zeros(nbytes: int, xp: Any) -> Array:
    if xp is np:
        return np.zeros(nbytes, np.uint8)  # from the operating system, when they are first touched
    # Not from CuPy's pool of such memory: it takes the next power of two, which may be twice as much.
    memory = xp.cuda.PinnedMemoryPointer(xp.cuda.PinnedMemory(max(nbytes, 1)), 0)
    array = np.frombuffer(memory, np.uint8, nbytes)
    array[...] = 0
    return array


class File:
    """Regions in a file of this rank (`store_file`).

    Args:
        folder: where.
        regions: sized now: the disk has room for all of them, or there is no store.
        rank: in the file's name.
    """

    def __init__(self, folder: str | os.PathLike[str], regions: Sequence[Region], rank: int) -> None:
        self._file = StoreFile(Path(folder), [(r.name, r.elements, r.dtype) for r in regions], rank)
        self.path = self._file.path

    def read(self, region: str, offset: int, into: Array) -> None:
        try:
            self._file.read(region, offset, memoryview(into))
        except OSError as error:
            raise self._refused(error) from error

    def write(self, region: str, offset: int, data: Array) -> None:
        try:
            self._file.write(region, offset, memoryview(data))
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> StoreError:
        return StoreError(
            f"{self.path}, to which this run offloads, cannot be used any more: {error.strerror}.\n"
            "Checkpoints are whole: mend the disk or take another --offload-to, and go on with --resume latest."
        )

    def close(self) -> None:
        self._file.close()
