"""Copies of pages in the run folder: how ranks of other hosts see them, in the report of a hang.

A flight board is the memory of one host.  So where there are several, and a run folder that they share, each rank
writes a copy of its page there every 2 seconds: RUN/board/rank-00003.page, 8 bytes of its clock and the page.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import NamedTuple

from mpitrain.comm.page import PAGE, Page

COPY_SECONDS = 2.0
SILENCE = 4 * COPY_SECONDS
"""Seconds without a new copy after which a rank gives no sign of life."""


class Copy(NamedTuple):
    """A page as it was.

    Attributes:
        page: of another host's rank.
        clock: of that host when it was copied, in ns.
        age: seconds since then, by the clock of the file system.
    """

    page: Page
    clock: int
    age: float


class Copies:
    """The copies of one rank and of those that it cannot see otherwise."""

    def __init__(self, rank: int) -> None:
        """Nothing is written before `write`."""
        self._rank = rank
        self._next = 0.0

    def write(self, run_folder: str, page: Page, *, now: bool = False) -> None:
        """Copy this rank's page, if it is time; `now`: it is."""
        if not now and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + COPY_SECONDS
        folder = os.path.join(run_folder, "board")
        data = time.monotonic_ns().to_bytes(8, "little") + bytes(page.memory)
        with contextlib.suppress(OSError):  # a full disk must not end a training that goes well: a report will lack us
            os.makedirs(folder, mode=0o700, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(_path(run_folder, self._rank), flags, 0o600)
            try:
                os.pwrite(fd, data, 0)
            finally:
                os.close(fd)

    def read(self, run_folder: str, ranks: list[int]) -> dict[int, Copy]:
        """The copies of these ranks, of those that have one; after `write`, so that ages are right."""
        found: dict[int, Copy] = {}
        own = self._changed(run_folder, self._rank)
        for rank in ranks:
            try:
                with open(_path(run_folder, rank), "rb", opener=_open) as file:
                    changed, data = os.fstat(file.fileno()).st_mtime, bytearray(file.read(PAGE + 9))
                if len(data) == PAGE + 8:
                    page = Page(memoryview(data)[8:])
                    page.current(), page.calls(), page.counts(), page.trail  # whether it is a page at all
                    age = 0.0 if own is None else max(0.0, own - changed)
                    found[rank] = Copy(page, int.from_bytes(data[:8], "little"), age)
            except (OSError, ValueError, IndexError):  # not there, or not a page
                continue
        return found

    def _changed(self, run_folder: str, rank: int) -> float | None:
        try:
            return os.stat(_path(run_folder, rank)).st_mtime
        except OSError:
            return None

    def remove(self, run_folder: str) -> None:
        """Take this rank's copy away; the last one takes the folder along."""
        with contextlib.suppress(OSError):
            os.unlink(_path(run_folder, self._rank))
            os.rmdir(os.path.join(run_folder, "board"))


def _path(run_folder: str, rank: int) -> str:
    return os.path.join(run_folder, "board", f"rank-{rank:05d}.page")


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
