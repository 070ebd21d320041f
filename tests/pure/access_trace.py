"""Which files somebody opened: the kernel's own notes (inotify), whichever process or library it was."""

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path

_OPENED = 0x20  # IN_OPEN
_FOLDER = 0x40000000  # IN_ISDIR
_CLOSED = 0x18  # IN_CLOSE; asked for because the kernel tells equal events that follow each other only once


@contextlib.contextmanager
def opened_in(folder: Path) -> Iterator[list[str]]:
    """Names of files in a folder that are opened within the block; the list is filled at its end."""
    libc = ctypes.CDLL(None, use_errno=True)
    notes = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    watch = libc.inotify_add_watch(notes, os.fsencode(folder), _OPENED | _CLOSED)
    assert notes >= 0 <= watch, os.strerror(ctypes.get_errno())
    names: list[str] = []
    try:
        yield names
        with contextlib.suppress(BlockingIOError):
            while data := os.read(notes, 1 << 16):
                while data:  # struct inotify_event: watch, mask, cookie, length of the name, name
                    _, mask, _, length = struct.unpack_from("iIII", data)
                    if mask & _OPENED and not mask & _FOLDER:  # somebody may list the folder
                        names.append(data[16 : 16 + length].rstrip(b"\0").decode())
                    data = data[16 + length :]
    finally:
        os.close(notes)
