"""Sums of what goes to a disk or comes from it, taken beside the one who moves it.

A SHA-256 takes as long as a fast disk, a CRC-32 less than half of that.  So SHA-256 has a thread of its own, and
hashing gives Python's lock back: the one who writes goes on, takes the CRC-32 himself, and waits at the end for what is
left.  A third thread would take a core from the slowest of them.  Who reads has the CRC-32 compared by a thread.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from hashlib import sha256
from queue import Queue
from typing import Any

AHEAD = 4
"""Blocks by which sums may be behind, where memory is used again."""
SMALL = 1 << 15  # bytes: to hand them over takes longer than to sum them


class Sums:
    """The sums of a file.

    Args:
        ahead: blocks by which they may be behind; None: any number, all in memory that stays as it is.
    """

    def __init__(self, ahead: int | None = AHEAD) -> None:
        self._sha = sha256()
        self._crcs: dict[str, list[int]] = {}
        self._line = _Line(lambda _, block: self._sha.update(block), ahead)

    def add(self, name: str, block: memoryview) -> None:
        """The next block of the file: of a slab, or of what is none (""), which has one sum."""
        self._line.put(None, block)
        found = self._crcs.setdefault(name, [])
        if name or not found:
            found.append(zlib.crc32(block))
        else:
            found[0] = zlib.crc32(block, found[0])

    def told(self) -> tuple[dict[str, tuple[int, ...]], str]:
        """CRC-32s by name, and the SHA-256 in hexadecimal digits."""
        self._line.finish()
        return {name: tuple(found) for name, found in self._crcs.items()}, self._sha.hexdigest()

    def close(self) -> None:
        """End the thread, whether all was summed or not."""
        self._line.close()


class Comparison:
    """Blocks that were read, and what is done where one has another CRC-32 than it must have.

    Their memory stays as it is; `finish` tells whether all were right.
    """

    def __init__(self) -> None:
        self._line = _Line(self._compare, None)

    def add(self, block: memoryview, crc: int, differs: Callable[[], Exception]) -> None:
        """A block.

        Raises:
            Exception: what `differs` gives, of this block or of one before.
        """
        if len(block) < SMALL:
            self._compare((crc, differs), block)
        else:
            self._line.put((crc, differs), block)

    def finish(self) -> None:
        """Wait for all.

        Raises:
            Exception: what `differs` gives, of the first that differs.
        """
        self._line.finish()

    def close(self) -> None:
        """End the thread."""
        self._line.close()

    def _compare(self, expected: tuple[int, Callable[[], Exception]], block: memoryview) -> None:
        crc, differs = expected
        if zlib.crc32(block) != crc:
            raise differs()


class _Line:
    """Blocks on their way through a thread, in their order; the first error is raised to who puts the next, or waits.

    Args:
        take: called with what was put.
        ahead: puts that may be waiting, before one waits itself; None: any number.
    """

    def __init__(self, take: Callable[[Any, memoryview], None], ahead: int | None) -> None:
        self._take = take
        self._queue: Queue[tuple[Any, memoryview] | None] = Queue(0 if ahead is None else ahead - 1)
        self._error: Exception | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, name="sums of a checkpoint", daemon=True)
        self._thread.start()

    def put(self, about: Any, block: memoryview) -> None:
        if self._error is not None:
            raise self._error
        self._queue.put((about, block))

    def finish(self) -> None:
        self._end()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._over = True
        self._end()

    def _end(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._error is None and not self._over:
                try:
                    self._take(*item)
                except Exception as error:  # raised in the thread that wants to know
                    self._error = error
