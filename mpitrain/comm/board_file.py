"""The shared memory of the flight board: one file for the ranks of a host, which leaves no trace.

It has mode 0600 and a random name, and is unlinked as soon as all ranks have mapped it; so nothing is left behind,
however they end.  Each owner locks its page for life: whoever can lock it knows that the owner is dead.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
import struct
import tempfile
import threading
import time
from typing import NamedTuple

from mpitrain.comm.page import PAGE, Page, stable_hash

_CLAIMS = PAGE // 8 - 1
_FLOCK = "hhqqi4x"  # Linux's struct flock: type, whence, start, length, process


def _folders() -> tuple[str, str]:
    """Where boards are made: in memory, or else where temporary files go."""
    return "/dev/shm", tempfile.gettempdir()


class Process(NamedTuple):
    """What the kernel knows of the owner of a page.

    Attributes:
        number: its process id as this process sees it; 0: unknown.
        state: R runs, S sleeps, D waits for a disk, T is stopped, t is held by a debugger, Z is dead; "" unknown.
    """

    number: int
    state: str


class BoardFile:
    """The shared memory of the ranks of one host: `num_pages` pages, and one for claims."""

    def __init__(self, fd: int, path: str, num_pages: int) -> None:
        """Map an open file; see `create` and `attach`."""
        self.path = path
        self._fd = fd
        self._num_pages = num_pages
        self._map = mmap.mmap(fd, PAGE * (num_pages + 1))
        self._claim_lock = threading.Lock()

    @classmethod
    def create(cls, num_pages: int) -> BoardFile:
        """A new file in /dev/shm, or where temporary files go if there is no room."""
        size = PAGE * (num_pages + 1)
        for folder in _folders():
            path = f"{folder}/{_prefix()}{secrets.token_hex(12)}"
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError:
                continue
            try:
                os.posix_fallocate(fd, 0, size)  # a full memory must fail here, not at the first write
                return cls(fd, path, num_pages)
            except OSError:
                os.unlink(path)
                os.close(fd)
        raise OSError(f"no room for the flight board ({size} bytes) in {' or '.join(_folders())}")

    @classmethod
    def attach(cls, path: str, num_pages: int) -> BoardFile:
        """Map the file that another rank of this host and user created."""
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_size != PAGE * (num_pages + 1):
            os.close(fd)
            raise PermissionError(f"{path} is not the flight board of this job")
        return cls(fd, path, num_pages)

    @classmethod
    def private(cls) -> BoardFile:
        """A board of one page that no other rank sees."""
        fd = os.memfd_create("mpitrain-board", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE * 2)
        return cls(fd, "", 1)

    @property
    def identity(self) -> int:
        """The same number for all ranks that share this memory, another one for other files of this host."""
        info = os.fstat(self._fd)
        private = (os.getpid(), secrets.token_hex(8)) if not self.path else ()
        return stable_hash("board", self.path, info.st_dev, info.st_ino, private)

    def page(self, index: int) -> Page:
        """The page of the index-th rank of this host."""
        return Page(memoryview(self._map)[index * PAGE : (index + 1) * PAGE])

    def own(self, index: int) -> None:
        """Lock a page for the life of this process."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index * PAGE)

    def is_dead(self, index: int) -> bool:
        """True if the owner of another rank's page no longer exists."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index * PAGE)
        except OSError:
            return False
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, index * PAGE)
        return True

    def process(self, index: int) -> Process:
        """The owner of another rank's page."""
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, index * PAGE, 1, 0)
        try:
            number = struct.unpack(_FLOCK, fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))[-1]
            with open(f"/proc/{number}/stat", encoding="utf-8", errors="replace") as file:
                return Process(number, file.read().rpartition(") ")[2][:1])
        except (OSError, struct.error):  # not Linux, or a process that cannot be seen from here
            return Process(0, "")

    def claim(self, text: str) -> bool:
        """True for the first rank of this host that claims `text`, so that what all know is said once."""
        key = stable_hash("claim", text)
        at = self._num_pages * PAGE
        words = memoryview(self._map)[at : at + PAGE].cast("q")
        with self._claim_lock:  # a file lock parts processes, not threads
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, at)
            try:
                taken = words[0]
                if key in words[1 : 1 + taken].tolist():
                    return False
                if taken < _CLAIMS:
                    words[1 + taken] = key
                    words[0] = taken + 1
                return True
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, at)

    def unlink(self) -> None:
        """Take the name away; the memory lives as long as a rank maps it."""
        if self.path:
            os.unlink(self.path)


def sweep(min_age: float = 60.0) -> list[str]:
    """Remove boards of this user whose ranks all died between making and unlinking them; returns their paths."""
    removed = []
    for folder in _folders():
        try:
            names = [name for name in os.listdir(folder) if name.startswith(_prefix())]
        except OSError:
            continue
        for name in names:
            path = f"{folder}/{name}"
            try:
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                info = os.fstat(fd)
                if info.st_uid == os.geteuid() and time.time() - info.st_mtime >= min_age:
                    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while one rank lives
                    os.unlink(path)
                    removed.append(path)
            except OSError:
                pass
            finally:
                os.close(fd)
    return removed


def _prefix() -> str:
    return f"mpitrain-board-{os.geteuid()}-"
