"""The one place that knows the files of a checkpoint: a rank's slabs into a file, rectangles out of it.

A file is HDF5: contiguous datasets, one a slab, under the tensor's name; nothing else, no attributes, links, filters or
chunks, and its metadata carry checksums (`libver` v110).  HDF5 only lays it out, in memory:

    metadata | large slabs, each at a page of its own | small slabs, one after the other | a little more of metadata

Once that is known, the file is written once, front to back, by plain writes, while a thread takes the sums
(`sums`): SHA-256 of the file, CRC-32 of each block of each slab and of all that is no slab.  So the same values make
the same bytes, a disk that is full says so itself, and nobody has to read a file again to know its sums.

Reading goes past HDF5, too: at the offset that the manifest says, block by block, each compared with its CRC-32 before
its values are used.  The metadata are compared as well, and then what they say with what the manifest says (`check`).
"""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain import disk
from mpitrain.backend import Array, to_device, to_host
from mpitrain.checkpoint import foreign_walk
from mpitrain.checkpoint.manifest import BLOCK, FileEntry, Manifest, Slab
from mpitrain.checkpoint.sums import AHEAD, Comparison, Sums
from mpitrain.datasets import lay_out
from mpitrain.errors import CheckpointDamaged

AT_ONCE = 1 << 24  # bytes that are written before the disk begins with them
ALIGNED = 4096  # bytes, for slabs of as many pages as make it worth the gap
_ANOTHER = "Resume from another checkpoint."


class Part(NamedTuple):
    """What a rank writes of a tensor: slices of an array, taken when their turn comes; none is empty."""

    name: str
    array: Array
    part: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is written."""
        return tuple(part.stop - part.start for part in self.part)

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return math.prod(self.shape) * int(self.array.dtype.itemsize)


class Written(NamedTuple):
    """A file that is on the disk.

    entry: for the manifest; slabs: tensor's name -> where its bytes begin, and the CRC-32 of each block of them.
    """

    entry: FileEntry
    slabs: Mapping[str, tuple[int, tuple[int, ...]]]


def write(path: Path, parts: Sequence[Part]) -> Written:
    """Write a file and have it on the disk.

    Args:
        path: of the new file.
        parts: its slabs.

    Raises:
        OSError: the file system refused.

    Cost: each byte once to the disk; memory for the largest slab that is not contiguous, not NumPy's or in a store.
    """
    by_name = {part.name: part for part in parts}
    datasets = [(part.name, part.shape, part.array.dtype) for part in parts]
    stay = all(isinstance(part.array, np.ndarray) and part.array[part.part].flags.c_contiguous for part in parts)
    return write_blocks(path, datasets, lambda name: in_blocks(_bytes_of(by_name[name])), ahead=None if stay else AHEAD)


def write_blocks(
    path: Path,
    datasets: Sequence[tuple[str, tuple[int, ...], Any]],
    blocks: Callable[[str], Iterable[memoryview]],
    head: int = 0,
    ahead: int | None = AHEAD,
) -> Written:
    """Write a file whose values come a block at a time, and have it on the disk.

    Args:
        path: of the new file.
        datasets: name, shape and dtype of each; none is empty.
        blocks: name -> the bytes of its values, in blocks of `BLOCK`; asked for in the order of the file.
        head: bytes at the front that HDF5 leaves free, zero for now: none, or `ALIGNED` or a larger power of two.
        ahead: blocks by which sums may be behind; None: any number, since the blocks are there anyway.

    Raises:
        OSError: the file system refused.
    """
    image, offsets, size = _image(datasets, head)
    sizes = {name: _nbytes(shape, dtype) for name, shape, dtype in datasets}
    sums = Sums(ahead)
    file, begun = disk.create(path), 0
    try:
        for start, stop, name in extents(offsets, sizes, size):
            for block in blocks(name) if name else in_blocks(image.cut(start, stop)):
                sums.add(name, block)
                disk.write(file, path, block, start)
                start += len(block)
                if start - begun >= AT_ONCE:
                    disk.begin_sync(file, begun, start - begun)
                    begun = start
            assert start == stop, (name, start, stop)
        disk.sync(file, path)
        crcs, digest = sums.told()
    finally:
        sums.close()
        os.close(file)
    metadata = crcs.pop("", (0,))[0]
    return Written(FileEntry(size, digest, metadata), {name: (offsets[name], crcs[name]) for name in offsets})


def _nbytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * int(np.dtype(dtype).itemsize)


def in_blocks(data: memoryview) -> Iterator[memoryview]:
    """Bytes, `BLOCK` at a time."""
    for at in range(0, len(data), BLOCK):
        yield data[at : at + BLOCK]


def read_back(path: Path, written: Written, parts: Sequence[Part]) -> None:
    """Read a file that was just written and compare it with the sums of what it should hold.

    Raises:
        CheckpointDamaged: it holds something else; names file and tensor.
        OSError: it cannot be read.
    """
    with disk.opened(path) as file:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # from the disk, where the system lets one ask for that
        for part in parts:
            slab = Slab((0,) * len(part.shape), part.shape, path.name, *written.slabs[part.name])
            reader = _Reader(file, path, part.name, part.array.dtype.name, slab)
            for number in range(len(slab.crc32)):
                reader.block(number)


# ------------------------------------------------------------------------------------------------------------ the image


class _Image:
    """A file as HDF5 writes it, in memory, without the values: what is not written takes no room."""

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}
        self._at = 0
        self.size = 0

    def write(self, data: Any) -> int:
        piece = bytes(data)
        for page, low, high in _on_pages(self._at, self._at + len(piece)):
            held = self._pages.setdefault(page, bytearray(ALIGNED))
            at = page * ALIGNED
            held[low - at : high - at] = piece[low - self._at : high - self._at]
        self._at += len(piece)
        self.size = max(self.size, self._at)
        return len(piece)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def truncate(self, size: int) -> int:
        self.size = size
        return size

    def read(self, size: int = -1) -> bytes:
        stop = self.size if size < 0 else min(self._at + size, self.size)
        found = bytes(self.cut(self._at, max(self._at, stop)))
        self._at += len(found)
        return found

    def readinto(self, buffer: Any) -> int:
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def flush(self) -> None:
        """Nothing is held back."""

    def cut(self, start: int, stop: int) -> memoryview:
        """Bytes start ... stop."""
        found = bytearray(stop - start)
        for page, low, high in _on_pages(start, stop):
            if page in self._pages:
                at = page * ALIGNED
                found[low - start : high - start] = self._pages[page][low - at : high - at]
        return memoryview(found)


def _on_pages(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The pages that some bytes lie on, and which of the bytes lie there."""
    for page in range(start // ALIGNED, -(-stop // ALIGNED)):
        yield page, max(start, page * ALIGNED), min(stop, (page + 1) * ALIGNED)


def _image(datasets: Sequence[tuple[str, tuple[int, ...], Any]], head: int = 0) -> tuple[_Image, dict[str, int], int]:
    """A file without its values, where they go, and its size; `head` bytes at the front are not HDF5's."""
    import h5py

    image = _Image()
    aligned = {"alignment_threshold": 16 * ALIGNED, "alignment_interval": ALIGNED}
    with h5py.File(image, "w", libver=("v110", "v110"), userblock_size=head, **aligned) as file:
        large_first = sorted(datasets, key=lambda dataset: _nbytes(*dataset[1:]) < 16 * ALIGNED)  # fewer gaps
        offsets = lay_out(file, large_first, metadata_first=True)
    return image, offsets, image.size


def extents(offsets: Mapping[str, int], sizes: Mapping[str, int], size: int) -> Iterator[tuple[int, int, str]]:
    """Start, stop and name of each slab and, with the name "", of what lies between; in the order of the file."""
    at = 0
    for name in sorted(offsets, key=lambda name: offsets[name]):
        if at < offsets[name]:
            yield at, offsets[name], ""
        at = offsets[name] + sizes[name]
        yield offsets[name], at, name
    if at < size:
        yield at, size, ""


def _bytes_of(part: Part) -> memoryview:
    """The values, in memory of this host, as bytes."""
    return memoryview(np.ascontiguousarray(to_host(part.array[part.part])).reshape(-1).view(np.uint8))


# -------------------------------------------------------------------------------------------------------------- reading


class Piece(NamedTuple):
    """Part of a slab in a file, and where it goes.

    Attributes:
        name: of the tensor.
        dtype: of it.
        slab: in the file.
        source: slices of the slab.
        array: where values are written.
        target: slices of `array`, of the same shape as source.
    """

    name: str
    dtype: str
    slab: Slab
    source: tuple[slice, ...]
    array: Array
    target: tuple[slice, ...]


def read(path: Path, pieces: Iterable[Piece]) -> None:
    """Read pieces of a file's slabs into their arrays, each block compared with its sum.

    Raises:
        CheckpointDamaged: the bytes are not those that were written; names file and tensor.
        OSError: the file cannot be read.

    Cost: of a slab the rows that a piece touches; memory for a block, or a row of the slab where that is larger.
    """
    comparison = Comparison()
    try:
        with disk.opened(path) as file:
            for piece in _in_order(pieces):
                _Reader(file, path, piece.name, piece.dtype, piece.slab, comparison).fill(piece)
        comparison.finish()
    finally:
        comparison.close()


def _in_order(pieces: Iterable[Piece]) -> list[Piece]:
    """As they lie in the file: a disk likes to be read from front to back."""
    return sorted(pieces, key=lambda piece: piece.slab.offset)


def blocks(path: Path, name: str, dtype: str, slab: Slab) -> Iterator[memoryview]:
    """All bytes of a slab, block by block, compared with their sums; the memory is used again.

    Raises:
        CheckpointDamaged, OSError: as `read`.
    """
    with disk.opened(path) as file:
        reader = _Reader(file, path, name, dtype, slab)
        for number in range(len(slab.crc32)):
            yield reader.block(number)


class _Reader:
    """Reads the bytes of one slab, whole blocks at a time.

    With a comparison, what goes straight to its place may be compared later.
    """

    def __init__(
        self, file: int, path: Path, name: str, dtype: str, slab: Slab, comparison: Comparison | None = None
    ) -> None:
        self._file, self._path, self._name, self._slab, self._comparison = file, path, name, slab, comparison
        self._dtype = np.dtype(dtype)
        self._nbytes = slab.elements * self._dtype.itemsize
        self._buffer = memoryview(b"")
        self._held = -1  # the block in the buffer

    def fill(self, piece: Piece) -> None:
        """Write a piece into its array: straight where it goes if that is memory of this host."""
        if isinstance(piece.array, np.ndarray):
            self._rows(piece, piece.array[(*piece.target, ...)])  # a view, also of a scalar
            return
        values = np.empty([part.stop - part.start for part in piece.source], self._dtype)
        self._rows(piece, values)
        piece.array[piece.target] = to_device(values, like=piece.array)

    def _rows(self, piece: Piece, target: Array) -> None:
        """The rows of a piece: in one go if nothing lies between them, there and here, else a few at a time."""
        whole = piece.slab.shape
        row = self._dtype.itemsize * int(np.prod(whole[1:], dtype=np.int64))
        first, last = (piece.source[0].start, piece.source[0].stop) if whole else (0, 1)
        inner = piece.source[1:]
        in_one = all(part.stop - part.start == length for part, length in zip(inner, whole[1:], strict=True))
        if in_one and target.flags.c_contiguous:
            self._bytes(first * row, last * row, _memory(target))
            return
        many = max(1, BLOCK // max(row, 1))
        for start in range(first, last, many):
            stop = min(start + many, last)
            some = np.empty((stop - start, *whole[1:]), self._dtype)
            self._bytes(start * row, stop * row, _memory(some))
            target[start - first : stop - first] = some[(slice(None), *inner)]

    def _bytes(self, start: int, stop: int, into: memoryview) -> None:
        """Bytes start ... stop of the slab."""
        at = start
        while at < stop:
            number = at // BLOCK
            low, high = number * BLOCK, min((number + 1) * BLOCK, self._nbytes)
            end = min(high, stop)
            if (at, end) == (low, high) and self._held != number:
                self._read(number, into[at - start : end - start], self._comparison)
            else:
                into[at - start : end - start] = self.block(number)[at - low : end - low]
            at = end

    def block(self, number: int) -> memoryview:
        """One block, in memory that the next one may take."""
        length = min(BLOCK, self._nbytes - number * BLOCK)
        if self._held != number:
            self._held = -1
            if not self._buffer:
                self._buffer = memoryview(bytearray(min(BLOCK, self._nbytes)))
            self._read(number, self._buffer[:length])
            self._held = number
        return self._buffer[:length]

    def _read(self, number: int, into: memoryview, comparison: Comparison | None = None) -> None:
        at, crc = self._slab.offset + number * BLOCK, self._slab.crc32[number]
        disk.read(self._file, self._path, into, at)

        def differs() -> CheckpointDamaged:
            return CheckpointDamaged(
                f"{self._path} is damaged: {self._name} is not what was written (its bytes from {at} to"
                f" {at + len(into)} have another CRC-32).  {_ANOTHER}"
            )

        if comparison is not None:
            comparison.add(into, crc, differs)
        elif zlib.crc32(into) != crc:
            raise differs()


def _memory(array: Array) -> memoryview:
    """The bytes of a contiguous array, to be written."""
    return memoryview(array.reshape(-1).view(np.uint8))


# ------------------------------------------------------------------------------------------------------------ structure


def check(folder: Path, manifest: Manifest, file: str) -> None:
    """Compare what is no slab in a file with its sum, and then what it says with the manifest.

    HDF5 looks at the file only when every byte that it will look at is known to be one that was written with the
    manifest.  A name is walked link by link, each must be a plain one inside the file.

    Raises:
        CheckpointDamaged: names the file, and the tensor if it is one's.
        OSError, RuntimeError, KeyError, ValueError, TypeError: it cannot be read; see `reason`.
    """
    import h5py

    path, entry = folder / file, manifest.files[file]
    held = {name: (t.dtype, slab) for name, t in manifest.tensors.items() for slab in t.slabs if slab.file == file}
    offsets = {name: slab.offset for name, (_, slab) in held.items()}
    sizes = {name: slab.elements * np.dtype(dtype).itemsize for name, (dtype, slab) in held.items()}
    found = 0
    with disk.opened(path) as descriptor:
        for start, stop, name in extents(offsets, sizes, entry.nbytes):
            if not name:
                for at in range(start, stop, BLOCK):
                    data = bytearray(min(BLOCK, stop - at))
                    disk.read(descriptor, path, data, at)
                    found = zlib.crc32(data, found)
        if found != entry.metadata_crc32:
            raise CheckpointDamaged(f"{path} is damaged: its metadata are not what was written.  {_ANOTHER}")
        # The very file that was read, whatever has its name by now.
        with h5py.File(f"/dev/fd/{descriptor}", "r", locking=False) as h5:
            check_datasets(h5, path, held)


def check_datasets(h5: Any, path: Path, held: Mapping[str, tuple[str, Slab]]) -> None:
    """That datasets are plain ones, at the places that the manifest says.

    Args:
        h5: the open file.
        path: of it.
        held: name -> dtype and slab.

    Raises:
        CheckpointDamaged: one is not.
        OSError, RuntimeError, KeyError, ValueError, TypeError: HDF5 cannot read it.
    """
    try:
        for name, *found in foreign_walk.describe(h5.id, list(held), h5.id.get_filesize()):
            dtype, slab = held[name]
            if found != [list(slab.shape), dtype, {"offset": slab.offset}]:
                raise CheckpointDamaged(
                    f"{path} is damaged: {name} must be a contiguous dataset of {dtype} {slab.shape} at byte"
                    f" {slab.offset}.  {_ANOTHER}"
                )
    except foreign_walk.Refused as refused:
        raise CheckpointDamaged(f"{path} is damaged: {' '.join(refused.args)}.  {_ANOTHER}") from None


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
