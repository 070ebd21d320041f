"""A rank's recording, as it is read: line after line, and the values when they are wanted.

The index is read as the replay goes on, so a long recording takes no more memory than a short one.  What a message
brought may stand many lines behind its call; it is looked for there, and the lines between wait.

A file that ends early (its process was killed, the disk was full) is good up to its last whole line.  A line that is
not what was written, with others behind it, is damage.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain import disk
from mpitrain.errors import RecordingError
from mpitrain.recording.lines import LONGEST_LINE, VERSION, Call, End, Got, Line, Segment, Value, parsed, plain, whole
from mpitrain.recording.values import ValueReader
from mpitrain.recording.writing import FORMAT, index_of

_TAIL = 1 << 16
_TEXTS = {"kind": 32, "library": 400, "host": 256, "sent": 16, "program": 16}
"""Words of a header, and how long they may be."""


def ranks_in(folder: Path) -> list[int]:
    """The ranks that a folder holds recordings of, by the names of its files."""
    found = []
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise RecordingError(f"{folder}: is no recording: {error.strerror}.") from None
    for name in names:
        head, _, tail = name.partition(".index.jsonl")
        number = head.removeprefix("rank-")
        if head != name and not tail and head != number and number.isascii() and number.isdigit() and len(number) < 9:
            found.append(int(number))
    return sorted(set(found))


class RankReader:
    """Reads one rank's recording.

    Args:
        folder: of the recording.
        rank: of the world.

    Attributes:
        header: what is known of the run: `rank`, `size`, `kind`, `host`, `library`, `deterministic`, `sent`, `program`,
            `words`.
        messages: how many there are in all.
        end: how it ended, once that was read; None: it was cut.

    Raises:
        RecordingError: there is none of this rank, or it is damaged.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = index_of(folder, rank)
        ranks = ranks_in(folder)
        if rank not in ranks:
            there = f"it has ranks {' '.join(map(str, ranks[:20]))}" if ranks else "it has none at all"
            raise RecordingError(f"{folder} holds no recording of rank {rank}: {there}.")
        try:
            descriptor = disk.open_to_read(self.path)
        except OSError as error:
            raise RecordingError(f"{self.path} cannot be read: {error.strerror}.") from None
        self._file = os.fdopen(descriptor, "rb")
        self.end: End | None = None
        self._line = 0
        self._ahead: deque[Line] = deque()
        self._got: dict[int, Got] = {}
        self._values = ValueReader(folder, rank)
        try:
            self.header = self._header(rank)
            self.messages = self._last_message()
        except RecordingError:
            self.close()
            raise

    def next(self) -> Line | None:
        """The next line that is not about the end of a message; None: there is none any more."""
        if self._ahead:
            return self._ahead.popleft()
        while (line := self._read()) is not None:
            if not isinstance(line, Got):
                return line
            self._got[line.n] = line
        return None

    def peek(self) -> Line | None:
        """The same; it will be the next again."""
        line = self.next()
        if line is not None:
            self._ahead.appendleft(line)
        return line

    def got(self, n: int) -> Got | None:
        """What message n brought; None: the recording ends before it was complete."""
        while n not in self._got:
            line = self._read()
            if line is None:
                return None
            if isinstance(line, Got):
                self._got[line.n] = line
            else:
                self._ahead.append(line)
        return self._got.pop(n)

    def put_back(self, got: Got) -> None:
        """Have what a message brought asked for again."""
        self._got[got.n] = got

    def value(self, value: Value) -> Any:
        """An array.

        Raises:
            RecordingError: its bytes are not there, or not what was written.
        """
        return self._values.read(value)

    def close(self) -> None:
        """Close the files."""
        self._values.close()
        self._file.close()

    # -- lines --------------------------------------------------------------------------------------------------------

    def _read(self) -> Line | None:
        while (about := self._object()) is not None:
            try:
                line = parsed(about)
            except RecordingError as error:
                raise RecordingError(f"{self.path} is damaged: line {self._line}: {error}.") from None
            if isinstance(line, End):
                self.end = line
            if isinstance(line, Segment):
                self._values.segment(line)
            elif line is not None:
                return line
        return None

    def _object(self) -> dict[str, Any] | None:
        """The object of the next line; None at the end, and where the last line is not whole."""
        try:
            text = self._file.readline(LONGEST_LINE + 1)
        except OSError as error:
            raise RecordingError(f"{self.path} cannot be read: {error.strerror}.") from None
        self._line += 1
        if not text.endswith(b"\n") and len(text) <= LONGEST_LINE:
            return None  # the end, or a line that was being written there
        found = whole(text)
        if found is None:
            if not self._file.read(1):
                return None
            raise RecordingError(f"{self.path} is damaged: line {self._line} is not what was written.")
        return found

    def _header(self, rank: int) -> dict[str, Any]:
        header = self._object()
        if header is None or header.get(FORMAT) != VERSION:
            version = "" if header is None or FORMAT not in header else ", of this version"
            raise RecordingError(f"{self.path}: is no index of a recording{version}.")
        size = header.get("size")
        words = header.get("words")
        known = (
            header.get("rank") == rank
            and type(size) is int
            and rank < size < 1 << 20
            and all(isinstance(header.get(key), str) and len(header[key]) <= most for key, most in _TEXTS.items())
            and isinstance(header.get("deterministic"), bool)
            and isinstance(words, list)
            and all(isinstance(word, str) for word in words)
            and (header.get("settings") is None or isinstance(header["settings"], str))
        )
        if not known:
            raise RecordingError(f"{self.path} is damaged: its first line does not say whose recording it is.")
        return header | {key: plain(header[key]) for key in _TEXTS}

    def _last_message(self) -> int:
        """The number of the last message, from the last lines of the file."""
        size = os.fstat(self._file.fileno()).st_size
        tail = os.pread(self._file.fileno(), _TAIL, max(0, size - _TAIL))
        for text in reversed(tail.splitlines(keepends=True)):
            about: Mapping[str, Any] = whole(text) or {}
            try:
                line = parsed(about)
            except RecordingError:
                continue
            if isinstance(line, End):
                return line.messages
            if isinstance(line, (Call, Got)):
                return line.n
        return 0
