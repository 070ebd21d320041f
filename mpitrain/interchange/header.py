"""What a safetensors file says it holds, every word checked before its library maps the file.

    8 bytes      length of the header, little-endian
    header       JSON: {"name": {"dtype": "F32", "shape": [128, 512], "data_offsets": [0, 262144]}, ...}
    the rest     the values, one tensor after the other, without gaps

The library checks the same; here each refusal names the tensor, and the file takes no memory for what it only claims.
JSON of a folder of weights is read here as well, since it is from the same hands.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mpitrain import disk
from mpitrain.errors import CheckpointDamaged, CheckpointError
from mpitrain.options import show

WIDTHS: Mapping[str, int] = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1},
    **{"U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
}
"""Bytes of an element of each dtype that is known, by the names in headers."""
MOST_HEADER = 1 << 22
"""Bytes of JSON: of the largest models in use it has a tenth."""
_MOST_NAME, _MOST_DIMS = 256, 8


class Entry(NamedTuple):
    """A tensor of a file: its dtype, by the name in the header, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * WIDTHS[self.dtype]


def entries(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file, by name.

    Raises:
        CheckpointDamaged: its header is none, or what it says does not fit the file; names the tensor.
        CheckpointError: the file cannot be read.
    """
    try:
        with disk.opened(path) as file:
            size = os.fstat(file).st_size
            head = bytearray(min(size, 8))
            disk.read(file, path, head, 0)
            length = int.from_bytes(head, "little")
            if size < 8 or length > size - 8:
                _damaged(path, f"it has {size} bytes, its header should have {length}: it was cut off, or is none")
            if length > MOST_HEADER:
                raise CheckpointError(f"{show(path)}: has a header of {length} bytes; at most {MOST_HEADER} are read.")
            text = bytearray(length)
            disk.read(file, path, text, 8)
    except OSError as error:
        raise CheckpointError(f"{show(path)} cannot be read: {error.strerror}.") from None
    found = parsed(bytes(text), path, "its header")
    about = found.pop("__metadata__", {})
    if not isinstance(about, dict) or not all(isinstance(text, str) for text in about.values()):
        _damaged(path, "its __metadata__ is no table of texts")
    held = {name: _entry(path, name, about) for name, about in found.items()}
    _check_places(path, found, held, size - 8 - length)
    return held


def _entry(path: Path, name: str, about: Any) -> Entry:
    if not name.isprintable() or not 0 < len(name) <= _MOST_NAME:
        _damaged(path, f"a tensor is called {show(name)}")
    try:
        dtype, shape, (start, stop) = about["dtype"], about["shape"], about["data_offsets"]
    except (TypeError, KeyError, ValueError):
        _damaged(path, f"{show(name)} lacks its dtype, shape or place")
    if not isinstance(dtype, str) or dtype not in WIDTHS:
        raise CheckpointError(f"{show(path)}: {show(name)} has dtype {show(dtype)}, which is not known.")
    counts = isinstance(shape, list) and all(map(_is_count, (*shape, start, stop)))
    if not counts or len(shape) > _MOST_DIMS or start > stop:
        _damaged(path, f"{show(name)} has a shape or a place that cannot be")
    entry = Entry(dtype, tuple(shape))
    if entry.nbytes != stop - start:
        _damaged(path, f"{show(name)} of shape {entry.shape} in {dtype} takes {entry.nbytes} bytes, not {stop - start}")
    return entry


def _check_places(path: Path, found: Mapping[str, Any], held: Mapping[str, Entry], room: int) -> None:
    """That the tensors lie one after the other and fill the file."""
    places = sorted((*found[name]["data_offsets"], name) for name in held)
    ends = [(0, 0, ""), *places, (room, room, "")]
    for (_, stop, one), (start, _, other) in pairwise(ends):
        if not other and stop != start:
            last = f"{show(one)} ends at {stop}" if one else "there is no tensor"
            _damaged(path, f"{last}, but the file has {room} bytes of values: it was cut off or grew")
        if stop > start:
            _damaged(path, f"{show(one)} and {show(other)} lie over each other")
        if stop < start:
            _damaged(path, f"{start - stop} bytes before {show(other)} belong to no tensor")


def read_json(path: Path, most: int) -> dict[str, Any]:
    """The object in a JSON file of at most so many bytes.

    Raises:
        CheckpointError: it cannot be read, or is too large.
        CheckpointDamaged: it is no JSON object.
    """
    return parsed(read_small(path, most), path, "it")


def read_small(path: Path, most: int) -> bytes:
    """All bytes of a regular file that has at most so many.

    Raises:
        CheckpointError: it has more, or cannot be read.
    """
    try:
        with disk.opened(path) as file:
            size = os.fstat(file).st_size
            if size > most:
                raise CheckpointError(f"{show(path)}: has {size} bytes; at most {most} are read.")
            data = bytearray(size)
            disk.read(file, path, data, 0)
    except OSError as error:
        raise CheckpointError(f"{show(path)} cannot be read: {error.strerror}.") from None
    return bytes(data)


def parsed(text: bytes, path: Path, what: str) -> dict[str, Any]:
    """The object that JSON is.

    Raises:
        CheckpointDamaged: it is none, or a key stands twice in it.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                _damaged(path, f"{show(key)} stands twice in {what}")
            found[key] = value
        return found

    try:
        found = json.loads(text.decode(), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError, MemoryError):
        found = None
    if not isinstance(found, dict):
        _damaged(path, f"{what} is no JSON object")
    return found


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


def _damaged(path: Path, detail: str) -> NoReturn:
    raise CheckpointDamaged(f"{show(path)} is damaged: {detail}.") from None
