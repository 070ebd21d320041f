"""Lesson 13: a checkpoint knows whole tensors, not ranks, and tells when a byte of it is not what was written.

    mpitrain local -n 4 examples/13_checkpoints.py
    mpirun -n 4 python examples/13_checkpoints.py

Trains a small GPT on data-parallel ranks and saves half-way; prints which rank wrote what.  Goes on from the checkpoint
twice, with models drawn from other seeds: on the same layout, which gives the same bits, and with matrices cut over the
ranks, where sums form in another order.  Ends with what is said of the checkpoint when one bit of it was flipped.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import mpitrain  # noqa: F401 - before NumPy

# isort: split
import numpy as np

from mpitrain import checkpoint
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.tokens import Batch
from mpitrain.errors import CheckpointDamaged
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

STEPS, HALF, ROWS = 6, 3, 12
SIZES = GPTConfig(vocab=32, layers=2, width=48, heads=12, seq_len=16)


class Training:
    """A model, its optimizer and what trains it, on a layout of the surrounding ranks."""

    def __init__(self, seed: int, **sizes: int) -> None:
        self.mesh = Mesh(world(), **sizes)
        self.model = GPT(SIZES, self.mesh, seed=seed, dtype=np.float64)
        self.optimizer = AdamW(self.model.shares(), lr=1e-2)
        rows = complete("1f1b", ranks=1, microbatches=1)
        self.executor = Executor(self.model, self.optimizer, self.mesh, rows, clip=1.0)

    def slabs(self) -> list[checkpoint.SlabRef]:
        """What this rank holds of every tensor, and who shares the writing."""
        return checkpoint.slabs_of(self.model.shares(), self.optimizer.state_tensors(), self.mesh)

    def train(self, start: int, stop: int) -> None:
        """Steps of a data order that depends on the number of the step alone."""
        rows = world().size * -(-ROWS // world().size)  # as many for every rank
        mine = np.arange(self.mesh.dp.rank, rows, self.mesh.dp.size)
        for step in range(start, stop):
            tokens = np.random.default_rng(step).integers(SIZES.vocab, size=(rows, SIZES.seq_len + 1))[mine]
            self.executor.step(Batch(tokens[:, :-1], tokens[:, 1:], mine, np.arange(SIZES.seq_len), step))

    def save(self, run: str) -> Path:
        """All of it, on the disk."""
        return checkpoint.save(run, HALF, self.slabs(), {"updates": self.optimizer.updates}, world())

    def load(self, path: Path) -> int:
        """All of it, from the disk; the number of steps that are done."""
        saved = checkpoint.load(path, self.slabs(), world())
        self.optimizer.updates = saved["updates"]
        return int(saved["step"])

    def whole(self) -> list[np.ndarray]:
        """All weights, whole: slabs of the ranks that cut them, side by side."""
        tensors = []
        for p in self.model.parameters():
            tensor = np.zeros(p.full_shape)
            tensor[p.rectangle] = p.data
            tensors.append(self.mesh.tp.all_reduce(tensor) if p.spec.shard_dims() and self.mesh.tp.size > 1 else tensor)
        return tensors


def written(path: Path) -> list[str]:
    """What each rank wrote."""
    manifest, lines = checkpoint.read_manifest(path), []
    for file, entry in manifest.files.items():
        names = [name for name, tensor in manifest.tensors.items() if file in [slab.file for slab in tensor.slabs]]
        lines.append(f"{file}  {entry.nbytes:>9,} bytes, {len(names)} tensors: {names[0]} ...")
    return lines


def flip_a_bit(path: Path, name: str) -> None:
    """Change one bit of a value of a tensor."""
    slab = checkpoint.read_manifest(path).tensors[name].slabs[0]
    data = bytearray((path / slab.file).read_bytes())
    data[slab.offset + 5] ^= 1
    (path / slab.file).write_bytes(data)


def main() -> None:
    """Save, go on in two ways, and damage what was saved."""
    with tempfile.TemporaryDirectory() as folder:
        run = world().exchange(folder)[0]
        training = Training(1)
        training.train(0, HALF)
        path = training.save(run)
        training.train(HALF, STEPS)
        say = print if world().rank == 0 else lambda *_: None
        say("\n".join(f"  {line}" for line in written(path)))
        tp = math.gcd(world().size, SIZES.heads)
        for where, other in {"the same layout": Training(2), f"a layout with tp {tp}": Training(3, tp=tp)}.items():
            other.train(other.load(path), STEPS)
            apart = max(np.abs(a - b).max() for a, b in zip(training.whole(), other.whole(), strict=True))
            say(f"largest difference of a weight that went on, on {where}: {apart:.1e}")
        if world().rank == 0:
            flip_a_bit(path, "weight/blocks.0.mlp.up.weight")
        try:
            Training(4).load(path)
        except CheckpointDamaged as error:
            say(str(error).replace(f"{path}/", ""))
        world().barrier()  # before the folder goes


if __name__ == "__main__":
    main()
