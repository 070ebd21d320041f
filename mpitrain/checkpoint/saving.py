"""Saving: the state of a run to the disk, complete or not there; at once, or while training goes on.

    all            agree: is it possible?                                     rank 0 has made .tmp-step-00000100/
    every rank     its part of the slabs into .tmp-step-00000100/rank-00003.h5, synced; no file where there is nothing
    all            agree: did everybody succeed?  If not, the folder goes and all raise the same error
    rank 0         manifest.json, synced; the folder gets its name; its parent is synced
    all            agree

In the background the second line is done by a thread of its own, from a copy of the slabs in memory of the host.
Whenever the power fails, the run's folder shows complete checkpoints only: the new one, or the one before.
"""

from __future__ import annotations

import contextvars
import os
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain import disk
from mpitrain.backend import Array, to_host
from mpitrain.checkpoint import hdf5
from mpitrain.checkpoint.folders import folder_of, keep_newest, publish, sweep, unfinished, write_manifest
from mpitrain.checkpoint.layout import SlabRef, check_slabs
from mpitrain.checkpoint.manifest import FileEntry, Logical, Manifest, Slab
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.together import together
from mpitrain.errors import CheckpointError, UserError
from mpitrain.recording.outside import heard

_WAY_OUT = "\nEarlier checkpoints are as they were: see to the disk, and go on with --resume latest."


class Snapshot:
    """Copies of what is being saved, in memory that is used again at the next save."""

    def __init__(self) -> None:
        self._copies: dict[str, Array] = {}
        self._reserving: threading.Thread | None = None

    def reserve(self, tensors: Sequence[SlabRef]) -> None:
        """Take the memory for these slabs, in a thread of its own.

        A system hands memory out when it is first written, page by page, which takes longer than to copy: so long the
        first save would hold up training.
        """
        parts = [hdf5.Part(slab.name, slab.array, written) for slab in tensors if (written := slab.written) is not None]

        def write_once() -> None:
            for part in parts:
                self._room(part).fill(0)

        self._reserving = threading.Thread(target=write_once, name="memory of a snapshot", daemon=True)
        self._reserving.start()

    def take(self, part: hdf5.Part) -> hdf5.Part:
        """A copy in memory of the host."""
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        kept = self._room(part)
        kept[...] = to_host(part.array[part.part])
        return hdf5.Part(part.name, kept, tuple(slice(0, length) for length in part.shape))

    def _room(self, part: hdf5.Part) -> Array:
        kept = self._copies.get(part.name)
        if kept is None or kept.shape != part.shape or kept.dtype != part.array.dtype:
            kept = self._copies[part.name] = np.empty(part.shape, part.array.dtype)
        return kept


class Saving:
    """A save that has begun; made by `begin`.

    Attributes:
        folder: the checkpoint that it becomes.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        tensors: Sequence[SlabRef],
        scalars: Mapping[str, Any],
        world: Communicator,
        layout: Mapping[str, int],
        keep: int | None,
        read_back: bool,
        snapshot: Snapshot | None,
    ) -> None:
        self.folder = folder
        self._step, self._scalars, self._layout = step, dict(scalars), dict(layout)
        self._world, self._keep, self._read_back = world, keep, read_back
        self._names = {slab.name for slab in tensors}
        self._file = f"rank-{world.rank:05}.h5"
        self._parts: list[hdf5.Part] = []
        self._told: list[list[Any]] = []  # of each part, what rank 0 needs to know
        for slab in tensors:
            written = slab.written
            self._told.append(_entry(slab, written))
            if written is not None:
                part = hdf5.Part(slab.name, slab.array, written)
                self._parts.append(part if snapshot is None else snapshot.take(part))
        self._written: hdf5.Written | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if snapshot is not None:
            context = contextvars.copy_context()  # whoever listens to this rank hears the thread, too
            name = f"checkpoint of rank {world.rank}"
            self._thread = threading.Thread(target=context.run, args=(self._write_apart,), name=name, daemon=True)
            self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether this rank's file is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> Path:
        """Wait until all files are written, and give the checkpoint its name.  Collective over the world.

        Raises:
            CheckpointError: some rank could not write; the same on all ranks.  Earlier checkpoints are untouched and
                the half-written one is gone.
        """
        draft, world = unfinished(self.folder), self._world
        try:
            agreed(world, self._write, f"{draft / self._file} cannot be written", _WAY_OUT)
            mine = None if self._written is None else [tuple(self._written.entry), self._written.slabs]
            if self._thread is not None:  # a replay may have begun in steps that it skips, with other values
                mine = heard("what was written", lambda: mine)
            told = world.exchange([self._file, mine, self._told])
            agreed(world, lambda: self._conclude(told), f"{self.folder} cannot be completed", _WAY_OUT)
        except UserError:
            _discard(draft, world)
            raise
        if self._keep is not None:
            agreed(
                world,
                self._remove_older,
                f"{self.folder} is there, but older ones cannot be removed (--keep)",
                _WAY_OUT,
            )
        return self.folder

    def _remove_older(self) -> None:
        if self._world.rank == 0 and self._keep is not None:
            keep_newest(self.folder.parent.parent, self._keep)

    def _write(self) -> None:
        if self._thread is not None:
            self._thread.join()
            if self._error is not None:
                raise self._error
        else:
            self._write_now()

    def _write_apart(self) -> None:
        try:
            self._write_now()
        except BaseException as error:  # raised where all ranks agree
            self._error = error

    def _write_now(self) -> None:
        if not self._parts:
            return
        path = unfinished(self.folder) / self._file
        self._written = hdf5.write(path, self._parts)
        if self._read_back:
            hdf5.read_back(path, self._written, self._parts)
        self._parts = []

    def _conclude(self, told: Sequence[Any]) -> None:
        if self._world.rank == 0:
            manifest = _index(self._step, told, self._names, self._scalars, self._layout)
            write_manifest(unfinished(self.folder), manifest.to_json())
            publish(self.folder)


def begin(
    run: str | os.PathLike[str],
    step: int,
    tensors: Sequence[SlabRef],
    scalars: Mapping[str, Any],
    world: Communicator,
    *,
    layout: Mapping[str, int] | None = None,
    keep: int | None = None,
    read_back: bool = False,
    snapshot: Snapshot | None = None,
) -> Saving:
    """Begin to save a run.  Collective over the world; `Saving.finish` ends it, one save at a time.

    Args:
        run: folder of the run, the same on all ranks, on a file system that all see.
        step: steps that are done.
        tensors: this rank's slabs; the ranks whose `holder` shares a slab write all of it together.
        scalars: what JSON holds (finite numbers): updates, position in the data, settings.  Rank 0's are saved.
        world: all ranks.
        layout: axis -> ranks, for people.
        keep: remove all complete checkpoints of the run but the newest so many; None: keep all.
        read_back: read what was written, from the disk as far as the system lets one, and compare it.
        snapshot: copy the slabs into it, and write in the background; None: `finish` writes.

    Raises:
        CheckpointError: a tensor cannot be saved, or the folder not be made; the same on all ranks.

    Cost: two small messages here and in `finish`; with a snapshot memory for all that this rank writes.
    """
    folder = folder_of(run, step)

    def start() -> None:
        check_slabs(tensors)
        if world.rank == 0:
            sweep(run)
            disk.make_folder(unfinished(folder))

    try:
        agreed(world, start, f"{unfinished(folder)} cannot be made", _WAY_OUT)
    except UserError:
        _discard(unfinished(folder), world)
        raise
    return Saving(folder, step, tensors, scalars, world, layout or {}, keep, read_back, snapshot)


def save(
    run: str | os.PathLike[str],
    step: int,
    tensors: Sequence[SlabRef],
    scalars: Mapping[str, Any],
    world: Communicator,
    *,
    layout: Mapping[str, int] | None = None,
    keep: int | None = None,
    read_back: bool = False,
) -> Path:
    """Save a run, and return when it is saved.  Collective over the world.

    Args: those of `begin`.

    Returns:
        The checkpoint, `RUN/checkpoints/step-00000100`.

    Raises:
        CheckpointError: some rank could not write; the same on all ranks.  Earlier checkpoints are untouched and the
            half-written one is gone.

    Cost: each element is written once, by one rank; four small messages.
    """
    return begin(run, step, tensors, scalars, world, layout=layout, keep=keep, read_back=read_back).finish()


def _discard(draft: Path, world: Communicator) -> None:
    """Remove what is half-written, after an error of all ranks; who raises it first ends the others where it is."""
    together(world, lambda: disk.remove_tree(draft), here=world.rank == 0)


def agreed(world: Communicator, work: Callable[[], Any], otherwise: str, way_out: str = "") -> Any:
    """`together`, with what the disk refuses as a CheckpointError that begins with `otherwise`."""

    def refused(error: Exception) -> CheckpointError:
        return CheckpointError(f"{otherwise} (rank {world.rank}): {hdf5.reason(error)}.{way_out}")

    return together(world, work, refused=refused)


def _entry(slab: SlabRef, part: tuple[slice, ...] | None) -> list[Any]:
    """Name, full shape, dtype, and the part that this rank writes, as start and stop in the full tensor."""
    about = [slab.name, slab.full_shape, slab.array.dtype.name]
    if part is None:
        return [*about, None, None]
    pairs = list(zip(slab.rectangle, part, strict=True))
    return [*about, [r.start + p.start for r, p in pairs], [r.start + p.stop for r, p in pairs]]


def _index(
    step: int, told: Sequence[Any], expected: set[str], scalars: Mapping[str, Any], layout: Mapping[str, int]
) -> Manifest:
    """The manifest, from what every rank told of its file and slabs."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    slabs: dict[str, list[Slab]] = {}
    for file, written, entries in told:
        for name, shape, dtype, start, stop in entries:
            known = shapes.setdefault(name, (tuple(shape), dtype))
            assert known == (tuple(shape), dtype), (name, known, shape, dtype)
            of = slabs.setdefault(name, [])
            if start is not None:
                offset, sums = written[1][name]
                of.append(Slab(tuple(start), tuple(stop), file, offset, tuple(sums)))
    tensors = {name: Logical(*shapes[name], tuple(slabs[name])) for name in shapes}
    broken = sorted(expected - set(tensors)) + [name for name, tensor in tensors.items() if not tensor.is_whole]
    if broken:
        raise CheckpointError(f"Nothing was saved: no rank, or more than one, writes some part of {some(broken)}.")
    files = {file: FileEntry(*written[0]) for file, written, _ in told if written is not None}
    return Manifest(step, dict(layout), versions(), dict(scalars), files, tensors)


def some(items: Sequence[str], count: int = 4) -> str:
    """The first few of them, and how many more there are."""
    rest = f" and {len(items) - count} more" if len(items) > count else ""
    return ", ".join(items[:count]) + rest


def versions() -> dict[str, str]:
    """Of what computed and wrote it."""
    from importlib import metadata  # not at the top: it loads the standard library's mail reader, on every rank

    try:
        own = metadata.version("mpitrain")
    except metadata.PackageNotFoundError:
        own = "not installed"
    return {"mpitrain": own, "python": platform.python_version(), "numpy": np.__version__, **hdf5.versions()}
