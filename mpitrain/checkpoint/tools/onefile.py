"""A checkpoint as one HDF5 file: whole tensors under their names, and what it takes to become a checkpoint again.

    with h5py.File("gpt.h5") as file:
        weight = file["weight/blocks.0.mlp.up.weight"][:]
        index = json.loads(file["index"][:].tobytes())             # index["step"], index["scalars"]["config"] ...

`index` is the manifest, with the place and the sums of every tensor.  The first 4096 bytes are a user block, which HDF5
leaves to whoever writes a file: a few lines of JSON that say where the index lies.  So this file is read as other
checkpoints are, past HDF5, and each byte is covered by a sum; the user block is filled in last, so a file that is not
whole has none.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain import disk
from mpitrain.checkpoint import hdf5
from mpitrain.checkpoint.manifest import BLOCK, FORMAT, MAX_MANIFEST, Manifest, manifest_in, object_in, sealed
from mpitrain.errors import CheckpointDamaged, CheckpointError
from mpitrain.options import show

HEAD = 4096  # bytes; not less than the alignment of large datasets, as HDF5 wants it
INDEX = "index"
FILE = "rank-00000.h5"
"""As which the index, read as a manifest, knows the file that it stands in."""

_BEGINS = b'{"mpitrain": "one-file checkpoint"'
_LARGEST = 1 << 62  # an offset with as many digits as any


class Head(NamedTuple):
    """What the user block says: size of the file, place of the index, CRC-32 of what is neither values nor head."""

    nbytes: int
    offset: int
    length: int
    metadata_crc32: int


def write(path: Path, manifest: Manifest, blocks: Callable[[str], Iterable[memoryview]]) -> int:
    """Write a new file and have it on the disk.

    Args:
        path: of the file; nothing may be there.
        manifest: step, layout, versions, scalars and tensors; in which files these lay does not matter.
        blocks: name of a tensor that is not empty -> its bytes in blocks of `BLOCK`.

    Returns:
        Size of the file.

    Raises:
        CheckpointError: a tensor has the name of the index.
        OSError: the file system refused.
    """
    if taken := [name for name in manifest.tensors if name.partition("/")[0] == INDEX]:
        raise CheckpointError(f"{taken[0]} cannot stand in one file: {INDEX!r} there is the name of the index.")
    filled = [(name, t.shape, t.dtype) for name, t in manifest.tensors.items() if 0 not in t.shape]
    blank_sums = [2**32 - 1]  # as long as any
    longest = {name: (_LARGEST, blank_sums * -(-_nbytes(shape, dtype) // BLOCK)) for name, shape, dtype in filled}
    room = len(_index_text(manifest, longest))
    datasets = [*filled, (INDEX, (room,), "uint8")]
    blank = hdf5.in_blocks(memoryview(b" " * room))
    written = hdf5.write_blocks(path, datasets, lambda name: blank if name == INDEX else blocks(name), head=HEAD)
    places = dict(written.slabs)
    offset, _ = places.pop(INDEX)
    size = written.entry.nbytes
    index = _index_text(manifest, places).ljust(room)
    head = {
        "mpitrain": "one-file checkpoint",
        "format": FORMAT,
        "step": manifest.step,
        "bytes": size,
        "index": {"offset": offset, "bytes": room},
        "metadata_crc32": written.entry.metadata_crc32,
    }
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        disk.write(file, path, index, offset)
        disk.write(file, path, sealed(json.dumps(head)[:-1]).encode().ljust(HEAD), 0)
        disk.sync(file, path)
    finally:
        os.close(file)
    return size


def _index_text(manifest: Manifest, places: Mapping[str, tuple[int, Iterable[int]]]) -> bytes:
    """The index, with offset and sums of each tensor that is not empty."""
    head = json.dumps({"format": FORMAT, **vars(replace(manifest, files={}, tensors={}))}, indent=1, allow_nan=False)
    lines = []
    for name, tensor in manifest.tensors.items():
        about: dict[str, Any] = {"shape": tensor.shape, "dtype": tensor.dtype}
        if name in places:
            offset, crcs = places[name]
            about |= {"offset": offset, "crc32": list(crcs)}
        lines.append(f"  {json.dumps(name)}: {json.dumps(about)}")
    return sealed(head.removesuffix("{}\n}") + "{\n" + ",\n".join(lines) + "\n }").encode()


def read_head(path: Path) -> Head | None:
    """What the user block of a file says; None: it is not a file that `write` wrote.

    Raises:
        CheckpointDamaged: it begins as one does, and is not whole.
        CheckpointError: it cannot be read.
    """
    try:
        with disk.opened(Path(os.path.realpath(path))) as file:
            size = os.fstat(file).st_size
            data = bytearray(min(size, HEAD))
            disk.read(file, path, data, 0)
    except OSError as error:
        raise CheckpointError(f"{show(path)} cannot be read: {error.strerror}.") from None
    if not data.startswith(_BEGINS):
        return None
    about = object_in(bytes(data).rstrip(b" "), path)
    try:
        head = Head(about["bytes"], about["index"]["offset"], about["index"]["bytes"], about["metadata_crc32"])
        counts = all(type(number) is int and 0 <= number < _LARGEST for number in head)
        if not counts or head.offset < HEAD or head.offset + head.length > head.nbytes or head.length > MAX_MANIFEST:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise CheckpointDamaged(f"{show(path)} is damaged: its first lines are not those of a checkpoint.") from None
    if size != head.nbytes:
        raise CheckpointDamaged(f"{show(path)} is damaged: it must have {head.nbytes} bytes; it has {size}.")
    return head


def read_index(path: Path, head: Head) -> Manifest:
    """The index as a manifest, of which the one file is called `FILE`; every field checked.

    Raises:
        CheckpointDamaged: it is not what was written.
        CheckpointError: it cannot be read, or is of another format.
    """
    data = bytearray(head.length)
    try:
        with disk.opened(Path(os.path.realpath(path))) as file:
            disk.read(file, path, data, head.offset)
    except OSError as error:
        raise CheckpointError(f"{show(path)} cannot be read: {error.strerror}.") from None
    whole = object_in(bytes(data).rstrip(b" "), path)
    tensors = whole.get("tensors")
    if isinstance(tensors, dict):
        whole["tensors"] = {name: _as_slab(about) for name, about in tensors.items()}
    whole["files"] = {FILE: {"bytes": head.nbytes, "sha256": "0" * 64, "metadata_crc32": head.metadata_crc32}}
    return manifest_in(whole, path)


def _as_slab(about: Any) -> Any:
    """A tensor of the index as the manifest has it: one slab, or none."""
    if not isinstance(about, dict) or not isinstance(about.get("shape"), list):
        return about
    shape = about["shape"]
    if 0 in shape:
        return {**about, "slabs": []}
    slab = {"start": [0] * len(shape), "stop": shape, "file": FILE, "offset": about.get("offset")}
    slab["crc32"] = about.get("crc32")
    return {**about, "slabs": [slab]}


def _nbytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize
