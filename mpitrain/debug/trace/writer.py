"""From rows of numbers to blocks in files: what is written of one rank, and what happens when it cannot be."""

from __future__ import annotations

import contextlib
import os
import sys
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.debug.trace.blocks import block, json_block
from mpitrain.debug.trace.records import MEMORY, SPAN
from mpitrain.debug.trace.ring import SEGMENTS, Ring
from mpitrain.debug.trace.table import MOST, ROW, Kinds, Strings

LIMIT = 64
"""MiB of files that a rank keeps."""
MOST_ROWS = 16_384  # that wait to be written
MARK, SAID = ".writing", ".ended"
"""The name of an empty file while the trace is written, and when a rank has said that it can be written no more."""
TEXTS = 1000  # strings of a block
_MIB = 1 << 20


class Writer:
    """Writes one rank's trace.

    Args:
        folder: exists; holds nothing of an earlier trace of this rank.
        head: rank, size, host, clock, began, facts.
        limit: MiB of files that this rank keeps.

    Attributes:
        kinds: of spans; those that rows name.
        most: numbers in rows that should be written at once.

    Raises:
        OSError: the first file cannot be written.
    """

    def __init__(self, folder: Path, head: Mapping[str, Any], limit: int = LIMIT) -> None:
        self._folder = folder
        self._inside = f"{os.fspath(folder)}{os.sep}"
        self._about = dict(head)
        self._strings = Strings()
        self.kinds = Kinds(self._strings)
        self._axes: dict[str, tuple[int, ...]] = {}
        self._steps: list[dict[str, Any]] = []
        self._memory: list[tuple[int, int, str, int]] = []
        self._held: dict[str, int] = {}  # as it was noted last
        self._newest = 0
        self._ring: Ring | None = Ring(folder, self._about["rank"], limit * _MIB, self._head)
        self.most = ROW * min(MOST_ROWS, limit * _MIB // SEGMENTS // SPAN.itemsize // 4)

    def owns(self, path: str) -> bool:
        """Whether a file is one of the trace."""
        return path.startswith(self._inside)

    def meet(self, axis: str, ranks: tuple[int, ...]) -> None:
        """An axis on which there are messages."""
        self._axes.setdefault(axis, ranks)

    def step(self, about: dict[str, Any]) -> None:
        """A step that has ended."""
        self._newest = about["step"]
        self._steps.append(about)

    def hold(self, time: int, step: int, held: Mapping[str, int]) -> None:
        """What owners hold at a time; noted where it is not what they held before."""
        for owner, nbytes in held.items():
            if self._held.get(owner, 0) != nbytes:
                self._held[owner] = nbytes
                self._memory.append((time, step, owner, nbytes))

    def write(self, rows: array[int]) -> bool:
        """Write spans, and all else that came.

        Returns:
            Whether more can be written.
        """
        if self._ring is None:
            return False
        try:
            spans = self.kinds.spans(np.frombuffer(rows, np.int64).reshape(-1, ROW))
            held = [(time, step, self._strings.number(owner), nbytes) for time, step, owner, nbytes in self._memory]
            blocks: list[bytes] = []
            texts = self._strings.fresh()
            blocks += [json_block("TEXT", texts[at : at + TEXTS]) for at in range(0, len(texts), TEXTS)]
            if texts:
                blocks.append(json_block("AXES", self._axes))
            if len(spans):
                blocks.append(block("SPAN", spans.tobytes()))
            if held:
                blocks.append(block("HELD", np.array(held, MEMORY).tobytes()))
            if self._steps:
                blocks.append(json_block("STEP", self._steps))
            self._memory, self._steps = [], []
            self._ring.write(b"".join(blocks), len(spans))
            if self._ring.size >= self._ring.room or max(len(self._strings), len(self.kinds)) > MOST:
                self._strings.clear()
                self.kinds.clear()
                self._held.clear()  # each file tells it anew
                self._ring.next()
        except OSError as error:
            self._give_up(error)
        return self._ring is not None

    def close(self) -> None:
        """Write no more."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None
            with contextlib.suppress(OSError):
                os.unlink(self._folder / MARK)

    def _head(self, number: int, dropped: int) -> bytes:
        return json_block("HEAD", {**self._about, "segment": number, "dropped": dropped})

    def _give_up(self, error: OSError) -> None:
        """Write no more; one rank of a host says so: the one that renames the mark, which a full disk allows, too."""
        assert self._ring is not None
        self._ring.close()
        self._ring = None
        try:
            os.rename(self._folder / MARK, self._folder / SAID)
        except FileNotFoundError:
            if os.path.lexists(self._folder / SAID):
                return
        except OSError:
            pass  # of a disk that cannot be written at all: then all say so
        sys.stderr.write(
            f"rank {self._about['rank']}: the trace ends after step {self._newest}: {self._folder} cannot be written:"
            f" {error.strerror or error}; training goes on without.\n"
        )
