"""Lesson 9: numbers of 16 bits, half of the bytes, the same loss.

    python examples/09_half_precision.py
    mpitrain local -n 2 examples/09_half_precision.py
    mpirun -n 2 python examples/09_half_precision.py

Trains a small GPT three times on the same batches: in float32; in float16, with float32 masters of the weights and a
scaled loss; and in float16 where blocks are made again in backward and Adafactor keeps next to no state.  The scale
starts much too large on purpose: the first steps overflow, all ranks skip them, and it falls until gradients fit.

Prints which bytes were alive when most were, and ends with the difference that halves make to the validation loss.
"""

from __future__ import annotations

import mpitrain  # noqa: F401 - before NumPy

# isort: split
import numpy as np

from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.tokens import Batch
from mpitrain.debug.memory import MemoryLedger
from mpitrain.events import listen
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import Adafactor, AdamW
from mpitrain.optim.scaler import LossScaler
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage

STEPS, ROWS = 30, 8
SIZES = GPTConfig(vocab=32, layers=2, width=32, heads=2, seq_len=32)
MIB = 2.0**20


def batch(step: int, mesh: Mesh) -> Batch:
    """This rank's rows of sequences that count in steps of one to three, from anywhere."""
    random = np.random.default_rng(step)
    starts, gaps = random.integers(SIZES.vocab, size=(ROWS, 1)), random.integers(1, 4, size=(ROWS, 1))
    tokens = (starts + gaps * np.arange(SIZES.seq_len + 1)) % SIZES.vocab
    mine = np.arange(mesh.dp.rank, ROWS, mesh.dp.size)
    return Batch(tokens[mine, :-1], tokens[mine, 1:], mine, np.arange(SIZES.seq_len), step)


def train(name: str, dtype: type, *, lean: bool = False) -> float:
    """Train on the surrounding ranks; the validation loss."""
    mesh = Mesh(world())
    model = GPT(SIZES, mesh, dtype=dtype)
    for block in model.blocks:
        block.recompute = lean  # keep a block's input, and make the rest again in backward
    parameters = model.parameters()
    eps = 1e-16, 1e-3  # the square of AdamW's, whose second moment is under a root when it is added
    optimizer = Adafactor(parameters, mesh=mesh, lr=0.1, eps=eps) if lean else AdamW(parameters, lr=1e-2)
    scaler = LossScaler(2.0**28, window=20, hysteresis=1) if dtype is np.float16 else None
    executor = Executor(model, optimizer, mesh, with_update(one_stage(1)), scaler=scaler, clip=1.0)
    ledger, skipped = MemoryLedger(), 0
    with listen(ledger):
        while optimizer.updates < STEPS:
            executor.step(batch(optimizer.updates, mesh))  # what was skipped is tried again with a lower scale
            skipped += executor.report.skipped
    loss = executor.evaluate([batch(1000, mesh), batch(1001, mesh)])
    if mesh.is_reporter:
        held = ledger.at_peak
        scales = f", scale 2^28, {skipped} steps skipped, then 2^{np.log2(executor.report.scale):g}" if scaler else ""
        print(f"{name}\n  loss {loss:.3f}{scales}")
        for owner in ("weights", "masters", "gradients", "optimizer state", "activations"):
            print(f"  {owner:<16}{held.get(owner, 0) / MIB:>7.2f} MiB")
        print(f"  {'all at the peak':<16}{ledger.peak / MIB:>7.2f} MiB")
    return loss


def main() -> None:
    """All three, and what halves changed."""
    exact = train("float32, AdamW", np.float32)
    half = train("float16, AdamW", np.float16)
    train("float16, blocks made again, Adafactor", np.float16, lean=True)
    if world().rank == 0:
        print(f"largest difference of a loss in halves to float32: {abs(half - exact):.1e}")


if __name__ == "__main__":
    main()
