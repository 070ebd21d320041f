"""Lesson 12: ranks that would all hold the same weights, gradients and moments keep a part of them each (ZeRO).

    mpitrain local -n 4 examples/12_zero.py
    mpirun -n 4 python examples/12_zero.py

Trains a small GPT four times on the same batches, with nothing dealt out and with ZeRO's three stages.  Prints what a
rank holds between steps and at the peak of whole weights, what it sends in a step, and the tape of stage 3, on which
the weights of a part come when it works.  Ends with the largest difference that dealing out makes to a weight: about
1e-12 and not zero, since clipping and micro-batches add the same numbers in another order.
"""

from __future__ import annotations

import mpitrain  # noqa: F401 - before NumPy

# isort: split
import numpy as np

from mpitrain.autograd import Tape
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.tokens import Batch
from mpitrain.debug.ledger import Ledger
from mpitrain.debug.memory import MemoryLedger
from mpitrain.events import listen
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage

STEPS, ROWS, MICROS = 5, 16, 2
SIZES = GPTConfig(vocab=32, layers=4, width=32, heads=2, seq_len=16)
OWNERS = ("weights", "gradients", "optimizer state")
KIB = 2.0**10


def batch(step: int, mesh: Mesh) -> Batch:
    """This rank's rows of sequences that count in steps of one to three, from anywhere."""
    rows = MICROS * mesh.dp.size * -(-ROWS // (MICROS * mesh.dp.size))  # as many for every rank
    random = np.random.default_rng(step)
    starts, gaps = random.integers(SIZES.vocab, size=(rows, 1)), random.integers(1, 4, size=(rows, 1))
    tokens = (starts + gaps * np.arange(SIZES.seq_len + 1)) % SIZES.vocab
    mine = np.arange(mesh.dp.rank, rows, mesh.dp.size)
    return Batch(tokens[mine, :-1], tokens[mine, 1:], mine, np.arange(SIZES.seq_len), step)


def train(stage: int) -> list[np.ndarray]:
    """Train on the surrounding ranks; the whole weights at the end, on every rank."""
    mesh = Mesh(world())
    model = GPT(SIZES, mesh, dtype=np.float64, zero=stage)
    optimizer = AdamW(model.shares(), lr=1e-2)  # this rank's rows of the parameters; all of them in stage 0
    executor = Executor(model, optimizer, mesh, with_update(one_stage(MICROS)), clip=1.0)
    memory, messages = MemoryLedger(), Ledger()
    with listen(memory), listen(messages):
        for step in range(STEPS):
            executor.step(batch(step, mesh))
    if mesh.is_reporter:
        held = [memory.now.get(owner, 0) / KIB for owner in OWNERS]
        gathered = 0.0 if model.resident is None else model.resident.peak / KIB
        sent = messages.total("dp+cp") / STEPS / KIB
        print("".join(f"{number:>14.1f}" for number in (*held, gathered, sent)), f"  stage {stage}")
    return whole(model, mesh)


def whole(model: GPT, mesh: Mesh) -> list[np.ndarray]:
    """All weights: a share is a rectangle of its tensor, and together they tile it."""
    tensors = []
    for share in model.shares():
        tensor = np.zeros(share.full_shape)
        tensor[share.rectangle] = share.data
        if model.zero and mesh.dp.size > 1:
            tensor = mesh.dp.all_reduce(tensor)
        tensors.append(tensor)
    return tensors


def show_tape() -> None:
    """What a forward pass leaves on the tape of stage 3, up to the first block."""
    mesh = Mesh(world())
    model = GPT(SIZES, mesh, zero=3)
    with Tape() as tape:
        model.logits(np.zeros((1, SIZES.seq_len), np.int64))
    if mesh.is_reporter:
        nodes = [line for line in str(tape).splitlines() if "input" not in line and not line.endswith("float32")]
        print("\nthe tape of stage 3 begins with\n  " + "\n  ".join(line[:100] for line in nodes[:9]))


def main() -> None:
    """All stages, and what dealing out changed."""
    if world().rank == 0:
        heads = (*OWNERS, "gathered", "sent a step")
        print("KiB of rank 0\n" + "".join(f"{head.removeprefix('optimizer '):>14}" for head in heads))
    stages = [train(stage) for stage in range(4)]
    show_tape()
    if world().rank == 0:
        worst = max(np.abs(a - b).max() for stage in stages[1:] for a, b in zip(stages[0], stage, strict=True))
        print(f"\nlargest difference of a weight to that of stage 0: {worst:.1e}")


if __name__ == "__main__":
    main()
