"""Lesson 14: all ranks in lock step, where each of them stands, what it holds, and for whom it waits.

    mpitrain debug -n 8 examples/14_console.py                     a prompt before the first line; help lists commands
    mpitrain debug -n 8 --commands examples/14_console.txt examples/14_console.py       a session that is written down

Trains a GPT of two blocks: one on each of two stages, each cut over two tensor-parallel ranks, the batch dealt out to
two replicas (with fewer than eight ranks, fewer of these).  No line of it knows of the console.  Ends with the
difference to the same training on one rank.
"""

from __future__ import annotations

import mpitrain  # noqa: F401 - before NumPy

# isort: split
import numpy as np

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.tokens import Batch
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

STEPS, MICROBATCHES, ROWS = 2, 4, 24  # rows of the whole batch


def layout(size: int) -> dict[str, int]:
    """Stages and tensor-parallel ranks of so many ranks; the rest are replicas."""
    pp = 2 if size % 2 == 0 else 1
    tp = 2 if size % 4 == 0 else 1
    return {"pp": pp, "tp": tp}


def batch(step: int, mesh: Mesh, config: GPTConfig) -> Batch:
    """This replica's rows of random tokens."""
    tokens = np.random.default_rng(step).integers(config.vocab, size=(ROWS, config.seq_len + 1))
    mine = np.array_split(np.arange(ROWS), mesh.dp.size)[mesh.dp.rank]
    return Batch(tokens[mine, :-1], tokens[mine, 1:], mine, np.arange(config.seq_len), step)


def train() -> list[float]:
    """Train on the surrounding ranks; the losses."""
    mesh = Mesh(world(), **layout(world().size))
    config = GPTConfig(vocab=32, layers=2, width=16, heads=2, seq_len=8)
    model = GPT(config, mesh, dtype=np.float64)
    rows = complete("1f1b", ranks=mesh.pp.size, microbatches=MICROBATCHES)
    executor = Executor(model, AdamW(model.parameters(), lr=1e-2), mesh, rows)
    return [executor.step(batch(step, mesh, config)) for step in range(STEPS)]


def main() -> float:
    """Train, and compare; return the largest relative difference of a loss to that of one rank."""
    losses = train()
    if world().rank:
        return 0.0
    [serial] = LocalWorld(1).run(train)  # the same function, in a world of one rank
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, serial, strict=True))
    assert worst < 1e-10, worst
    print("losses " + " ".join(f"{loss:.4f}" for loss in losses))
    print(f"\nlargest difference of a loss to the serial run: {worst:.1e}")
    return worst


if __name__ == "__main__":
    main()
