"""What the tools read: a checkpoint, the newest one of a run, or one consolidated file, all in the same way.

    with `Source.of(path)` a tensor is read in pieces of a few megabytes, whatever files it is cut over, and every block
    that is read is compared with its CRC-32 on the way

so a tool needs the memory of a few pieces, however large the checkpoint is.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from mpitrain.checkpoint import hdf5
from mpitrain.checkpoint.folders import survey
from mpitrain.checkpoint.manifest import BLOCK, MANIFEST, Logical, Manifest, Slab, read_manifest
from mpitrain.checkpoint.tools import onefile
from mpitrain.errors import CheckpointError
from mpitrain.options import show

PIECE = 2 * BLOCK
"""Bytes of a tensor that a tool holds at once."""

SAVES = "Train with --save-every N, which saves every N steps and at the end."
WEIGHTS = ".safetensors"
"""How names of files of weights end that another tool wrote."""

Rectangle = tuple[slice, ...]


def is_run(path: Path) -> bool:
    """Whether a folder is a run's."""
    return (path / "checkpoints").is_dir()


@dataclass(frozen=True)
class Source:
    """A checkpoint that is read.

    Attributes:
        path: the folder, or the one file.
        manifest: its index; of one file the index in it.
        paths: name of a file in the manifest -> where it lies.
        notes: what is wrong with newer checkpoints of the run that were passed over.
    """

    path: Path
    manifest: Manifest
    paths: Mapping[str, Path]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> Source:
        """The checkpoint that a word of the command line means.

        Raises:
            CheckpointError: there is none, or its index cannot be read.
        """
        path, notes = Path(text), list[str]()
        if not os.path.lexists(path):
            raise CheckpointError(f"{show(text)}: there is no such file or folder (looked from {os.getcwd()}).")
        if path.is_dir():
            if is_run(path):
                path, notes = _newest(text)
            elif not (path / MANIFEST).exists():
                raise CheckpointError(f"{show(text)}: {_what_instead(path)}")
            manifest = read_manifest(path)
            return cls(path, manifest, {name: path / name for name in manifest.files}, tuple(notes))
        head = onefile.read_head(path)
        if head is None and path.suffix == WEIGHTS:
            raise CheckpointError(f"{show(text)}: {_what_instead(path.parent)}")
        if head is None:
            raise CheckpointError(
                f"{show(text)}: is neither a folder nor a file that `mpitrain checkpoint reshard --one-file` wrote.\n"
                "`mpitrain checkpoint inspect` shows what an HDF5 file of another program holds."
            )
        manifest = onefile.read_index(path, head)
        return cls(path, manifest, dict.fromkeys(manifest.files, path))

    def __str__(self) -> str:
        return str(self.path)

    def chosen(self, patterns: Sequence[str]) -> dict[str, Logical]:
        """The tensors whose names match one of the patterns, all without any; in the order of the index.

        Raises:
            CheckpointError: a pattern matches none.
        """
        return chosen(self.manifest.tensors, patterns, self)

    def read(self, name: str, rectangle: Rectangle) -> np.ndarray:
        """Values of a tensor, each block that is read compared with its sum.

        Raises:
            CheckpointDamaged: names file and tensor.
            CheckpointError: a file cannot be read.
        """
        tensor = self.manifest.tensors[name]
        values = np.empty([part.stop - part.start for part in rectangle], tensor.dtype)
        for slab in tensor.slabs:
            piece = _overlap(name, tensor.dtype, slab, rectangle, values)
            if piece is not None:
                path = self.paths[slab.file]
                try:
                    hdf5.read(path, [piece])
                except OSError as error:
                    raise CheckpointError(f"{path} cannot be read: {hdf5.reason(error)}.") from None
        return values

    def pieces(self, name: str) -> Iterator[tuple[Rectangle, np.ndarray]]:
        """A whole tensor in the order of its elements, `PIECE` bytes at a time."""
        tensor = self.manifest.tensors[name]
        for rectangle in cut(tensor.shape, PIECE // np.dtype(tensor.dtype).itemsize):
            yield rectangle, self.read(name, rectangle)


def chosen(tensors: Mapping[str, Logical], patterns: Sequence[str], where: object) -> dict[str, Logical]:
    """See `Source.chosen`."""
    found: dict[str, Logical] = {} if patterns else dict(tensors)
    for pattern in patterns:
        these = {name: tensor for name, tensor in tensors.items() if fnmatchcase(name, pattern)}
        if not these:
            kinds = ", ".join(dict.fromkeys(f"{kind_of(name)}/*" for name in tensors))
            raise CheckpointError(
                f"--tensors {show(pattern)}: no tensor of {where} has such a name; there are {kinds[:300]}.\n"
                "* stands for any letters, as in 'weight/blocks.0.*'; quote it, so that the shell leaves it alone."
            )
        found.update(these)
    return {name: tensor for name, tensor in tensors.items() if name in found}


def _newest(run: str) -> tuple[Path, list[str]]:
    """The newest complete checkpoint of a run, and what is wrong with newer ones."""
    all_ = survey(run)
    for place, (folder, wrong) in enumerate(all_):
        if not wrong:
            return folder, [wrong for _, wrong in all_[:place]]
    reason = f"; the newest is damaged:\n{all_[0][1]}" if all_ else f"; it has saved none.\n{SAVES}"
    raise CheckpointError(f"{show(run)}: has no complete checkpoint{reason}")


def _what_instead(folder: Path) -> str:
    """What a folder is that is neither a checkpoint nor a run with some, and how one comes of it."""
    if all((folder / name).exists() for name in ("config.toml", "metrics.jsonl")):
        return f"is a run that has saved no checkpoint.\n{SAVES}"
    if (folder / "config.json").exists() and next(folder.glob(f"*{WEIGHTS}"), None) is not None:
        return (
            "holds weights as transformers keeps them.  Make a run of them first:\n"
            f"mpitrain checkpoint import {show(folder)} OUT"
        )
    return f"is neither a checkpoint (it has no {MANIFEST}) nor a run (it has no checkpoints/)."


def kind_of(name: str) -> str:
    """`weight` of `weight/blocks.0.mlp.up.weight`; "" of a name without a kind."""
    return name.rpartition("/")[0].partition("/")[0]


def nbytes(tensor: Logical) -> int:
    """Bytes of a tensor's values."""
    return math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize


def cut(shape: Sequence[int], most: int) -> Iterator[Rectangle]:
    """Rectangles of at most so many elements that tile a tensor, in the order of its elements, each without gaps."""
    inner, dim = 1, len(shape)
    while dim and inner * shape[dim - 1] <= most:  # all dims from `dim` on fit into a rectangle
        dim -= 1
        inner *= shape[dim]
    whole = tuple(slice(0, length) for length in shape[dim:])
    if not dim:
        if 0 not in shape:
            yield whole
        return
    length, step = shape[dim - 1], max(1, most // inner)
    for outer in itertools.product(*map(range, shape[: dim - 1])):
        for start in range(0, length, step):
            rows = slice(start, min(start + step, length))
            yield (*(slice(at, at + 1) for at in outer), rows, *whole)


def _overlap(name: str, dtype: str, slab: Slab, rectangle: Rectangle, values: np.ndarray) -> hdf5.Piece | None:
    """What a slab in a file and a rectangle have in common."""
    inside, target = [], []
    for part, start, stop in zip(rectangle, slab.start, slab.stop, strict=True):
        low, high = max(part.start, start), min(part.stop, stop)
        if low >= high:
            return None
        inside.append(slice(low - start, high - start))
        target.append(slice(low - part.start, high - part.start))
    return hdf5.Piece(name, dtype, slab, tuple(inside), values, tuple(target))
