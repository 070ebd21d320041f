"""The one place that touches HDF5: a rank's slabs into a file, rectangles out of it.

A file holds contiguous datasets, one a slab, under the tensor's name; nothing else: no attributes, links, filters or
chunks.  Its metadata carry checksums (`libver` v110).  Reading believes nothing that the manifest does not say: a name
is walked link by link, each must be a plain one inside the file, and shape, dtype and storage are compared before any
value is read.

h5py is imported when the first checkpoint is written or read, not before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import Array, array_module, to_device, to_host
from mpitrain.checkpoint.folders import sync_file
from mpitrain.checkpoint.layout import SlabRef
from mpitrain.errors import CheckpointError


class Piece(NamedTuple):
    """Part of a slab in a file, and where it goes.

    Attributes:
        name: of the tensor.
        shape: of the slab in the file.
        dtype: of it.
        source: slices of the slab.
        array: where values are written.
        target: slices of `array`, of the same shape as source.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    source: tuple[slice, ...]
    array: Array
    target: tuple[slice, ...]


def write(path: Path, slabs: Iterable[SlabRef]) -> int:
    """Write slabs into a new file and have it on the disk.

    Returns:
        Size of the file in bytes.

    Raises:
        OSError, RuntimeError: the file system or HDF5 refused; see `reason`.
    """
    import h5py

    with open(path, "xb+", buffering=0) as raw:
        disk = _Disk(raw)
        with h5py.File(disk, "w", libver=("v110", "v110")) as file:
            for slab in slabs:
                file.create_dataset(slab.name, data=np.asarray(to_host(slab.array), order="C"))
        if disk.refused is not None:
            raise disk.refused
    return sync_file(path)


class _Disk:
    """A new file as HDF5 writes it, which never hears that the disk is full.

    A write that fails while HDF5 closes a file leaves the library with what it cannot let go: it complains for ever, or
    crashes.  So the first refusal is kept for `write` to raise, and what follows goes nowhere.
    """

    def __init__(self, raw: FileIO) -> None:
        self._raw = raw
        self.refused: OSError | None = None
        self.read, self.readinto, self.seek, self.tell = raw.read, raw.readinto, raw.seek, raw.tell

    def write(self, data: memoryview) -> int:
        """Take all of the data, or remember why not."""
        view = memoryview(data).cast("B")
        while view and self.refused is None:
            try:
                view = view[self._raw.write(view) :]
            except OSError as error:
                self.refused = error
        return memoryview(data).nbytes

    def truncate(self, size: int) -> int:
        """Give the file its length, or remember why not."""
        try:
            return self._raw.truncate(size)
        except OSError as error:
            self.refused = self.refused or error
            return size

    def flush(self) -> None:
        """Nothing is held back."""


def read(path: Path, pieces: Iterable[Piece]) -> None:
    """Read pieces of a file's slabs into their arrays.

    Raises:
        CheckpointError: the file is not what the manifest says; names file and tensor.
        OSError, RuntimeError, KeyError: it cannot be read; see `reason`.
    """
    import h5py

    with h5py.File(path, "r", locking="best-effort") as file:
        for piece in pieces:
            dataset = _dataset(file, piece, path)
            if array_module(piece.array) is np and piece.array.flags.c_contiguous:
                dataset.read_direct(piece.array, piece.source, piece.target)
            else:
                piece.array[piece.target] = to_device(dataset[piece.source], like=piece.array)


def _dataset(file: Any, piece: Piece, path: Path) -> Any:
    """The dataset of a slab, if it is a plain one."""
    import h5py

    node = file
    for part in piece.name.split("/"):
        plain = isinstance(node, h5py.Group) and isinstance(node.get(part, getlink=True), h5py.HardLink)
        if not plain:
            raise CheckpointError(f"{path} is damaged: it does not hold {piece.name}.  Resume from another checkpoint.")
        node = node[part]
    expected = np.dtype(piece.dtype)
    fits = (
        isinstance(node, h5py.Dataset)
        and node.shape == piece.shape
        and node.dtype == expected
        and node.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS
        and node.external is None
        and node.id.get_storage_size() == expected.itemsize * int(np.prod(piece.shape, dtype=np.int64))
    )
    if not fits:
        raise CheckpointError(
            f"{path} is damaged: {piece.name} must be a contiguous dataset of {piece.dtype} {piece.shape}.  "
            "Resume from another checkpoint."
        )
    return node


def reason(error: Exception) -> str:
    """Why the operating system or HDF5 refused, in few words."""
    if isinstance(error, OSError) and error.strerror and len(error.strerror) < 80:
        return error.strerror
    text = " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split())
    told = re.search(r"error message = '([^']{1,80})'", text)
    return told.group(1) if told else text[:120]


def versions() -> dict[str, str]:
    """The libraries that write a file."""
    import h5py

    return {"h5py": h5py.version.version, "hdf5": h5py.version.hdf5_version}
