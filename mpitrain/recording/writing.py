"""A rank's recording, as it is made.

Values go to their files, then the line that tells of them to the index, each by one call of the system: whenever the
process ends, what was recorded up to there can be read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain import disk
from mpitrain.errors import RecordingError
from mpitrain.recording.lines import LONGEST_LINE, VERSION, Line, Value, text_of, told
from mpitrain.recording.values import ValueWriter

FORMAT = "mpitrain recording"
"""Key of the first line, with the version as its value."""


def index_of(folder: Path, rank: int) -> Path:
    """The index of a rank."""
    return folder / f"rank-{rank:05}.index.jsonl"


def claim(folder: Path) -> None:
    """Make the folder of a recording; one rank calls it.

    Raises:
        RecordingError: there is a recording in it.
        OSError: it cannot be made.
    """
    if folder.is_dir():
        if any(folder.glob("rank-*.index.jsonl")):
            raise RecordingError(f"{folder} holds a recording already: give another folder, or remove that one.")
        return
    disk.make_folder(folder)


class RankWriter:
    """Writes one rank's recording.

    Args:
        folder: of the recording; it is there.
        rank: of the world.
        header: what is to be known of the run.

    Raises (all methods): OSError: the disk refuses, or has no room.
    """

    def __init__(self, folder: Path, rank: int, header: Mapping[str, Any]) -> None:
        self.path, self._rank = index_of(folder, rank), rank
        self.nbytes = 0
        self._file = disk.create(self.path)
        self._values = ValueWriter(folder, rank, self.line)
        self._put(text_of({FORMAT: VERSION, "rank": rank, **header}))

    def value(self, array: Any) -> Value:
        """Keep an array of the host."""
        return self._values.write(array)

    @property
    def kept(self) -> int:
        """Bytes of values and of the index, up to now."""
        return self.nbytes + self._values.nbytes

    def line(self, line: Line) -> None:
        """The next line of the index."""
        self._put(text_of(told(line)))

    def _put(self, text: bytes) -> None:
        if len(text) > LONGEST_LINE:
            raise OSError(f"a line of {len(text)} bytes is too long for an index")
        self.nbytes += len(text)
        view = memoryview(text)
        while view:
            view = view[os.write(self._file, view) :]

    def remove(self) -> None:
        """Remove the files of a recording that has ended."""
        for path in (self.path, *self.path.parent.glob(f"rank-{self._rank:05}-*.h5")):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """The end of the recording."""
        try:
            self._values.close()
        finally:
            os.close(self._file)
