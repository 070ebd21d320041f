"""`mpitrain checkpoint reshard`: the same checkpoint over other files, or as one file.

Tensors are dealt out over files as dealing.py says; which ranks read what later does not matter, any layout loads any
files.  Values pass through memory a few megabytes at a time, each block compared with its sum before it is written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain import disk
from mpitrain.checkpoint import hdf5
from mpitrain.checkpoint.folders import hold, publish, unfinished, write_manifest
from mpitrain.checkpoint.manifest import BLOCK, MANIFEST, FileEntry, Logical, Manifest, Slab
from mpitrain.checkpoint.saving import versions
from mpitrain.checkpoint.tools import onefile
from mpitrain.checkpoint.tools.dealing import Share, deal
from mpitrain.checkpoint.tools.source import PIECE, Source, cut, is_run, kind_of
from mpitrain.errors import CheckpointError
from mpitrain.options import show

WEIGHT = "weight"
"""The kind of tensor that `--weights-only` keeps."""


def keep_weights(manifest: Manifest) -> Manifest:
    """The same without what only training needs: the states of the optimizer and of the reducer.

    Raises:
        CheckpointError: it has no weights.
    """
    weights = {name: tensor for name, tensor in manifest.tensors.items() if kind_of(name) == WEIGHT}
    if not weights:
        raise CheckpointError(f"--weights-only: no tensor is called {WEIGHT}/..., so nothing would be left.")
    return replace(manifest, tensors=weights)


# ------------------------------------------------------------------------------------------------------------- to files


def to_files(
    source: Source, manifest: Manifest, target: Path, num_files: int, told: Callable[[int], None]
) -> list[int]:
    """Write a checkpoint of several files; nothing is there under its name until all of it is on the disk.

    Args:
        source: where values come from.
        manifest: what is kept of it.
        target: the new folder; one that is there is replaced.
        num_files: how many files there shall be.
        told: called with the number of bytes that were written.

    Returns:
        Sizes of the files.

    Raises:
        CheckpointError: see `check_target`; or it cannot be read or written.
    """
    with _lock_of_run(target), drafted(target) as draft:
        slabs: dict[str, list[Slab]] = {name: [] for name in manifest.tensors}
        files: dict[str, FileEntry] = {}
        for number, shares in enumerate(deal(manifest.tensors, num_files)):
            if not shares:
                continue
            file = f"rank-{number:05}.h5"
            written = _write(source, manifest, draft / file, shares, told)
            files[file] = written.entry
            for name, rectangle in shares:
                start, stop = (tuple(getattr(part, of) for part in rectangle) for of in ("start", "stop"))
                slabs[name].append(Slab(start, stop, file, *written.slabs[name]))
        tensors = {n: Logical(t.shape, t.dtype, tuple(slabs[n])) for n, t in manifest.tensors.items()}
        whole = replace(manifest, files=files, tensors=tensors, versions=versions())
        write_manifest(draft, whole.to_json())
        publish(target)
    return [entry.nbytes for entry in files.values()]


def _write(
    source: Source, manifest: Manifest, path: Path, shares: Sequence[Share], told: Callable[[int], None]
) -> hdf5.Written:
    by_name = {share.name: share for share in shares}
    datasets = [(share.name, share.shape, manifest.tensors[share.name].dtype) for share in shares]
    return hdf5.write_blocks(path, datasets, lambda name: _blocks(source, by_name[name], told))


def _blocks(source: Source, share: Share, told: Callable[[int], None]) -> Iterator[memoryview]:
    """The bytes of part of a tensor, `BLOCK` at a time, each in memory of its own."""
    width = np.dtype(source.manifest.tensors[share.name].dtype).itemsize
    block, filled = bytearray(BLOCK), 0
    for piece in cut(share.shape, PIECE // width):
        place = tuple(
            slice(outer.start + inner.start, outer.start + inner.stop)
            for outer, inner in zip(share.rectangle, piece, strict=True)
        )
        values: Any = source.read(share.name, place)
        data = memoryview(values.reshape(-1).view(np.uint8))
        while data:
            some = data[: BLOCK - filled]
            block[filled : filled + len(some)] = some
            data, filled = data[len(some) :], filled + len(some)
            if filled == BLOCK:
                told(filled)
                yield memoryview(block)
                block, filled = bytearray(BLOCK), 0
    if filled:
        told(filled)
        yield memoryview(block)[:filled]


# ---------------------------------------------------------------------------------------------------------- to one file


def to_one_file(source: Source, manifest: Manifest, target: Path, told: Callable[[int], None]) -> int:
    """Write one file with whole tensors; nothing is there under its name until all of it is on the disk.

    Args: as `to_files`.

    Returns:
        Its size.

    Raises:
        CheckpointError: see `check_target`; or it cannot be read or written.
    """

    def blocks(name: str) -> Iterator[memoryview]:
        whole = tuple(slice(0, length) for length in manifest.tensors[name].shape)
        return _blocks(source, Share(name, whole), told)

    with drafted(target) as draft:
        size = onefile.write(draft / target.name, replace(manifest, versions=versions()), blocks)
        disk.rename(draft / target.name, target)
        disk.sync_folder(target.parent)
    return size


# --------------------------------------------------------------------------------------------------------------- target


def check_target(text: str, manifest: Manifest, one_file: bool, force: bool) -> Path:
    """Where the new checkpoint goes.

    Raises:
        CheckpointError: something is there, and must not be replaced; or the name would lie.
    """
    target = Path(os.path.abspath(text))
    flag = "--one-file " if one_file else ""
    if not target.parent.is_dir() and one_file:
        raise CheckpointError(f"{flag}{show(text)}: there is no folder {show(target.parent)}.")
    inside = next((folder for folder in target.resolve().parents if (folder / MANIFEST).is_file()), None)
    if inside is not None:
        raise CheckpointError(
            f"{flag}{show(text)}: lies in the checkpoint {show(inside)}, which stays as it is.  Choose another place."
        )
    above = next(folder for folder in target.parents if os.path.lexists(folder))
    if not above.is_dir():
        raise CheckpointError(f"{flag}{show(text)}: {show(above)} is not a folder.")
    found = re.fullmatch(r"step-([0-9]{8,})", target.name)
    if found and int(found[1]) != manifest.step and not one_file:
        raise CheckpointError(
            f"{show(text)}: the checkpoint is of step {manifest.step}, so call it step-{manifest.step:08}:"
            " a run goes by the names."
        )
    if not os.path.lexists(target):
        return target
    if one_file:
        if not target.is_file() or target.is_symlink():
            raise CheckpointError(f"{flag}{show(text)}: is not a regular file; it is left alone.  Choose another name.")
    elif is_run(target):
        raise CheckpointError(
            f"{show(text)}: is the folder of a run; the checkpoint in it would be"
            f" {show(os.path.join(text, 'checkpoints', f'step-{manifest.step:08}'))}."
        )
    elif not (target / MANIFEST).is_file():
        raise CheckpointError(f"{show(text)}: is there and is no checkpoint; it is left alone.  Choose another name.")
    if not force:
        raise CheckpointError(f"{flag}{show(text)}: is there already.  --force replaces it; or choose another name.")
    return target


@contextlib.contextmanager
def _lock_of_run(target: Path) -> Iterator[None]:
    """Keep other jobs out of a run while a checkpoint is put into it: they would sweep away the draft."""
    run = target.parent.parent
    if target.parent.name != "checkpoints" or not (run / "config.toml").exists():
        yield
        return
    try:
        lock = hold(run)
    except CheckpointError:
        raise CheckpointError(
            f"{show(target)}: a job trains in {show(run)} just now.  Wait for it, or choose another place."
        ) from None
    try:
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def drafted(target: Path) -> Iterator[Path]:
    """A folder of a temporary name to write into; whatever goes wrong, nothing of it stays.

    It is locked for as long as it is written: what a killed job left behind is removed, what another job writes is not.

    Raises:
        CheckpointError: the disk refused, or another job writes there.
    """
    draft, locks = unfinished(target), list[int]()
    try:
        if draft.is_dir():
            locks.append(_locked(draft, target))
            disk.remove_tree(draft)
        _settle(target)
        disk.make_folder(draft)
        locks.append(_locked(draft, target))
        try:
            yield draft
        finally:
            if draft.exists():
                disk.remove_tree(draft)
            _settle(target)
    except OSError as error:
        raise CheckpointError(f"{show(target)} cannot be written: {hdf5.reason(error)}.") from None
    finally:
        for lock in locks:
            os.close(lock)


def _settle(target: Path) -> None:
    """After a replacement that was broken off: the old one comes back, or goes if the new one is there."""
    old = target.with_name(f".old-{target.name}")
    if old.is_dir() and os.path.lexists(target):
        disk.remove_tree(old)
    elif old.is_dir():
        disk.rename(old, target)


def _locked(draft: Path, target: Path) -> int:
    """A lock on a draft, held while the file descriptor is open; where the file system knows none, there is none."""
    folder = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            os.close(folder)
            raise CheckpointError(f"{show(target)}: another job writes it just now.  Wait for it.") from None
    return folder
