"""Digests on their way to a file: `--digests`, or around any part of a script."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain import kernels
from mpitrain.comm.together import together
from mpitrain.comm.world import World
from mpitrain.debug.digests.digester import Digester
from mpitrain.debug.digests.entries import Record
from mpitrain.debug.digests.files import FOLDER, name_of
from mpitrain.errors import ConfigError
from mpitrain.events import listen

LIMIT = 64
"""MiB of digests that a rank keeps."""
_MIB = 1 << 20


class Writer:
    """Appends the records of one rank to its file.

    A file that is full, or a disk, ends the digests and not the run: it is said once, on the first rank.

    Args:
        path: the file; its folder exists.
        limit: bytes that it may have.
        says: whether this rank says so.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, limit: int, says: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._path, self._limit, self._says = path, limit, says
        self._file: int | None = os.open(path, flags, 0o600)
        self._size = os.fstat(self._file).st_size
        self._numbers: dict[str, int] = {}
        if self._size and os.pread(self._file, 1, self._size - 1) != b"\n":
            self._append(b"\n")  # the line of a run that was killed

    def __call__(self, record: Record) -> None:
        """Append a record; what it says of each value that was said before stands there as a number."""
        if self._file is None:
            return
        if "values" in record:
            first, new, values = len(self._numbers), [], []
            for key, about, numbers in record["values"]:
                text = json.dumps([key, about])
                if text not in self._numbers:
                    self._numbers[text] = len(self._numbers)
                    new.append([key, about])
                values.append([self._numbers[text], numbers])
            if new:
                self._line({"is": "keys", "first": first, "keys": new})
            record = {**record, "values": values}
        self._line(record)

    def _line(self, record: Record) -> None:
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        if self._size + len(line) > self._limit:
            self._stop(f"{self._limit // _MIB} MiB are full")
        else:
            self._append(line)

    def _append(self, line: bytes) -> None:
        if self._file is None:
            return
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            self._stop(str(error.strerror))
        self._size += len(line)

    def _stop(self, why: str) -> None:
        if self._says and self._file is not None:
            print(f"{self._path}: {why}; from here on the run goes without digests.", file=sys.stderr, flush=True)
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


@contextmanager
def digesting(
    world: World,
    folder: str | os.PathLike[str],
    every: int = 1,
    facts: Mapping[str, Any] | None = None,
    limit: int = LIMIT,
) -> Iterator[None]:
    """Take the digests of what executors on this world train while the block runs.

        with digesting(world(), "runs/mine"):
            for batch in batches:
                executor.step(batch)

    Args:
        world: of this rank; collective over it.
        folder: of the run; they are put into `digests/` there, which all ranks must see.
        every: of each so many-th step, and of the first three.
        facts: what else to tell of the run, as JSON.
        limit: MiB that each rank's file may have.

    Raises:
        ConfigError: the numbers are not positive, or files cannot be made; on every rank.
    """
    if every < 1 or limit < 1:
        raise ConfigError(f"digests of each {every}-th step in {limit} MiB: both must be at least 1.")
    path = Path(folder) / FOLDER
    here = world.rank == 0 or world.kind == "replay"  # which has a folder of its own, and no rank 0
    together(world, lambda: _made(path), here=here)
    writer: Writer | None = together(world, lambda: _writer(path / name_of(world.rank), limit, world.rank == 0))
    assert writer is not None
    digester = Digester(world, writer, every, {"facts": {**_made_with(world), **(facts or {})}})
    try:
        with listen(digester, ops=False):
            yield
    finally:
        digester.interrupt()
        writer.close()


def _made_with(world: World) -> dict[str, Any]:
    """With what a run computes and sends."""
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "processor": platform.machine(),
        "kernels": kernels.level(),
        "messages": world.library,
        "sums in rank order": world.mode.deterministic,
    }


def _made(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: digests cannot be kept there: {error.strerror}.") from None


def _writer(path: Path, limit: int, says: bool) -> Writer:
    try:
        return Writer(path, limit * _MIB, says)
    except OSError as error:
        raise ConfigError(f"{path}: digests cannot be written there: {error.strerror}.") from None
