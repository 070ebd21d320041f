"""The manifest of a checkpoint, `manifest.json`: the whole index of what lies where, and the sums of all of it.

    {"format": 2, "step": 100, "layout": {"dp": 2}, "versions": {...}, "scalars": {...},
     "files": {"rank-00000.h5": {"bytes": 1884160, "sha256": "3a7bd3...", "metadata_crc32": 912559}},
     "tensors": {"weight/blocks.0.mlp.up.weight": {"shape": [128, 512], "dtype": "float32", "slabs": [
         {"start": [0, 0], "stop": [64, 512], "file": "rank-00000.h5", "offset": 4096, "crc32": [3523407757]}, ...]}},
     "sha256": "9f86d0..."}

`crc32` has a number for each block of 4 MiB of the slab's bytes.  The last line is the sum of all text before it, so
that a manifest with one bit flipped is no manifest.

It may come from anybody: every field is checked before one is used.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mpitrain import disk
from mpitrain.errors import CheckpointDamaged, CheckpointError
from mpitrain.options import show

FORMAT = 2
MANIFEST = "manifest.json"
BLOCK = 1 << 22
"""Bytes of a slab that have a sum of their own: as much is read to check any of them."""
DTYPES = frozenset(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)) | {
    "float16",
    "float32",
    "float64",
}
_WORDS = r"[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*"  # no dot at an end, and no two in a row
NAME = re.compile(f"{_WORDS}(/{_WORDS}){{0,7}}")
LONGEST_NAME = 1024

_FILE = re.compile(r"rank-[0-9]{5,9}\.h5")
_SHA = re.compile(r"[0-9a-f]{64}")
_MOST_DIMS = 32  # HDF5's limit
_MOST_CUTS = 32  # of a part of a part ...: a mesh has fewer axes
MAX_MANIFEST = 1 << 26  # bytes; a hundred thousand slabs are 25 MB
_SLACK = 1 << 16  # bytes
_SEAL = ',\n "sha256": "'  # before the value of the last line
_END = '"\n}\n'
_ANOTHER = "Resume from another checkpoint."


class FileEntry(NamedTuple):
    """A file of a checkpoint: its size, its SHA-256, and the CRC-32 of what in it is no slab."""

    nbytes: int
    sha256: str
    metadata_crc32: int


class Slab(NamedTuple):
    """A rectangle, the file that holds it, where its bytes begin there, and the CRC-32 of each block of them."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    file: str
    offset: int
    crc32: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its lengths."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def elements(self) -> int:
        """How many."""
        return math.prod(self.shape)


class Logical(NamedTuple):
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    slabs: tuple[Slab, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the slabs tile the tensor."""
        if not self.slabs or 0 in self.shape:
            return not self.slabs and 0 in self.shape
        starts, stops = (np.array([slab[of] for slab in self.slabs], np.int64) for of in (0, 1))
        return _tile(np.zeros(len(self.shape), np.int64), np.array(self.shape, np.int64), starts, stops)


def _tile(low: np.ndarray, high: np.ndarray, starts: np.ndarray, stops: np.ndarray, deep: int = 0) -> bool:
    """Whether rectangles tile the box from `low` to `high`, cut from side to side, then each part again, ...

    So slabs of ranks lie, by an axis of the mesh after the other.  Cost: n log n for n rectangles and each cut.
    """
    if len(starts) == 1:
        return bool((starts[0] == low).all() and (stops[0] == high).all())
    for dim in range(len(low)):
        order = np.argsort(starts[:, dim], kind="stable")
        begins, ends = starts[order, dim], np.maximum.accumulate(stops[order, dim])
        cuts = np.flatnonzero(begins[1:] >= ends[:-1]) + 1
        if not cuts.size:
            continue
        lows, highs = np.repeat([low], len(cuts) + 1, 0), np.repeat([high], len(cuts) + 1, 0)
        lows[1:, dim] = highs[:-1, dim] = begins[cuts]
        if len(cuts) + 1 == len(starts):
            return bool((starts[order] == lows).all() and (stops[order] == highs).all())
        parts = zip(lows, highs, np.split(order, cuts), strict=True)
        return deep < _MOST_CUTS and all(_tile(*box, starts[part], stops[part], deep + 1) for *box, part in parts)
    return False


@dataclass(frozen=True)
class Manifest:
    """The index of a checkpoint.

    Attributes:
        step: steps that were done when it was saved.
        layout: axis -> ranks, of the run that saved it; for people, loading does not need it.
        versions: of the libraries that wrote it.
        scalars: what the run wanted back, as JSON holds it.
        files: by name.
        tensors: by name.
    """

    step: int
    layout: dict[str, int]
    versions: dict[str, str]
    scalars: dict[str, Any]
    files: dict[str, FileEntry]
    tensors: dict[str, Logical]

    def to_json(self) -> str:
        """The text of the file."""
        files = {
            name: {"bytes": entry.nbytes, "sha256": entry.sha256, "metadata_crc32": entry.metadata_crc32}
            for name, entry in self.files.items()
        }
        tensors = {
            name: {"shape": t.shape, "dtype": t.dtype, "slabs": [slab._asdict() for slab in t.slabs]}
            for name, t in self.tensors.items()
        }
        head = json.dumps({"format": FORMAT, **vars(self), "files": files, "tensors": {}}, indent=1, allow_nan=False)
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(tensor)}" for name, tensor in tensors.items())
        return sealed(head.removesuffix("{}\n}") + f"{{\n{lines}\n }}")


def sealed(text: str) -> str:
    """The text of a JSON object without its last brace, and after it the sum of it."""
    return f"{text}{_SEAL}{sha256(text.encode()).hexdigest()}{_END}"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, every field checked; of other files only their sizes are looked at.

    Raises:
        CheckpointDamaged: it is not what was written, or a file is missing or of another size.
        CheckpointError: there is none, it cannot be read, or is of another format.
    """
    manifest = read_alone(folder)
    for name, entry in manifest.files.items():
        try:
            about = os.lstat(folder / name)
        except OSError as error:
            raise CheckpointDamaged(f"{folder} is not complete: {name}: {error.strerror}.") from None
        if not stat.S_ISREG(about.st_mode) or about.st_size != entry.nbytes:
            raise CheckpointDamaged(
                f"{folder} is damaged: {name} must be a regular file of {entry.nbytes} bytes; it has {about.st_size}."
            )
    return manifest


def read_alone(folder: Path) -> Manifest:
    """The manifest of a checkpoint, every field checked, whatever the other files are.

    Raises:
        CheckpointDamaged: it is not what was written.
        CheckpointError: there is none, it cannot be read, or is of another format.
    """
    path = folder / MANIFEST
    manifest = manifest_in(object_in(_text_of(folder, path), path), path)
    if re.fullmatch(r"step-[0-9]{8,}", folder.name) and int(folder.name[len("step-") :]) != manifest.step:
        _damaged(path, f"it says step {manifest.step} in {folder.name}")
    return manifest


def manifest_in(whole: dict[str, Any], path: Path) -> Manifest:
    """The manifest that a JSON object of a file is.

    Raises:
        CheckpointDamaged: it is none.
        CheckpointError: it is of another format.
    """
    found = whole.get("format")
    if type(found) is int and found != FORMAT:
        older = "an earlier development version wrote it" if found < FORMAT else "use a newer mpitrain"
        raise CheckpointError(f"{path} has format {found}; this mpitrain reads format {FORMAT}: {older}.")
    try:
        return _manifest(whole)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        detail = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]
        _damaged(path, detail)


def _text_of(folder: Path, path: Path) -> bytes:
    """What is in the file, if it is whole: the last line is the sum of the rest."""
    try:
        with disk.opened(path) as file:
            size = os.fstat(file).st_size
            if size > MAX_MANIFEST:
                raise CheckpointError(
                    f"{path} is not a manifest: it has {size} bytes, at most {MAX_MANIFEST} are read."
                )
            data = bytearray(size)
            disk.read(file, path, data, 0)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    return bytes(data)


def object_in(data: bytes, path: Path) -> dict[str, Any]:
    """The JSON object that a manifest is, if the sum in its last line is that of its text.

    Raises:
        CheckpointDamaged: it is not.
    """
    head, mark, tail = data.rpartition(_SEAL.encode())
    if not mark or tail != f"{sha256(head).hexdigest()}{_END}".encode():
        older = re.match(rb'\s*\{\s*"format":\s*([0-9]{1,9})\s*,', data)
        if older and int(older[1]) != FORMAT:
            return {"format": int(older[1])}
        _damaged(path, "its text is not the one whose SHA-256 stands in its last line")
    # Of what this module writes, a value takes at least 3 bytes and a list 12 on average.  Nothing but empty lists
    # would be 20 times as large in memory as in the file.
    values, lists = data.count(b",") + data.count(b":"), data.count(b"[") + data.count(b"{")
    if 3 * values > len(data) + _SLACK or 12 * lists > len(data) + _SLACK:
        _damaged(path, "it has more lists or values than a manifest of this size")
    try:
        whole = json.loads(data, object_pairs_hook=_unique, parse_constant=_refused)
    except (ValueError, RecursionError, MemoryError):
        whole = None
    if not isinstance(whole, dict):
        _damaged(path, "it is not a JSON object")
    return whole


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    _must(len(found) == len(pairs), "a key stands twice")
    return found


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _damaged(path: Path, detail: str) -> NoReturn:
    raise CheckpointDamaged(f"{path} is damaged: {detail}.  {_ANOTHER}") from None


def _manifest(whole: Any) -> Manifest:
    """The manifest in a JSON value.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is not one.
    """
    _must(whole["format"] == FORMAT, "its format is not known")
    _must(_is_count(whole["step"]), "its step is not a number")
    for key in ("layout", "versions", "scalars"):
        _must(isinstance(whole[key], dict), f"{key} is not a table")
    files = {}
    for name, about in whole["files"].items():
        entry = files[name] = FileEntry(about["bytes"], about["sha256"], about["metadata_crc32"])
        sums = isinstance(entry.sha256, str) and _SHA.fullmatch(entry.sha256) and _is_crc(entry.metadata_crc32)
        _must(bool(_FILE.fullmatch(name) and _is_count(entry.nbytes) and sums), f"file {show(name)} is not allowed")
    tensors = {}
    for name, about in whole["tensors"].items():
        allowed = len(name) <= LONGEST_NAME and NAME.fullmatch(name)
        _must(bool(allowed), f"tensor name {show(name)} is not allowed")
        tensors[name] = _logical(name, about, files)
    _check_places(tensors, files)
    fields = {key: whole[key] for key in ("step", "layout", "versions", "scalars")}
    return Manifest(files=files, tensors=tensors, **fields)


def _logical(name: str, about: Any, files: dict[str, FileEntry]) -> Logical:
    """A tensor of the manifest."""
    shape, dtype = _counts(about["shape"]), about["dtype"]
    _must(isinstance(dtype, str) and dtype in DTYPES, f"{name} has dtype {show(str(dtype))}")
    _must(len(shape) <= _MOST_DIMS and _is_count(math.prod(shape)), f"{name} has a shape that cannot be")
    width, slabs = np.dtype(dtype).itemsize, []
    for s in about["slabs"]:
        slab = Slab(_counts(s["start"]), _counts(s["stop"]), s["file"], s["offset"], tuple(s["crc32"]))
        inside = len(slab.start) == len(slab.stop) == len(shape) and all(
            start < stop <= length for start, stop, length in zip(slab.start, slab.stop, shape, strict=True)
        )
        _must(inside and slab.file in files, f"a slab of {name} lies outside of it or in no file")
        nbytes = slab.elements * width
        within = _is_count(slab.offset) and slab.offset + nbytes <= files[slab.file].nbytes
        _must(within, f"a slab of {name} lies outside of {slab.file}")
        sums = len(slab.crc32) == -(-nbytes // BLOCK) and all(map(_is_crc, slab.crc32))
        _must(sums, f"a slab of {name} does not have a sum for each of its blocks")
        slabs.append(slab)
    _must(len({slab.file for slab in slabs}) == len(slabs), f"a file holds two slabs of {name}")
    tensor = Logical(shape, dtype, tuple(slabs))
    _must(tensor.is_whole, f"the slabs of {name} do not make a whole tensor")
    return tensor


def _check_places(tensors: dict[str, Logical], files: dict[str, FileEntry]) -> None:
    """That no two slabs have bytes in common."""
    places: dict[str, list[tuple[int, int, str]]] = {name: [] for name in files}
    for name, tensor in tensors.items():
        for slab in tensor.slabs:
            nbytes = slab.elements * np.dtype(tensor.dtype).itemsize
            places[slab.file].append((slab.offset, slab.offset + nbytes, name))
    for file, found in places.items():
        for (_, stop, one), (start, _, other) in pairwise(sorted(found)):
            _must(stop <= start, f"{one} and {other} lie over each other in {file}")


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_crc(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _counts(values: Any) -> tuple[int, ...]:
    _must(isinstance(values, list) and all(_is_count(value) for value in values), "a shape is not a list of numbers")
    return tuple(values)
