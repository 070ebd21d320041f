"""The file of a rank's store: an HDF5 file whose datasets are written past HDF5.

    start    sweep what killed runs have left; make the file, one contiguous dataset a region; have the disk reserve all
    run      os.preadv, os.pwritev at the places of the datasets: no lock of HDF5's, and Python's is left alone
    end      the file goes

h5py makes the file and closes it before the first byte is written, in the rank's own thread.  Whatever the file then
holds, any HDF5 tool shows it: names, lengths, types.

A file belongs to the process that holds its lock, which goes with the process however that ends.  So who starts may
remove what nobody holds.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import secrets
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.datasets import lay_out
from mpitrain.errors import StoreError

PREFIX, SUFFIX = "mpitrain-store-", ".h5"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)  # of file systems that know none
_GIB = 2**30


class StoreFile:
    """A file of this process alone.

    Args:
        folder: where; it is made if it is not there.
        regions: name, elements, dtype of each; the disk reserves room for all of them now.
        rank: in the file's name.

    Raises:
        StoreError: the folder cannot be used, or has too little room.
    """

    def __init__(self, folder: Path, regions: Sequence[tuple[str, int, Any]], rank: int) -> None:
        nbytes = sum(elements * np.dtype(dtype).itemsize for _, elements, dtype in regions)
        folder = folder.expanduser()  # no shell does it behind a colon
        made: Path | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sweep(folder)
            made, self._descriptor = _claim(folder, rank)
            self._offsets = _lay_out(made, regions)
            _reserve(self._descriptor)
        except (OSError, RuntimeError, ValueError) as error:  # HDF5 has all three for what the disk refuses
            if made is not None:
                _remove(made, self._descriptor)
            raise _refused(folder, nbytes, rank, error) from error
        self.path = made
        self._end = weakref.finalize(self, _remove, made, self._descriptor)  # also at exit

    def read(self, region: str, offset: int, into: memoryview) -> None:
        """Fill a buffer of bytes."""
        at = self._offsets[region] + offset
        while into.nbytes:
            count = os.preadv(self._descriptor, [into], at)
            if not count:
                raise OSError(errno.EIO, "the file is shorter than it was")
            into, at = into[count:], at + count

    def write(self, region: str, offset: int, data: memoryview) -> None:
        """Write a buffer of bytes."""
        at = self._offsets[region] + offset
        while data.nbytes:
            count = os.pwritev(self._descriptor, [data], at)
            data, at = data[count:], at + count

    def close(self) -> None:
        """Remove the file."""
        self._end()


def sweep(folder: Path) -> list[Path]:
    """Remove the store files whose process is gone.

    Returns:
        What was removed.
    """
    removed = []
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # another rank was faster, or it is somebody else's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except OSError:
            pass  # its process is alive
        finally:
            os.close(descriptor)
    return removed


def _claim(folder: Path, rank: int) -> tuple[Path, int]:
    """A new file, and its lock in this process."""
    while True:
        path = folder / f"{PREFIX}rank-{rank:05}-{secrets.token_hex(4)}{SUFFIX}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                return path, descriptor
        except FileNotFoundError:
            pass  # somebody's sweep came between
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return path, descriptor
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                os.close(descriptor)
                raise
        os.close(descriptor)


def _lay_out(path: Path, regions: Sequence[tuple[str, int, Any]]) -> dict[str, int]:
    """Make the datasets; the place of each in the file."""
    import h5py

    with h5py.File(path, "w", locking=False) as file:  # the lock is ours already
        return lay_out(file, [(name, (elements,), dtype) for name, elements, dtype in regions])


def _reserve(descriptor: int) -> None:
    """Have the disk keep room for the whole file; HDF5 has only given it its length."""
    size = os.fstat(descriptor).st_size
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that reserves nothing
            raise


def _refused(folder: Path, nbytes: int, rank: int, error: Exception) -> StoreError:
    number = error.errno if isinstance(error, OSError) else None
    why = error.strerror or error if isinstance(error, OSError) else error
    if number == errno.EEXIST:
        why = "it is no folder"
    who = f"--offload-to hdf5:{folder}: rank {rank} on {platform.node()}"
    if number not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StoreError(f"{who} cannot make its file there: {why}.")
    try:
        free = f", where {shutil.disk_usage(folder).free / _GIB:.2f} GiB are free"
    except OSError:
        free = ""
    return StoreError(
        f"{who} needs {nbytes / _GIB:.2f} GiB there{free}: {why}.\n"
        "Choose another folder, offload less, or take more ranks of --tp, --pp or --dp with --zero."
    )


def _remove(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)
    os.close(descriptor)
