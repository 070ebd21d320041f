"""Checkpoints: the state of a run on the disk, complete or not there.

    save, begin      this rank's slabs, and those of all others, become a checkpoint (saving.py)
    find             the checkpoint that `--resume` means (folders.py)
    load             a checkpoint fills this rank's slabs

All are collective over the world.  A checkpoint knows logical tensors, not ranks.  Loading reads, for each rectangle
that this rank holds, whatever overlaps it in whatever files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.checkpoint import hdf5
from mpitrain.checkpoint.folders import claim, hold, is_of, latest, locate, retire_after, survey, sweep
from mpitrain.checkpoint.layout import SlabRef, counted_here, holder, slabs_of
from mpitrain.checkpoint.manifest import Manifest, Slab, read_manifest
from mpitrain.checkpoint.saving import Saving, Snapshot, agreed, begin, save, some
from mpitrain.comm.communicator import Communicator
from mpitrain.errors import CheckpointDamaged, CheckpointError
from mpitrain.recording.outside import heard

__all__ = [
    "Manifest",
    "Saving",
    "SlabRef",
    "Snapshot",
    "agreed",
    "begin",
    "claim",
    "counted_here",
    "find",
    "hold",
    "holder",
    "is_of",
    "latest",
    "load",
    "read_manifest",
    "retire_after",
    "save",
    "shapes",
    "slabs_of",
    "survey",
    "sweep",
]


def shapes(path: str | os.PathLike[str], world: Communicator) -> dict[str, tuple[int, ...]]:
    """Name -> full shape of every tensor in a checkpoint.  Collective over the world.

    Raises:
        CheckpointError: its manifest cannot be read; the same on all ranks.
    """
    manifest = agreed(world, lambda: read_manifest(Path(path)), f"{path} cannot be read")
    return {name: tensor.shape for name, tensor in manifest.tensors.items()}


def load(
    path: str | os.PathLike[str],
    tensors: Sequence[SlabRef],
    world: Communicator,
    *,
    besides: Collection[str] = (),
) -> dict[str, Any]:
    """Fill this rank's slabs from a checkpoint.  Collective over the world.

    Nothing is written before everything that names, shapes, dtypes, sizes and structure of files can tell was checked
    on all ranks; values are compared with their sums as they are read.

    Args:
        path: folder of the checkpoint.
        tensors: this rank's slabs; together with those of all ranks exactly the tensors of the checkpoint.
        world: all ranks.
        besides: names of tensors that nobody wants, if it has them.

    Returns:
        The scalars that were saved, and "step".

    Raises:
        CheckpointDamaged: files are not what was written; the same on all ranks.  Some slabs may be filled.
        CheckpointError: it does not fit; the same on all ranks, and no slab was touched.

    Cost: of each slab in a file the rows that overlap one of this rank's; memory for 4 MiB, or for a row of it where
    that is larger.
    """
    folder = Path(path)
    manifest = agreed(world, lambda: read_manifest(folder), f"{folder} cannot be read")
    wanted: dict[str, tuple[tuple[int, ...], str]] = {}
    mine = [(slab.name, slab.full_shape, slab.array.dtype.name) for slab in tensors]
    for rank_wants in world.exchange(mine):
        wanted.update((name, (tuple(shape), dtype)) for name, shape, dtype in rank_wants)
    _check_fit(folder, manifest, wanted, besides)
    by_file: dict[str, list[hdf5.Piece]] = {}
    for slab in tensors:
        for source in manifest.tensors[slab.name].slabs:
            piece = _overlap(slab, source, manifest.tensors[slab.name].dtype)
            if piece is not None:
                by_file.setdefault(source.file, []).append(piece)

    def check() -> None:
        for file in sorted(manifest.files)[world.rank :: world.size]:
            _of_file(folder / file, lambda file=file: hdf5.check(folder, manifest, file))

    def read() -> None:
        for file, pieces in by_file.items():
            _of_file(folder / file, lambda file=file, pieces=pieces: hdf5.read(folder / file, pieces))

    agreed(world, check, f"{folder} cannot be read")
    agreed(world, read, f"{folder} cannot be read")
    return {**manifest.scalars, "step": manifest.step}


def _of_file(path: Path, work: Callable[[], None]) -> None:
    """Do something with a file; what the system or HDF5 refuses is damage of this file."""
    try:
        work()
    except CheckpointError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        raise CheckpointDamaged(f"{path} cannot be read: {hdf5.reason(error)}.") from error


def find(resume: str, run: str | None, world: Communicator, say: Callable[[str], None] = print) -> list[Path]:
    """The checkpoints that `--resume` means, found by rank 0.  Collective over the world.

    Args:
        resume: `latest`, `auto`, the folder of a checkpoint, or of a run.
        run: this run's folder.
        world: all ranks.
        say: told, on rank 0, why a newer checkpoint is passed over.

    Returns:
        The one to go on from, and older ones for the case that it turns out to be damaged; of `auto` maybe none.

    Raises:
        CheckpointError: there is none; the same on all ranks.
    """

    def look() -> tuple[list[str], list[str]] | None:
        return heard("checkpoints", located) if world.rank == 0 else None

    def located() -> tuple[list[str], list[str]]:
        paths, wrong = locate(resume, run)
        return [os.fspath(path) for path in paths], wrong

    found = agreed(world, look, f"--resume {resume}: cannot be read")
    paths = world.exchange(None if found is None else found[0])[0]
    for wrong in found[1] if found else ():
        say(f"Passed over: {wrong}")
    return [Path(path) for path in paths]


def _check_fit(
    folder: Path, manifest: Manifest, wanted: Mapping[str, tuple[tuple[int, ...], str]], besides: Collection[str]
) -> None:
    """Refuse a checkpoint of another model; all ranks see the same, so all raise the same."""
    saved = manifest.tensors
    lines = []
    if missing := [name for name in wanted if name not in saved]:
        lines.append(f"missing in it: {some(missing)}")
    if unexpected := [name for name in saved if name not in wanted and name not in besides]:
        lines.append(f"unexpected in it: {some(unexpected)}")
    both = [(name, saved[name], *wanted[name]) for name in wanted if name in saved]
    if odd := [f"{name} is {s.shape}, the model wants {shape}" for name, s, shape, _ in both if s.shape != shape]:
        lines.append(f"of another shape: {some(odd, 2)}")
    if odd := [f"{name} is {s.dtype}, the model wants {dtype}" for name, s, _, dtype in both if s.dtype != dtype]:
        lines.append(f"of another type: {some(odd, 2)}")
    if lines:
        raise CheckpointError("\n".join([f"{folder} does not fit the model:", *lines]))


def _overlap(slab: SlabRef, source: Slab, dtype: str) -> hdf5.Piece | None:
    """What a slab in a file and a slab of this rank have in common."""
    inside, target = [], []
    for part, start, stop in zip(slab.rectangle, source.start, source.stop, strict=True):
        low, high = max(part.start, start), min(part.stop, stop)
        if low >= high:
            return None
        inside.append(slice(low - start, high - start))
        target.append(slice(low - part.start, high - part.start))
    return hdf5.Piece(slab.name, dtype, source, tuple(inside), slab.array, tuple(target))
