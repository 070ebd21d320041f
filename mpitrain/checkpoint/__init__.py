"""Checkpoints: the state of a run on the disk, complete or not there.

    every rank     its slabs into .tmp-step-00000100/rank-00003.h5, synced; no file where there is nothing to write
    all            agree: did everybody succeed?  If not, the folder goes and all raise the same error
    rank 0         manifest.json, synced; the folder gets its name; its parent is synced
    all            agree

Whenever the power fails, the run's folder shows complete checkpoints only: the new one, or the one before.  Saving
belongs to the end of a step; it is collective over the world, and so is loading.

A checkpoint knows logical tensors, not ranks.  Loading reads, for each rectangle that this rank holds, whatever
overlaps it in whatever files.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.checkpoint import hdf5
from mpitrain.checkpoint.folders import (
    claim,
    folder_of,
    hold,
    latest,
    locate,
    publish,
    retire_after,
    survey,
    sweep,
    unfinished,
    write_text,
)
from mpitrain.checkpoint.layout import (
    MANIFEST,
    Logical,
    Manifest,
    Slab,
    SlabRef,
    check_slabs,
    counted_here,
    read_manifest,
    slabs_of,
)
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.together import together
from mpitrain.errors import CheckpointError, UserError

__all__ = [
    "Manifest",
    "SlabRef",
    "claim",
    "counted_here",
    "find",
    "hold",
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


def save(
    run: str | os.PathLike[str],
    step: int,
    tensors: Sequence[SlabRef],
    scalars: Mapping[str, Any],
    world: Communicator,
    *,
    layout: Mapping[str, int] | None = None,
) -> Path:
    """Save a run.  Collective over the world.

    Args:
        run: folder of the run, the same on all ranks, on a file system that all see.
        step: steps that are done.
        tensors: this rank's slabs; of each slab of each tensor exactly one rank says `counted_here`.
        scalars: what JSON holds (finite numbers): updates, position in the data, settings.  Rank 0's are saved.
        world: all ranks.
        layout: axis -> ranks, for people.

    Returns:
        The checkpoint, `RUN/checkpoints/step-00000100`.

    Raises:
        CheckpointError: some rank could not write; the same on all ranks.  Earlier checkpoints are untouched and the
            half-written one is gone.

    Cost: each element is written once, by one rank; two small messages.
    """
    folder = folder_of(run, step)
    draft = unfinished(folder)
    file = f"rank-{world.rank:05}.h5"
    counted = [slab for slab in tensors if slab.counted_here]

    def start() -> None:
        check_slabs(tensors)
        if world.rank == 0:
            sweep(run)
            draft.mkdir(parents=True)

    def write() -> int:
        filled = [slab for slab in counted if slab.array.size]
        return hdf5.write(draft / file, filled) if filled else 0

    def conclude() -> None:
        if world.rank == 0:
            manifest = _index(step, told, {slab.name for slab in tensors}, scalars, layout or {})
            write_text(draft / MANIFEST, manifest.to_json())
            publish(folder)

    try:
        _together(world, start, f"{draft} cannot be made")
        size = _together(world, write, f"{draft / file} cannot be written")
        told = world.exchange([file, size, [_entry(slab) for slab in counted]])
        _together(world, conclude, f"{folder} cannot be completed")
    except UserError:
        if world.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise
    return folder


def shapes(path: str | os.PathLike[str], world: Communicator) -> dict[str, tuple[int, ...]]:
    """Name -> full shape of every tensor in a checkpoint.  Collective over the world.

    Raises:
        CheckpointError: its manifest cannot be read; the same on all ranks.
    """
    manifest = _together(world, lambda: read_manifest(Path(path)), f"{path} cannot be read")
    return {name: tensor.shape for name, tensor in manifest.tensors.items()}


def load(
    path: str | os.PathLike[str],
    tensors: Sequence[SlabRef],
    world: Communicator,
    *,
    besides: Collection[str] = (),
) -> dict[str, Any]:
    """Fill this rank's slabs from a checkpoint.  Collective over the world.

    Nothing is written before everything that names, shapes, dtypes and file sizes can tell was checked on all ranks.

    Args:
        path: folder of the checkpoint.
        tensors: this rank's slabs; together with those of all ranks exactly the tensors of the checkpoint.
        world: all ranks.
        besides: names of tensors that nobody wants, if it has them.

    Returns:
        The scalars that were saved, and "step".

    Raises:
        CheckpointError: it does not fit, or is damaged; the same on all ranks.
    """
    folder = Path(path)
    manifest = _together(world, lambda: read_manifest(folder), f"{folder} cannot be read")
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

    def read() -> None:
        for file, pieces in by_file.items():
            try:
                hdf5.read(folder / file, pieces)
            except (OSError, RuntimeError, KeyError) as error:
                raise CheckpointError(f"{folder / file} cannot be read: {hdf5.reason(error)}.") from error

    _together(world, read, f"{folder} cannot be read")
    return {**manifest.scalars, "step": manifest.step}


def find(resume: str, run: str | None, world: Communicator, say: Callable[[str], None] = print) -> Path:
    """The checkpoint that `--resume` means, found by rank 0.  Collective over the world.

    Args:
        resume: `latest`, the folder of a checkpoint, or of a run.
        run: this run's folder.
        world: all ranks.
        say: told, on rank 0, why a newer checkpoint is passed over.

    Raises:
        CheckpointError: there is none; the same on all ranks.
    """

    def look() -> tuple[Path, list[str]] | None:
        return locate(resume, run) if world.rank == 0 else None

    found = _together(world, look, f"--resume {resume}: cannot be read")
    path = world.exchange(None if found is None else os.fspath(found[0]))[0]
    for wrong in found[1] if found else ():
        say(f"Passed over: {wrong}")
    return Path(path)


def _together(world: Communicator, work: Callable[[], Any], otherwise: str) -> Any:
    """`together`, with what the disk refuses as a CheckpointError that begins with `otherwise`."""

    def refused(error: Exception) -> CheckpointError:
        return CheckpointError(f"{otherwise} (rank {world.rank}): {hdf5.reason(error)}.")

    return together(world, work, refused=refused)


def _entry(slab: SlabRef) -> list[Any]:
    """What rank 0 needs to know of a slab."""
    start, stop = [part.start for part in slab.rectangle], [part.stop for part in slab.rectangle]
    return [slab.name, slab.full_shape, slab.array.dtype.name, start, stop]


def _index(
    step: int, told: list[Any], expected: set[str], scalars: Mapping[str, Any], layout: Mapping[str, int]
) -> Manifest:
    """The manifest, from what every rank told of its file and slabs."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    slabs: dict[str, list[Slab]] = {}
    for file, _, entries in told:
        for name, shape, dtype, start, stop in entries:
            known = shapes.setdefault(name, (tuple(shape), dtype))
            assert known == (tuple(shape), dtype), (name, known, shape, dtype)
            rectangle = Slab(tuple(start), tuple(stop), file)
            slabs.setdefault(name, []).extend([rectangle] if all(rectangle.shape) else [])
    tensors = {name: Logical(*shapes[name], tuple(slabs[name])) for name in shapes}
    broken = sorted(expected - set(tensors)) + [name for name, tensor in tensors.items() if not tensor.is_whole]
    if broken:
        raise CheckpointError(f"Nothing was saved: no rank, or more than one, counts some part of {_some(broken)}.")
    versions = {
        "mpitrain": _version(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        **hdf5.versions(),
    }
    files = {file: size for file, size, _ in told if size}
    return Manifest(step, dict(layout), versions, dict(scalars), files, tensors)


def _version() -> str:
    from importlib import metadata  # not at the top: it loads the standard library's mail reader, on every rank

    try:
        return metadata.version("mpitrain")
    except metadata.PackageNotFoundError:
        return "not installed"


def _check_fit(
    folder: Path, manifest: Manifest, wanted: Mapping[str, tuple[tuple[int, ...], str]], besides: Collection[str]
) -> None:
    """Refuse a checkpoint of another model; all ranks see the same, so all raise the same."""
    saved = manifest.tensors
    lines = []
    if missing := [name for name in wanted if name not in saved]:
        lines.append(f"missing in it: {_some(missing)}")
    if unexpected := [name for name in saved if name not in wanted and name not in besides]:
        lines.append(f"unexpected in it: {_some(unexpected)}")
    both = [(name, saved[name], *wanted[name]) for name in wanted if name in saved]
    if odd := [f"{name} is {s.shape}, the model wants {shape}" for name, s, shape, _ in both if s.shape != shape]:
        lines.append(f"of another shape: {_some(odd, 2)}")
    if odd := [f"{name} is {s.dtype}, the model wants {dtype}" for name, s, _, dtype in both if s.dtype != dtype]:
        lines.append(f"of another type: {_some(odd, 2)}")
    if lines:
        raise CheckpointError("\n".join([f"{folder} does not fit the model:", *lines]))


def _some(items: Sequence[str], count: int = 4) -> str:
    rest = f" and {len(items) - count} more" if len(items) > count else ""
    return ", ".join(items[:count]) + rest


def _overlap(slab: SlabRef, source: Slab, dtype: str) -> hdf5.Piece | None:
    """What a slab in a file and a slab of this rank have in common."""
    inside, target = [], []
    for part, start, stop in zip(slab.rectangle, source.start, source.stop, strict=True):
        low, high = max(part.start, start), min(part.stop, stop)
        if low >= high:
            return None
        inside.append(slice(low - start, high - start))
        target.append(slice(low - part.start, high - part.start))
    return hdf5.Piece(slab.name, source.shape, dtype, tuple(inside), slab.array, tuple(target))
