"""The files of a recording that hold values: HDF5 files of one dataset of bytes, written and read past HDF5.

A file is laid out with room for so many bytes, which the disk reserves; values are then written one after the other to
their places.  Files grow from one to the next, so that a small recording is small and a large one has few; the last is
cut to what is in it when the recording ends.  Where bytes begin stands in the index, so a reader needs no HDF5: it
reads bytes of a file of a name that it makes itself, within the length of that file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain import disk
from mpitrain.datasets import lay_out
from mpitrain.errors import RecordingError
from mpitrain.recording.lines import Segment, Value, dtype_named

FIRST, MOST = 1 << 20, 1 << 26
"""Bytes of the first file of values and of the largest, unless one value is larger."""
DATASET = "bytes"


def file_of(folder: Path, rank: int, number: int) -> Path:
    """The file of a segment."""
    return folder / f"rank-{rank:05}-{number:03}.h5"


class ValueWriter:
    """Writes the values of a rank.

    Args:
        folder: of the recording.
        rank: whose.
        begun: told of each new file, before anything is written into it.

    Attributes:
        nbytes: written so far.

    Raises (all methods): OSError: the disk refuses, or has no room.
    """

    def __init__(self, folder: Path, rank: int, begun: Callable[[Segment], None]) -> None:
        self.nbytes = 0
        self._folder, self._rank, self._begun = folder, rank, begun
        self._segment = Segment(-1, 0, 0)
        self._used = 0
        self._file: int | None = None

    def write(self, array: Any) -> Value:
        """Write an array of the host; where it lies."""
        array = np.asarray(array, order="C")  # not ascontiguousarray: that gives a scalar a dim
        data = memoryview(array.reshape(-1).view(np.uint8)) if array.size else memoryview(b"")
        if self._used + data.nbytes > self._segment.nbytes:
            self._next(data.nbytes)
        offset, crc = self._used, zlib.crc32(data)
        assert self._file is not None or not data.nbytes
        at = self._segment.begins + offset
        while data.nbytes:
            count = os.pwrite(self._file or 0, data, at)
            data, at = data[count:], at + count
        self._used += array.nbytes
        self.nbytes += array.nbytes
        segment = self._segment.number if array.nbytes else -1
        return Value(array.dtype.name, array.shape, segment, offset, crc)

    def close(self) -> None:
        """Cut the last file to what is in it."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            if self._used < self._segment.nbytes:
                self._cut(file)
        finally:
            os.close(file)

    def _next(self, nbytes: int) -> None:
        self.close()
        size = max(nbytes, min(MOST, max(FIRST, 2 * self._segment.nbytes)))
        number = self._segment.number + 1
        path = file_of(self._folder, self._rank, number)
        self._file, begins = _made(path, size)
        self._segment, self._used = Segment(number, begins, size), 0
        self._begun(self._segment)

    def _cut(self, file: int) -> None:
        """A file of the right size in the place of the last one; what is in it is copied."""
        path = file_of(self._folder, self._rank, self._segment.number)
        draft = path.with_suffix(".tmp")
        copy, begins = _made(draft, max(1, self._used))
        try:
            done = 0
            while begins == self._segment.begins and done < self._used:
                block = os.pread(file, min(1 << 22, self._used - done), begins + done)
                os.pwrite(copy, block, begins + done)
                done += len(block)
            if done == self._used:
                disk.rename(draft, path)
        finally:
            os.close(copy)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)


def _made(path: Path, nbytes: int) -> tuple[int, int]:
    """A new file with room for so many bytes that the disk has reserved; it, and where they begin."""
    import h5py

    file = disk.create(path)
    try:
        with h5py.File(path, "w", locking=False) as laid_out:
            begins = lay_out(laid_out, [(DATASET, (nbytes,), np.uint8)])[DATASET]
        os.posix_fallocate(file, 0, begins + nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that reserves nothing
            os.close(file)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            raise
    except RuntimeError as error:  # HDF5's word for what a disk refuses
        os.close(file)
        raise OSError(errno.EIO, str(error).splitlines()[0]) from error
    return file, begins


class ValueReader:
    """Reads the values of a rank.

    Args:
        folder: of the recording.
        rank: whose.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._begins: dict[int, int] = {}
        self._open: tuple[int, int, int] | None = None  # segment, file, its length

    def segment(self, segment: Segment) -> None:
        """A file that the index tells of."""
        self._begins[segment.number] = segment.begins

    def read(self, value: Value) -> Any:
        """The array.

        Memory is taken when it is known that the file is long enough.

        Raises:
            RecordingError: its bytes are not there, or not what was written.
        """
        if not value.nbytes:
            return np.empty(value.shape, dtype_named(value.dtype))
        path = file_of(self._folder, self._rank, value.segment)
        if value.digest or value.segment not in self._begins:
            raise RecordingError(f"{path}: no values are kept there.")
        file, length = self._opened(value.segment, path)
        start = self._begins[value.segment] + value.offset
        if start + value.nbytes > length:
            raise RecordingError(f"{path} ends before a value of {value.nbytes} bytes at {start}: it was cut.")
        raw = np.empty(value.nbytes, np.uint8)
        try:
            disk.read(file, path, raw, start)
        except OSError as error:
            raise RecordingError(f"{path} cannot be read: {error.strerror}.") from error
        if zlib.crc32(raw.data) != value.crc:
            raise RecordingError(f"{path} is damaged: {value.nbytes} bytes at {start} are not what was written.")
        return raw.view(dtype_named(value.dtype)).reshape(value.shape)

    def close(self) -> None:
        """Close the file."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def _opened(self, number: int, path: Path) -> tuple[int, int]:
        if self._open is None or self._open[0] != number:
            self.close()
            try:
                file = disk.open_to_read(path)
            except OSError as error:
                raise RecordingError(f"{path} cannot be read: {error.strerror}.") from error
            self._open = number, file, os.fstat(file).st_size
        return self._open[1:]
