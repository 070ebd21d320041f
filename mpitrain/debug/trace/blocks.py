"""The format of a trace's files: a magic line and blocks, each with its kind, its length, a CRC-32 and its bytes.

    mpitrain trace 1
    "HEAD" length crc32  {"rank": 3, "size": 8, "host": ..., "facts": {...}}    JSON
    "TEXT" length crc32  ["all_reduce", "dp", "(512,) float32"]                 strings, numbered from 1
    "AXES" length crc32  {"tp": [2, 3]}                                         world ranks by axis
    "SPAN" length crc32  rows of `records.SPAN`
    "HELD" length crc32  rows of `records.MEMORY`
    "STEP" length crc32  [{"step": 1, "start": ..., "stop": ..., "loss": 5.6, "ops": true}]

Strings come before what names them.  A reader passes over kinds that it does not know.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpitrain import disk
from mpitrain.errors import DataError

MAGIC = b"mpitrain trace 1\n"
LARGEST = 1 << 26  # bytes of a block
JSON = 1 << 23  # of a block of JSON, which takes many times its bytes when it is read
FACTS = 1 << 20  # of a head
MOST_RANKS = 1 << 20
MOST_BLOCKS = 1 << 20  # of a file

_HEADER = struct.Struct("<4sII")
_NAME = re.compile(r"rank-([0-9]{5,7})\.([0-9]{3,9})\.trace")


def segment_name(rank: int, number: int) -> str:
    """The name of a file."""
    return f"rank-{rank:05}.{number:03}.trace"


def block(kind: str, data: bytes) -> bytes:
    """A block as it stands in a file."""
    return _HEADER.pack(kind.encode(), len(data), zlib.crc32(data)) + data


def json_block(kind: str, value: Any) -> bytes:
    """A block of JSON."""
    return block(kind, json.dumps(value, allow_nan=False, separators=(",", ":")).encode())


def segments(folder: Path) -> dict[int, list[Path]]:
    """Rank -> its files, the oldest first.

    Raises:
        DataError: the folder cannot be read.
    """
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise DataError(
            f"{folder}: {error.strerror}.  Train with --trace, or name the folder that tracing() was given."
        ) from None
    found: dict[int, list[tuple[int, Path]]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None and int(match[1]) < MOST_RANKS:
            found.setdefault(int(match[1]), []).append((int(match[2]), folder / name))
    return {rank: [path for _, path in sorted(found[rank])] for rank in sorted(found)}


class Damaged(Exception):
    """The rest of a file is not what was written."""


def blocks(file: int, path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Kind and bytes of each block.

    Raises:
        Damaged: the rest of the file is not what was written.
        OSError: it cannot be read.
    """
    size, at = os.fstat(file).st_size, len(MAGIC)

    def taken(offset: int, length: int) -> bytes:
        if length > size - offset:
            raise Damaged
        data = bytearray(length)
        disk.read(file, path, data, offset)
        return bytes(data)

    if taken(0, at) != MAGIC:
        raise Damaged
    for _ in range(MOST_BLOCKS):
        if at == size:
            return
        kind, length, crc = _HEADER.unpack(taken(at, _HEADER.size))
        if length > LARGEST or not kind.isupper():  # zeros, of which files with holes are made, are no block
            raise Damaged
        data = taken(at + _HEADER.size, length)
        if zlib.crc32(data) != crc:
            raise Damaged
        yield kind, data
        at += _HEADER.size + length
