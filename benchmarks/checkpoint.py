"""What checkpoints cost: saved and loaded beside a plain file of the same bytes, and while training goes on.

    python benchmarks/checkpoint.py                   about ten minutes on two idle cores
    python benchmarks/checkpoint.py --only disk       saving and loading alone; or steps, or shares
    python benchmarks/checkpoint.py --folder DIR      on the disk of this folder
    python benchmarks/checkpoint.py --show            measure nothing, print what is kept
    python benchmarks/checkpoint.py --write-docs      figures of docs/explanation/checkpoints.md

Everything is measured by turns: a round writes a plain file, saves, and saves with --read-back, then reads the plain
file and loads, from the disk and again from memory; a figure is the median of its rounds' ratios.  The state is that of
a GPT with AdamW.  Steps are those of checkpoint_steps.py.  What is measured is kept in
benchmarks/results/checkpoint.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import mpitrain  # noqa: F401 - before NumPy, as a training script that follows the documents has it (mpitrain/blas.py)

# isort: split
import checkpoint_page as page
import checkpoint_steps
import machine
import numpy as np

from mpitrain import checkpoint, disk
from mpitrain.checkpoint import SlabRef, hdf5, sums
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import AdamW

RESULT = machine.RESULTS / "checkpoint.json"
SIZES = {
    "small": GPTConfig(vocab=256, layers=5, width=384, heads=6, seq_len=256),
    "large": checkpoint_steps.SIZES,
}
TINY = GPTConfig(vocab=256, layers=1, width=64, heads=2, seq_len=16)
"""Small enough for a test of this script."""
PIECE = 1 << 22  # bytes that a plain file is written and read with at a time

Result = dict[str, Any]


class Files(NamedTuple):
    """What takes part in a round: this rank's slabs, their memory, the folder of a run, and a plain file."""

    slabs: list[SlabRef]
    memory: list[memoryview]
    run: Path
    plain: Path

    def write_plain(self) -> None:
        """The same bytes, one array after the other, and have them on the disk."""
        file, at = os.open(self.plain, os.O_WRONLY | os.O_CREAT | os.O_EXCL), 0
        for piece in self.pieces():
            at += os.pwrite(file, piece, at)
        os.fsync(file)
        os.close(file)

    def read_plain(self) -> None:
        """The bytes of the plain file, to where they came from."""
        file, at = os.open(self.plain, os.O_RDONLY), 0
        for piece in self.pieces():
            at += os.preadv(file, [piece], at)
        os.close(file)

    def pieces(self) -> Iterator[memoryview]:
        """The memory of the slabs, a few MiB at a time."""
        for memory in self.memory:
            for start in range(0, len(memory), PIECE):
                yield memory[start : start + PIECE]

    def save(self) -> None:
        """A checkpoint."""
        checkpoint.save(self.run, 1, self.slabs, {}, world())

    def save_and_read_back(self) -> None:
        """A checkpoint that counts when it was read."""
        checkpoint.save(self.run, 1, self.slabs, {}, world(), read_back=True)

    def load(self) -> None:
        """The checkpoint, to where it came from."""
        path = checkpoint.latest(self.run)
        assert path is not None
        checkpoint.load(path, self.slabs, world())

    def load_trusting(self) -> None:
        """The same without checks."""
        with trusting():
            self.load()

    def remove(self) -> None:
        """All files."""
        shutil.rmtree(self.run, ignore_errors=True)
        self.plain.unlink(missing_ok=True)

    def forget(self) -> None:
        """Nothing of the files in memory: the next to read them reads the disk."""
        for path in (self.plain, *self.run.rglob("*.h5")):
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def state_of(sizes: GPTConfig) -> list[SlabRef]:
    """Weights and moments of a model, no two numbers alike."""
    mesh = Mesh(world())
    model = GPT(sizes, mesh, seed=1)
    optimizer = AdamW(model.shares())
    slabs = checkpoint.slabs_of(model.shares(), optimizer.state_tensors(), mesh)
    random = np.random.default_rng(1)
    for slab in slabs:
        slab.array[...] = random.random(slab.array.shape, np.float32)
    return slabs


def seconds(work: Callable[[], Any], folder: Path) -> float:
    """Of one call, once the file system has done what was asked of it in this folder before."""
    disk.sync_folder(folder)
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def disk_times(sizes: GPTConfig, rounds: int, folder: Path) -> dict[str, Any]:
    """Seconds of everything in each round, by name, and the bytes of the tensors."""
    slabs = state_of(sizes)
    memory = [memoryview(slab.array.reshape(-1).view(np.uint8)) for slab in slabs]
    files = Files(slabs, memory, folder / "run", folder / "plain")
    found: dict[str, list[float]] = {name: [] for name in page.DISK}
    for number in range(rounds + 1):  # the first round warms up
        for name, took in (writing(files, number) | reading(files, number)).items():
            if number:
                found[name].append(took)
    files.remove()
    return {"bytes": sum(map(len, memory)), "seconds": found}


def writing(files: Files, number: int) -> dict[str, float]:
    """A round of writes, each begun with none of the files there; a plain file and one checkpoint are left.

    What was removed a moment ago has left memory that the system hands out again faster than any other.
    """
    took = {}
    files.remove()
    for name, write in turns(number, page.WRITES, [files.write_plain, files.save, files.save_and_read_back]):
        took[name] = seconds(write, files.run.parent)
        files.remove()
    files.write_plain()
    files.save()
    return took


def reading(files: Files, number: int) -> dict[str, float]:
    """A round of reads, each from the disk and then from memory."""
    took = {}
    for name, read in turns(number, page.READS, [files.read_plain, files.load, files.load_trusting]):
        files.forget()
        for where in (name, page.from_memory(name)):
            took[where] = seconds(read, files.run.parent)
    return took


def turns(number: int, *lists: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Items of lists side by side; who begins changes from round to round."""
    items = list(zip(*lists, strict=True))
    return (items[(number + place) % len(items)] for place in range(len(items)))


@contextmanager
def trusting() -> Iterator[None]:
    """A load that compares no sums and looks at no structure: what the checks cost is the difference."""
    with mock.patch.object(hdf5, "check"), mock.patch.object(sums, "zlib", Agrees()):
        yield


class Agrees:
    """In the place of zlib: sums that are equal to all others, and take no time."""

    def crc32(self, data: Any) -> Any:
        """No sum."""
        return mock.ANY


def shares(sizes: GPTConfig, ranks: int) -> list[int]:
    """Bytes of the files of ranks that all hold the same state."""
    with tempfile.TemporaryDirectory() as run:
        path = LocalWorld(ranks).run(lambda: checkpoint.save(run, 1, state_of(sizes), {}, world()))[0]
        return [entry.nbytes for entry in checkpoint.read_manifest(path).files.values()]


def steps(ranks: int, rounds: int, folder: Path) -> dict[str, Any]:
    """What checkpoint_steps.py finds on so many ranks."""
    script = [sys.executable, str(Path(checkpoint_steps.__file__)), "--rounds", str(rounds), "--folder", str(folder)]
    launch = [machine.mpirun(), "-n", str(ranks)] if ranks > 1 else []
    environment = machine.rank_environment(ranks, tuned_malloc=False)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(page.DOCS.parent), os.environ.get("PYTHONPATH"))))
    done = subprocess.run([*launch, *script], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def load(path: Path) -> Result:
    """What is kept, or nothing yet."""
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path: Path, part: str, found: Mapping[str, Any], about: Mapping[str, Any]) -> Result:
    """Put what was found in its place beside what is kept, with what it was measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    result = load(path)
    result[part] = {**result.get(part, {}), **found}
    result.setdefault("about", {})[part] = about
    draft = path.with_suffix(".unfinished")
    draft.write_text(page.text_of(result))
    draft.replace(path)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, keep, print; the exit code is 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("disk", "steps", "shares"), help="some of it")
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES), help="of states on the disk")
    parser.add_argument("--ranks", nargs="+", type=int, choices=(1, 2), default=[1, 2], help="that make steps")
    parser.add_argument("--rounds", type=int, default=7, help="of everything (default 7)")
    parser.add_argument("--small", action="store_true", help="a tiny state, to try this script")
    parser.add_argument("--folder", type=Path, help="where files are written (default: that of temporary files)")
    parser.add_argument("--result", type=Path, default=RESULT, help=f"where figures are kept (default {RESULT})")
    parser.add_argument("--show", action="store_true", help="print what is kept and measure nothing")
    parser.add_argument("--write-docs", action="store_true", help="write the page's figures")
    options = parser.parse_args(argv)
    if options.show or options.write_docs:
        result = load(options.result) or load(page.KEPT)
        print("\n".join(page.lines(result)))
        for path in page.write(result) if options.write_docs else ():
            print(f"written {path}")
        return 0
    about = machine.describe() | {"load": os.getloadavg()[0]}
    print(machine.headline(about), flush=True)
    sizes = {"small": TINY} if options.small else {size: SIZES[size] for size in options.sizes}
    parts = options.only or ("disk", "steps", "shares")
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="mpitrain-checkpoint-") as name:
        folder = Path(name)
        for size, config in sizes.items() if "disk" in parts else ():
            keep(options.result, "disk", {size: disk_times(config, options.rounds, folder)}, about)
        for ranks in options.ranks if "steps" in parts else ():
            keep(options.result, "steps", {str(ranks): steps(ranks, options.rounds, folder)}, about)
        if "shares" in parts:
            written = {str(ranks): shares(next(iter(sizes.values())), ranks) for ranks in page.RANKS}
            keep(options.result, "shares", written, about)
    result = load(options.result)
    print("\n".join(page.lines(result)), f"kept in {options.result}", sep="\n")
    return 0 if options.small or page.reaches(result) else 1


if __name__ == "__main__":
    sys.exit(main())
