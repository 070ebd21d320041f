"""The files of one rank's trace: a ring of segments, of which the first and the newest are kept.

    rank-00003.000.trace    the first steps
    rank-00003.017.trace    ...
    rank-00003.023.trace    the newest ones

A segment is whole by itself (its head says whose it is, and strings are numbered anew), so that any other one may go.
Together they stay below the limit.  Bytes are handed to the system and never synced: a killed process loses nothing of
what was written, and no step waits for a disk.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from mpitrain import disk
from mpitrain.debug.trace.blocks import MAGIC, segment_name

SEGMENTS = 8
"""Of which the limit is made."""


class Ring:
    """Writes segments.

    Args:
        folder: exists.
        rank: in the world.
        limit: bytes of all segments together.
        head: the first block of a segment, of its number and of the spans that are in no file any more.

    Attributes:
        dropped: spans in segments that were removed.
        size: bytes of the segment that is written.
        room: bytes that a segment has for what comes after its head.

    Raises:
        OSError: by all methods: a disk that is full, or gone.
    """

    def __init__(self, folder: Path, rank: int, limit: int, head: Callable[[int, int], bytes]) -> None:
        self.dropped = 0
        self.size = 0
        self.room = limit // SEGMENTS
        self._folder, self._rank, self._head = folder, rank, head
        self._number = -1
        self._file: int | None = None
        self._kept: deque[tuple[int, int]] = deque()  # number and spans of segments that may go, the oldest first
        self._spans = 0  # of the segment that is written
        self.next()

    def next(self) -> None:
        """Begin the next segment; the oldest after the first goes, if there are too many."""
        self.close()
        if self._number > 0:
            self._kept.append((self._number, self._spans))
        if len(self._kept) > SEGMENTS - 2:  # with the first and the one that begins
            number, spans = self._kept.popleft()
            self.dropped += spans
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(number))
        self._number, self._spans, self.size = self._number + 1, 0, 0
        self._file = disk.create(self._path(self._number))
        self.write(MAGIC + self._head(self._number, self.dropped), 0)

    def write(self, data: bytes, spans: int) -> None:
        """Add whole blocks that hold so many spans."""
        assert self._file is not None
        try:
            disk.write(self._file, self._path(self._number), data, self.size)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size)  # what is there stays whole
            raise
        self.size += len(data)
        self._spans += spans

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _path(self, number: int) -> Path:
        return self._folder / segment_name(self._rank, number)
