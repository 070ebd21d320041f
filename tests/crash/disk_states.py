"""What a disk may hold after the power failed: whatever was synced, and any part of what was not.

    with recorded() as operations: ...        all operations on the disk, with their data
    disk = Disk(folder)                       as the folder is before; all of it is on the disk
    disk.do(operation)                        one after the other; the power may fail after each
    disk.lay_out(into, fate)                  one of the states in which the disk may then be

The model is the one that SQLite's crash tests and ALICE (Pillai et al., OSDI 2014) use, without anything that only some
file systems promise.  A file has what was written before its last sync, and of later writes any subset, in any order,
each perhaps cut short; its length may have come without its data.  A folder has the names that it had at its last sync,
and of later changes any subset, in any order: a new file's name is one, also when the file itself was synced; a rename
is one, and whole.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from mpitrain import disk

SECTOR = 512
"""Bytes that are written whole or not at all."""

Operation = tuple[Any, ...]


@contextlib.contextmanager
def recorded() -> Iterator[list[Operation]]:
    """Note every operation that changes the disk, when it is done, whichever rank or thread does it."""
    done: list[Operation] = []

    def noting(name: str, note: Callable[..., Operation]) -> Any:
        original = getattr(disk, name)

        def operation(*args: Any) -> Any:
            if name == "make_folder":  # which has others done inside, after it
                done.append((name, *note(*args)))
                return original(*args)
            result = original(*args)
            done.append((name, *note(*args)))
            return result

        return mock.patch.object(disk, name, operation)

    with contextlib.ExitStack() as stack:
        for name in ("make_folder", "create", "sync_folder", "remove_tree"):
            stack.enter_context(noting(name, lambda path: (Path(path),)))
        stack.enter_context(
            noting("write", lambda _, path, data, offset: (Path(path), bytes(memoryview(data).cast("B")), offset))
        )
        stack.enter_context(noting("sync", lambda _, path: (Path(path),)))
        stack.enter_context(noting("rename", lambda old, new: (Path(old), Path(new))))
        yield done


class File:
    """A file: what is on the disk, and what was written since."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data
        self.waiting: list[tuple[int, bytes]] = []


class Folder:
    """A folder: the names that are on the disk, changes since, and the names as a running system shows them."""

    def __init__(self) -> None:
        self.names: dict[str, File | Folder] = {}
        self.shown: dict[str, File | Folder] = {}
        self.waiting: list[dict[str, File | Folder | None]] = []

    def change(self, change: dict[str, File | Folder | None]) -> None:
        """Names that come (to what) and go (None), together."""
        self.waiting.append(change)
        _apply(self.shown, change)


class Fate:
    """What becomes of what was not synced.

    Attributes:
        names, data, lengths: whether changes of folders, written bytes and lengths of files come to the disk.
        chance: if given, decides for each of them by itself, their order too, and where a write is cut short.
    """

    def __init__(self, names: bool, data: bool, lengths: bool, chance: random.Random | None = None) -> None:
        self.names, self.data, self.lengths, self.chance = names, data, lengths, chance

    def of_folder(self, folder: Folder) -> dict[str, File | Folder]:
        """The names that are found."""
        found, changes = dict(folder.names), folder.waiting if self.names else []
        if self.chance is not None:
            changes = [change for change in changes if self.chance.random() < 0.5]
            self.chance.shuffle(changes)
        for change in changes:
            _apply(found, change)
        return found

    def of_file(self, file: File) -> bytes:
        """The bytes that are found."""
        found, writes = bytearray(file.data), file.waiting if self.data else []
        if self.lengths:
            longest = max((offset + len(data) for offset, data in file.waiting), default=0)
            found.extend(bytes(max(0, longest - len(found))))
        if self.chance is not None:
            writes = [self._torn(*write) for write in writes if self.chance.random() < 0.5]
            self.chance.shuffle(writes)
        for offset, data in writes:
            found.extend(bytes(max(0, offset - len(found))))
            found[offset : offset + len(data)] = data
        return bytes(found)

    def _torn(self, offset: int, data: bytes) -> tuple[int, bytes]:
        """A write, or in half of the cases only the sectors before or after some place of it."""
        assert self.chance is not None
        if self.chance.random() < 0.5 or len(data) <= SECTOR:
            return offset, data
        cut = SECTOR * self.chance.randrange(len(data) // SECTOR + 1)
        return (offset, data[:cut]) if self.chance.random() < 0.5 else (offset + cut, data[cut:])


FATES = {
    "nothing": Fate(names=False, data=False, lengths=False),
    "everything": Fate(names=True, data=True, lengths=True),
    "names alone": Fate(names=True, data=False, lengths=False),
    "names and lengths": Fate(names=True, data=False, lengths=True),
    "data alone": Fate(names=False, data=True, lengths=True),
}
"""What happens to everything alike."""


class Disk:
    """A folder, all that is below it, and what of it is on the disk.

    Args:
        root: the folder; what it holds now is on the disk.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = _taken_in(root)

    def do(self, operation: Operation) -> None:
        """Do what `recorded` has noted."""
        getattr(self, f"_{operation[0]}")(*operation[1:])

    def lay_out(self, into: Path, fate: Fate) -> None:
        """Write down one state in which the disk may be found."""
        _lay_out(self.folder, into, fate)

    def shows(self) -> dict[str, bytes | None]:
        """Path -> bytes (of a folder None) as a running system shows it."""
        return _shown(self.folder, "")

    def _at(self, path: Path) -> Any:
        node: Any = self.folder
        for name in path.relative_to(self.root).parts:
            node = node.shown[name]
        return node

    def _make_folder(self, path: Path) -> None:
        node = self.folder
        for name in path.relative_to(self.root).parts:
            if name not in node.shown:
                node.change({name: Folder()})
            node = node.shown[name]  # type: ignore[assignment]

    def _create(self, path: Path) -> None:
        self._at(path.parent).change({path.name: File()})

    def _write(self, path: Path, data: bytes, offset: int) -> None:
        self._at(path).waiting.append((offset, data))

    def _sync(self, path: Path) -> None:
        file = self._at(path)
        file.data, file.waiting = FATES["everything"].of_file(file), []

    def _sync_folder(self, path: Path) -> None:
        folder = self._at(path)
        folder.names, folder.waiting = dict(folder.shown), []

    def _rename(self, old: Path, new: Path) -> None:
        assert old.parent == new.parent
        folder = self._at(old.parent)
        folder.change({old.name: None, new.name: folder.shown[old.name]})

    def _remove_tree(self, path: Path) -> None:
        folder = self._at(path.parent)
        if path.name in folder.shown:
            _empty(folder.shown[path.name])
            folder.change({path.name: None})


def _apply(names: dict[str, File | Folder], change: dict[str, File | Folder | None]) -> None:
    for name, node in change.items():
        names.pop(name, None)
        if node is not None:
            names[name] = node


def _empty(node: File | Folder) -> None:
    if isinstance(node, Folder):
        for name, below in list(node.shown.items()):
            _empty(below)
            node.change({name: None})


def _taken_in(path: Path) -> Folder:
    folder = Folder()
    for below in path.iterdir():
        folder.names[below.name] = _taken_in(below) if below.is_dir() else File(below.read_bytes())
    folder.shown = dict(folder.names)
    return folder


def _lay_out(folder: Folder, into: Path, fate: Fate) -> None:
    into.mkdir()
    for name, node in fate.of_folder(folder).items():
        if isinstance(node, Folder):
            _lay_out(node, into / name, fate)
        else:
            (into / name).write_bytes(fate.of_file(node))


def _shown(folder: Folder, path: str) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}
    for name, node in folder.shown.items():
        if isinstance(node, Folder):
            found |= {f"{path}{name}": None, **_shown(node, f"{path}{name}/")}
        else:
            found[f"{path}{name}"] = FATES["everything"].of_file(node)
    return found


def found_below(root: Path) -> dict[str, bytes | None]:
    """What `Disk.shows` must be equal to: path -> bytes (of a folder None), read."""
    paths = (Path(folder, name) for folder, folders, files in os.walk(root) for name in (*folders, *files))
    return {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in paths}


def cleared(path: Path) -> None:
    """Remove what `lay_out` wrote."""
    shutil.rmtree(path)
