"""The disk, as everything that must survive a crash uses it.

Each operation is told to whoever listens (events of kind "disk"), before it is done and after: a test counts them,
kills the process at one, or raises there the error that a disk would have raised.  Operations of a background save are
told in its own thread.

    make_folder create write sync sync_folder rename remove_tree open read
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpitrain.events import LISTENERS, Event, tell

_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)  # of file systems that sync the names in a folder by themselves


def make_folder(path: Path) -> None:
    """Make a folder for its owner alone; those above it as the user's umask has them, their names on the disk."""
    missing = [above for above in path.parents if not above.exists()]
    with _told("make_folder", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    for above in missing:
        with contextlib.suppress(PermissionError):  # of a folder that may be written but not read
            sync_folder(above.parent)


def create(path: Path) -> int:
    """A new file, open to write and to read; a file descriptor.  It is an error if the name exists, also as a link."""
    with _told("create", path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def write(file: int, path: Path, data: Any, offset: int) -> None:
    """Write all bytes of a buffer."""
    view = memoryview(data).cast("B")
    with _told("write", path, view.nbytes):
        while view.nbytes:
            count = os.pwrite(file, view, offset)
            view, offset = view[count:], offset + count


def begin_sync(file: int, offset: int, nbytes: int) -> None:
    """Let the system begin to move part of a file to the disk; a hint, nobody waits for it, and no event tells of it.

    `sync` then has less to wait for.  Linux starts to write what is dirty when it is told that nobody needs it.
    """
    os.posix_fadvise(file, offset, nbytes, os.POSIX_FADV_DONTNEED)


def sync(file: int, path: Path) -> None:
    """Have a file on the disk."""
    with _told("sync", path):
        os.fsync(file)


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk, where the file system can promise that."""
    with _told("sync_folder", path):
        folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise
        finally:
            os.close(folder)


def rename(old: Path, new: Path) -> None:
    """Give a file or folder another name, in one step."""
    with _told("rename", old):
        os.rename(old, new)


def remove_tree(path: Path) -> None:
    """Remove a folder and what is in it, as far as it can be removed."""
    with _told("remove_tree", path):
        shutil.rmtree(path, ignore_errors=True)


def replace(path: Path, data: bytes) -> None:
    """Put a small file in the place of whatever has the name, whole or not at all; for its owner alone.

    A link that has the name, or that of the draft, goes; what it leads to is not touched.
    """
    draft = path.with_name(f"{path.name}.tmp")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(draft)  # of a process that was killed
    file = create(draft)
    try:
        write(file, draft, data, 0)
        sync(file, draft)  # else the name may come to the disk before what it names
        rename(draft, path)
    except OSError:
        os.unlink(draft)
        raise
    finally:
        os.close(file)


def open_to_read(path: Path) -> int:
    """A regular file, open to read; a file descriptor.

    Raises:
        OSError: it cannot be opened, or is a link, a device, a pipe: none of these is followed or waited for.
    """
    with _told("open", path):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(errno.EINVAL, "not a regular file")
        return file


def read(file: int, path: Path, into: Any, offset: int) -> None:
    """Fill a buffer of bytes.

    Raises:
        OSError: it cannot be read, or ends before the buffer is full (EIO).
    """
    view = memoryview(into).cast("B")
    with _told("read", path, view.nbytes):
        while view.nbytes:
            count = os.preadv(file, [view], offset)
            if not count:
                raise OSError(errno.EIO, "the file is shorter than it was")
            view, offset = view[count:], offset + count


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """`open_to_read` for a block."""
    file = open_to_read(path)
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def _told(name: str, path: Path, nbytes: int = 0) -> Iterator[None]:
    listeners = LISTENERS.get()
    if listeners:
        info = {"path": os.fspath(path), "nbytes": nbytes}
        tell(listeners, Event("disk", "begin", name, info))
        yield
        tell(listeners, Event("disk", "end", name, info))
    else:
        yield
