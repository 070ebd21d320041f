"""Damage a checkpoint in thousands of ways, and look whether loading ever believes it.

    PYTHONPATH=.:tests python tests/local/flipped_bits.py                    5,000 flips, 500 cuts, and the rest
    PYTHONPATH=.:tests python tests/local/flipped_bits.py --flips 100000 --cuts 0

Half of the flipped bits lie anywhere in the set of files, a quarter in the manifest, a quarter in what of the HDF5
files is no tensor's data.  Files are cut short, put in each other's place, deleted, replaced by those of an earlier
step; blocks within a file change places.  What loads is compared with what was saved, tensors and scalars to the last
bit.  Loading runs in a process of its own with a time limit, so a crash or an endless loop is seen, and on four ranks
now and then.

Exit code: 0 if nothing loaded that should not, nothing crashed, and files and tensors were named in 95 % of the cases.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from unittest import mock

import numpy as np
from crash.child import in_child
from crash.training import RANKS, Reference, differences, state_of

from mpitrain.checkpoint import sums
from mpitrain.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from mpitrain.errors import CheckpointError

STEP = 4
SECONDS = 10
"""A load that takes longer hangs."""
BATCH = 200
"""Damages that one child tries."""


@dataclass(frozen=True)
class Damage:
    """One way to spoil a checkpoint.

    Attributes:
        kind: "flip", "cut", ...
        files: whose bytes change: name -> what they are then; None: there is no such file.
        tensor: whose data are hit, and nothing else; empty: no tensor's, or several.
    """

    kind: str
    files: dict[str, bytes | None]
    tensor: str = ""


@dataclass
class Found:
    """What came of all damages of a kind.

    Attributes:
        tried: how many.
        in_tensor: how many of them lie in the data of one tensor.
        wrong: loads that ended well, and crashes; what must not be.
        unnamed: refusals that do not name the file, or, of damage in one tensor's data, the tensor.
    """

    tried: int = 0
    in_tensor: int = 0
    wrong: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)


class Target:
    """A saved set of files.

    Args:
        reference: whose checkpoint of `STEP` is copied.
    """

    def __init__(self, reference: Reference, folder: Path) -> None:
        self.path = folder / f"step-{STEP:08}"
        self.path.mkdir()
        source = reference.run / "checkpoints"
        self.files, self.older = (
            {f.name: f.read_bytes() for f in sorted((source / f"step-{n:08}").iterdir())} for n in (STEP, STEP - 1)
        )
        self.restore(self.files)
        self.saved = reference.states[STEP][0]
        self.manifest: Manifest = read_manifest(self.path)
        self.slabs: dict[str, list[tuple[int, int, str]]] = {name: [] for name in self.manifest.files}
        for name, tensor in self.manifest.tensors.items():
            for slab in tensor.slabs:
                stop = slab.offset + slab.elements * np.dtype(tensor.dtype).itemsize
                self.slabs[slab.file].append((slab.offset, stop, name))

    def restore(self, names: object) -> None:
        """Give files the bytes that were saved."""
        for name in self.files:
            if name in names:  # type: ignore[operator]
                (self.path / name).write_bytes(self.files[name])

    def tensor_at(self, file: str, offset: int) -> str:
        """Whose data a byte belongs to; empty: nobody's."""
        return next((name for start, stop, name in self.slabs.get(file, ()) if start <= offset < stop), "")

    # -- damages

    def flips(self, count: int, chance: random.Random) -> Iterator[Damage]:
        """Single bits."""
        everywhere = [(name, 0, len(data)) for name, data in self.files.items()]
        between = [(name, *gap) for name in self.manifest.files for gap in self._gaps(name)]
        manifest = [(MANIFEST, 0, len(self.files[MANIFEST]))]
        for index in range(count):
            places = (everywhere, manifest, everywhere, between)[index % 4]
            name, start, stop = chance.choices(places, [stop - start for _, start, stop in places])[0]
            offset = chance.randrange(start, stop)
            spoilt = bytearray(self.files[name])
            spoilt[offset] ^= 1 << chance.randrange(8)
            yield Damage("flip", {name: bytes(spoilt)}, self.tensor_at(name, offset))

    def cuts(self, count: int, chance: random.Random) -> Iterator[Damage]:
        """Files that end early; each a few times by one byte only, and wholly."""
        for index in range(count):
            name = list(self.files)[index % len(self.files)]
            size = len(self.files[name])
            length = (size - 1, 0)[index // len(self.files)] if index < 2 * len(self.files) else chance.randrange(size)
            yield Damage("cut", {name: self.files[name][:length]})

    def exchanges(self) -> Iterator[Damage]:
        """Files in each other's place, files that are missing, and those of the step before."""
        names = list(self.files)
        for one in names:
            yield Damage("missing", {one: None})
            yield Damage("older", {one: self.older[one]})
            yield Damage("zeros", {one: bytes(len(self.files[one]))})
            yield Damage("longer", {one: self.files[one] + b"\0"})
            for other in names[: names.index(one)]:
                yield Damage("swapped", {one: self.files[other], other: self.files[one]})
        yield Damage("older", {name: self.older[name] for name in names if name != MANIFEST})

    def moves(self, count: int, chance: random.Random) -> Iterator[Damage]:
        """Blocks of a file that change places, and whole slabs that do."""
        for index in range(count):
            name = chance.choice(list(self.manifest.files))
            data = self.files[name]
            if index % 2:
                (start, stop, _), (other, end, _) = chance.sample(self.slabs[name], 2)
                length = min(stop - start, end - other)
            else:
                length = chance.choice((64, 512, 4096))
                start, other = chance.sample(range(0, len(data) - length, length), 2)
            spoilt = bytearray(data)
            spoilt[start : start + length] = data[other : other + length]
            spoilt[other : other + length] = data[start : start + length]
            if spoilt != data:
                yield Damage("moved", {name: bytes(spoilt)})

    def _gaps(self, name: str) -> Iterator[tuple[int, int]]:
        at = 0
        for start, stop, _ in sorted(self.slabs[name]):
            if at < start:
                yield at, start
            at = max(at, stop)
        if at < len(self.files[name]):
            yield at, len(self.files[name])

    # -- loads

    def try_all(self, damages: Iterator[Damage], on_four_every: int) -> dict[str, Found]:
        """What becomes of loading each."""
        found: dict[str, Found] = {}
        while batch := list(islice(damages, BATCH)):
            self._try(batch, found, on_four_every)
        return found

    def _try(self, batch: list[Damage], found: dict[str, Found], on_four_every: int) -> None:
        """In one child, or where that comes to a bad end in as many as it takes."""
        with tempfile.TemporaryFile("w+") as told:
            ended = in_child(lambda: self._load_all(batch, told.fileno(), on_four_every))
            told.seek(0)
            lines = [line.rstrip("\n").split("\t") for line in told]
        for damage, (how, message) in zip(batch, lines, strict=False):
            self._note(damage, how, message, found)
        if len(lines) < len(batch):
            self._note(batch[len(lines)], "ended", f"exit code {ended.code}: {ended.output[-500:]}", found)
            if rest := batch[len(lines) + 1 :]:
                self._try(rest, found, on_four_every)
        self.restore(self.files)

    def _load_all(self, batch: list[Damage], told: int, on_four_every: int) -> None:
        for index, damage in enumerate(batch):
            for name, data in damage.files.items():
                (self.path / name).unlink() if data is None else (self.path / name).write_bytes(data)
            signal.alarm(SECONDS)
            four = on_four_every and index % on_four_every == 0
            with mock.patch.object(sums, "SMALL", 0 if index % 2 else sums.SMALL):  # sums of large blocks have a thread
                how, message = self.load(RANKS if four else 1)
            self.restore(damage.files)
            os.write(told, f"{how}\t{' '.join(message.split())}\n".encode())

    def load(self, ranks: int) -> tuple[str, str]:
        """How loading ends: "refused", with the message, "loaded", with what differs, or "raised"."""
        try:
            state = state_of(self.path, ranks)
        except CheckpointError as error:
            return "refused", str(error)
        except BaseException as error:
            return "raised", repr(error)
        return "loaded", ", ".join(differences(state, self.saved)) or "the same"

    def _note(self, damage: Damage, how: str, message: str, found: dict[str, Found]) -> None:
        of_kind = found.setdefault(damage.kind, Found())
        of_kind.tried += 1
        of_kind.in_tensor += bool(damage.tensor)
        where = f"{damage.kind} of {', '.join(damage.files)} {damage.tensor}"
        if how != "refused":
            of_kind.wrong.append(f"{where}: {how}: {message}")
        elif not any(name in message for name in damage.files) or damage.tensor not in message:
            of_kind.unnamed.append(f"{where}: {message}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=5000)
    parser.add_argument("--cuts", type=int, default=500)
    parser.add_argument("--moves", type=int, default=200, help="blocks and slabs that change places")
    parser.add_argument("--four", type=int, default=10, help="each so many-th load on four ranks")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, began = random.Random(options.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        target = Target(Reference(Path(folder)), Path(folder))
        size = sum(map(len, target.files.values()))
        print(f"{len(target.files)} files of {size} bytes together\n")
        print(f"{'damage':10}{'tried':>8}{'believed or crashed':>21}{'in one tensor':>15}{'not named':>11}")
        found: dict[str, Found] = {}
        makers: list[Callable[[], Iterator[Damage]]] = [
            lambda: target.flips(options.flips, chance),
            lambda: target.cuts(options.cuts, chance),
            target.exchanges,
            lambda: target.moves(options.moves, chance),
        ]
        for make in makers:
            for kind, of in target.try_all(make(), options.four).items():
                found[kind] = of
                print(f"{kind:10}{of.tried:8}{len(of.wrong):21}{of.in_tensor:15}{len(of.unnamed):11}", flush=True)
                for text in (of.wrong + of.unnamed)[:10]:
                    print(f"    {text}")
    wrong, unnamed, tried = (
        sum(map(count, found.values()))
        for count in (lambda f: len(f.wrong), lambda f: len(f.unnamed), lambda f: f.tried)
    )
    named = 1 - unnamed / max(1, tried - wrong)
    print(
        f"\n{tried} damages, {wrong} believed or crashed, {100 * named:.2f} % named, {time.monotonic() - began:.0f} s"
    )
    sys.exit(wrong > 0 or named < 0.95)


if __name__ == "__main__":
    main()
