"""Weights in the layout of transformers: one safetensors file, or several and an index; read a tensor at a time.

    FOLDER/model.safetensors                all tensors
    FOLDER/model.safetensors.index.json     {"weight_map": {"model.norm.weight": "model-00002-of-00003.safetensors"}}

Nothing outside of the folder is read.  Links are refused, but for those of a cache of the Hub, where each file of
`models--NAME/snapshots/REVISION` is a link to one in `models--NAME/blobs`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import CheckpointDamaged, CheckpointError
from mpitrain.interchange.header import MOST_HEADER, Entry, entries, read_json
from mpitrain.interchange.library import safetensors
from mpitrain.options import show

ONE_FILE = "model.safetensors"
INDEX = f"{ONE_FILE}.index.json"
_FILE = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,199}\.safetensors")
_MOST_FILES = 10_000


class Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    entry: Entry


class Weights:
    """The tensors of a model that another tool wrote.

    Args:
        path: the folder, a safetensors file, or an index.

    Attributes:
        folder: where the files are.
        files: the ones with weights.
        tensors: by name.

    Raises:
        CheckpointError: there are none, they cannot be read, or lie elsewhere.
        CheckpointDamaged: a file or an index is not what it should be; names file and tensor.
    """

    def __init__(self, path: Path) -> None:
        self.folder, name = (path, _usual(path)) if path.is_dir() else (path.parent, path.name)
        mapped = None
        if name.endswith(".index.json"):
            mapped = _weight_map(self.folder, name)
        elif not _FILE.fullmatch(name):
            raise CheckpointError(
                f"{show(path)}: is no file of weights, NAME.safetensors or NAME.safetensors.index.json."
            )
        self.files = sorted(set(mapped.values())) if mapped is not None else [name]
        self.tensors = self._tensors(mapped)
        self._open = ExitStack()
        self._handles: dict[Path, Any] = {}

    def _tensors(self, mapped: Mapping[str, str] | None) -> dict[str, Stored]:
        found: dict[str, Stored] = {}
        for name in self.files:
            path = of_folder(self.folder, name)
            for tensor, entry in entries(path).items():
                if tensor in found:
                    raise CheckpointDamaged(
                        f"{show(self.folder)}: {show(tensor)} is both in {found[tensor].file.name} and in {name}."
                    )
                found[tensor] = Stored(path, entry)
        for tensor, name in (mapped or {}).items():
            if tensor not in found or found[tensor].file != of_folder(self.folder, name):
                raise CheckpointDamaged(f"{show(self.folder)}: {show(tensor)} should be in {name}, which lacks it.")
        return found

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor, in memory of their own.

        Raises:
            CheckpointError: they cannot be read, or memory is too small for them.
        """
        file, entry = self.tensors[name]
        library = safetensors()
        try:
            if file not in self._handles:
                self._handles[file] = self._open.enter_context(library.safe_open(file, framework="numpy"))
            values: np.ndarray = self._handles[file].get_tensor(name)
        except (library.SafetensorError, OSError, ValueError, MemoryError) as error:
            reason = "memory is too small" if isinstance(error, MemoryError) else " ".join(str(error).split())[:200]
            raise CheckpointError(f"{show(file)}: {show(name)} cannot be read: {reason}.") from None
        if values.shape != entry.shape:
            raise CheckpointDamaged(f"{show(file)}: {show(name)} is {values.shape} now, and was {entry.shape}.")
        return values

    def close(self) -> None:
        """Let go of the files."""
        self._handles.clear()
        self._open.close()

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def of_folder(folder: Path, name: str) -> Path:
    """A file of a folder that came from elsewhere.

    Raises:
        CheckpointError: it is missing, or a link that leads out.
    """
    path = folder / name
    if not path.is_symlink():
        if not os.path.lexists(path):
            raise CheckpointError(f"{show(folder)}: lacks {show(name)}.")
        return path
    target, home = Path(os.path.realpath(path)), folder.resolve()
    if home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs" and target.is_file():
        return target
    raise CheckpointError(
        f"{show(path)}: is a link to {show(os.readlink(path))}; links are followed within a cache of the Hub only.\n"
        "If you trust it, copy the folder with what its links mean: cp -rL FOLDER COPY."
    )


def _usual(folder: Path) -> str:
    """The name of the file of weights, or of the index."""
    for name in (ONE_FILE, INDEX):
        if os.path.lexists(folder / name):
            return name
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise CheckpointError(
            f"{show(folder)}: has no {ONE_FILE}, and pickles (*.bin, *.pth) are not read, since they can run code.\n"
            "Where transformers is installed: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER)"
            " writes safetensors."
        )
    raise CheckpointError(f"{show(folder)}: has neither {ONE_FILE} nor {INDEX}: it holds no weights of transformers.")


def _weight_map(folder: Path, name: str) -> dict[str, str]:
    """Tensor -> file, from an index."""
    path = of_folder(folder, name)
    mapped = read_json(path, MOST_HEADER).get("weight_map")
    if not isinstance(mapped, dict) or not mapped:
        raise CheckpointDamaged(f"{show(path)} is damaged: it has no weight_map.")
    for tensor, file in mapped.items():
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            raise CheckpointError(
                f"{show(path)}: {show(tensor)} should be in {show(file)}; it must be the name of a file beside the"
                " index, NAME.safetensors."
            )
    if len(set(mapped.values())) > _MOST_FILES:
        raise CheckpointError(f"{show(path)}: names more than {_MOST_FILES} files.")
    return mapped
