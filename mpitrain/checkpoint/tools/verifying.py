"""`mpitrain checkpoint verify`: every byte of a checkpoint against every sum that its index holds.

Each file is read once, front to back, while a thread takes the sums: the SHA-256 of the file, the CRC-32 of each block
of each tensor, the CRC-32 of all that is no tensor.  HDF5 then looks at a file only if what it will parse is known to
be what was written.  All damage is told, by file and tensor, not the first of it.
"""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain import disk
from mpitrain.checkpoint import hdf5
from mpitrain.checkpoint.manifest import BLOCK, MANIFEST, FileEntry, Manifest, Slab, read_alone
from mpitrain.checkpoint.sums import AHEAD, Sums
from mpitrain.checkpoint.tools import onefile
from mpitrain.errors import CheckpointDamaged, CheckpointError
from mpitrain.options import show


class Damage(NamedTuple):
    """One thing that is wrong.

    file: its name; tensor: whose values are wrong, "" where they are nobody's; what: is wrong.
    """

    file: str
    tensor: str
    what: str


@dataclass
class Verdict:
    """What was found of one checkpoint.

    Attributes:
        path: folder or file.
        tensors, files: how many it has.
        nbytes: that were read.
        seconds: that it took.
        damages: in the order of the files.
        strangers: names in the folder that the manifest does not know.
    """

    path: Path
    tensors: int = 0
    files: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    damages: list[Damage] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damages


def verify(path: Path, told: Callable[[int], None] = lambda nbytes: None) -> Verdict:
    """Read a checkpoint, or one file, and compare it with its index.

    Args:
        path: folder or file.
        told: called with the number of bytes that were read.

    Raises:
        CheckpointError: it is no checkpoint, or of another format.  Damage is not raised.
    """
    verdict = Verdict(path)
    began = time.perf_counter()
    try:
        if path.is_dir():
            _folder(path, verdict, told)
        else:
            _one_file(path, verdict, told)
    except CheckpointDamaged as error:  # of the index itself
        verdict.damages.append(Damage(MANIFEST if path.is_dir() else path.name, "", _without_advice(str(error))))
    verdict.seconds = time.perf_counter() - began
    return verdict


def nbytes_of(path: Path) -> int:
    """Bytes that `verify` will read, about."""
    if not path.is_dir():
        return path.stat().st_size
    try:
        return sum(entry.nbytes for entry in read_alone(path).files.values())
    except CheckpointError:
        return 0


def _folder(path: Path, verdict: Verdict, told: Callable[[int], None]) -> None:
    manifest = read_alone(path)
    verdict.tensors, verdict.files = len(manifest.tensors), len(manifest.files)
    verdict.strangers = sorted(set(os.listdir(path)) - {MANIFEST, *manifest.files})
    for name, entry in manifest.files.items():
        held = _held(manifest, name)
        scan = _scan(path / name, name, entry, held, told)
        verdict.nbytes += scan.nbytes
        damages = scan.damages
        if scan.complete:
            if scan.metadata_crc32 != entry.metadata_crc32:
                damages.append(Damage(name, "", "its HDF5 metadata are not what was written"))
            else:
                damages += _structure(path / name, name, held)
            if scan.sha256 != entry.sha256 and not damages:
                damages.append(Damage(name, "", "its SHA-256 is not the manifest's, though the sums of all parts are"))
        verdict.damages += damages


def _one_file(path: Path, verdict: Verdict, told: Callable[[int], None]) -> None:
    head = onefile.read_head(path)
    if head is None:
        raise CheckpointError(f"{show(path)}: is not a checkpoint of mpitrain; there are no sums to compare it with.")
    manifest = onefile.read_index(path, head)
    verdict.tensors, verdict.files = len(manifest.tensors), 1
    held = _held(manifest, onefile.FILE)
    index = Slab((0,), (head.length,), onefile.FILE, head.offset, ())
    known = {**held, onefile.INDEX: ("uint8", index)}
    scan = _scan(path, path.name, manifest.files[onefile.FILE], known, told, head=onefile.HEAD)
    verdict.nbytes, verdict.damages = scan.nbytes, scan.damages
    if scan.complete and scan.metadata_crc32 != head.metadata_crc32:
        verdict.damages.append(Damage(path.name, "", "its HDF5 metadata are not what was written"))
    elif scan.complete:
        verdict.damages += _structure(path, path.name, known)


def _held(manifest: Manifest, file: str) -> dict[str, tuple[str, Slab]]:
    """The slabs in a file: tensor's name -> dtype and slab."""
    return {n: (t.dtype, slab) for n, t in manifest.tensors.items() for slab in t.slabs if slab.file == file}


# ----------------------------------------------------------------------------------------------------------------- scan


class _Scan(NamedTuple):
    """A file that was read: bytes, whether all of it was there, its sums, and what is wrong with its tensors."""

    nbytes: int
    complete: bool
    sha256: str
    metadata_crc32: int
    damages: list[Damage]


def _scan(
    path: Path,
    name: str,
    entry: FileEntry,
    held: Mapping[str, tuple[str, Slab]],
    told: Callable[[int], None],
    head: int = 0,
) -> _Scan:
    """Read a file once, and compare the blocks of its tensors with their sums.

    Args:
        path: of the file.
        name: of it, in what is told.
        entry: what the index says of it.
        held: the slabs in it; those without sums are read, and not compared.
        told: called with the number of bytes that were read.
        head: bytes at the front that count as zeros.
    """
    offsets = {tensor: slab.offset for tensor, (_, slab) in held.items()}
    sizes = {tensor: slab.elements * np.dtype(dtype).itemsize for tensor, (dtype, slab) in held.items()}
    try:
        about = os.lstat(path)
        if not stat.S_ISREG(about.st_mode):
            return _Scan(0, False, "", 0, [Damage(name, "", "is not a regular file"), *_all_of(name, held)])
        with disk.opened(path) as file:
            damages, done = [], 0
            if about.st_size != entry.nbytes:
                damages.append(Damage(name, "", f"has {about.st_size} bytes; {entry.nbytes} were written"))
            buffers = [bytearray(BLOCK) for _ in range(AHEAD + 2)]  # a sum may be behind by so many
            sums = Sums()
            try:
                for start, stop, tensor in hdf5.extents(offsets, sizes, entry.nbytes):
                    for at in range(start, min(stop, about.st_size), BLOCK):
                        length = min(BLOCK, stop - at, about.st_size - at)
                        buffers.append(buffers.pop(0))
                        block = memoryview(buffers[0])[:length]
                        disk.read(file, path, block, at)
                        if at < head:
                            block[: head - at] = bytes(min(head - at, length))
                        sums.add(tensor, block)
                        done += length
                        told(length)
                crcs, sha256 = sums.told()
            finally:
                sums.close()
    except FileNotFoundError:
        return _Scan(0, False, "", 0, [Damage(name, "", "is missing"), *_all_of(name, held)])
    except OSError as error:
        damage = Damage(name, "", f"cannot be read: {hdf5.reason(error)}")
        return _Scan(0, False, "", 0, [damage, *_all_of(name, held)])
    for tensor, (_, slab) in held.items():
        damages += _of_tensor(name, tensor, slab, sizes[tensor], crcs.get(tensor, ()), about.st_size)
    return _Scan(done, about.st_size >= entry.nbytes, sha256, crcs.get("", (0,))[0], damages)


def _all_of(name: str, held: Mapping[str, tuple[str, Slab]]) -> list[Damage]:
    return [Damage(name, tensor, "lies in it") for tensor in held]


def _of_tensor(name: str, tensor: str, slab: Slab, nbytes: int, found: Sequence[int], size: int) -> list[Damage]:
    """What is wrong with one tensor in a file of `size` bytes."""
    damages = []
    if slab.offset + nbytes > size:
        behind = min(nbytes, slab.offset + nbytes - size)
        damages.append(Damage(name, tensor, f"its last {behind} of {nbytes} bytes lie behind the end of the file"))
        found = found[: max(0, size - slab.offset) // BLOCK]  # the last block that is there may be cut
    bad = [i for i, (crc, written) in enumerate(zip(found, slab.crc32, strict=False)) if crc != written]
    for first, last in _runs(bad):
        start, stop = slab.offset + first * BLOCK, slab.offset + min((last + 1) * BLOCK, nbytes)
        damages.append(Damage(name, tensor, f"its bytes from {start} to {stop} are not what was written"))
    return damages


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _structure(path: Path, name: str, held: Mapping[str, tuple[str, Slab]]) -> list[Damage]:
    """What HDF5 says otherwise than the index; its metadata are known to be those that were written."""
    import h5py

    damages = []
    try:
        with h5py.File(path, "r", locking=False) as file:
            for tensor, (dtype, slab) in held.items():
                try:
                    hdf5.check_datasets(file, path, {tensor: (dtype, slab)})
                except CheckpointDamaged as error:
                    said = _without_advice(str(error)).partition(" is damaged: ")[2]
                    damages.append(Damage(name, tensor, said.removeprefix(tensor).strip()))
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        damages.append(Damage(name, "", f"HDF5 cannot read it: {hdf5.reason(error)}"))
    return damages


def _without_advice(text: str) -> str:
    return text.partition(".  Resume from")[0].partition(".  Use")[0]


# ----------------------------------------------------------------------------------------------------------------- JSON


def as_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "whole": all(verdict.whole for verdict in verdicts),
        "checkpoints": [
            {
                "path": str(v.path),
                "whole": v.whole,
                "tensors": v.tensors,
                "files": v.files,
                "bytes": v.nbytes,
                "seconds": round(v.seconds, 4),
                "bytes_per_second": math.floor(v.nbytes / max(v.seconds, 1e-9)),
                "damages": [damage._asdict() for damage in v.damages],
                "not_of_it": v.strangers,
            }
            for v in verdicts
        ],
    }
