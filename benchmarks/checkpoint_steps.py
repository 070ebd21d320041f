"""How long training stands still for a save in the background, and how much slower it is until the save is written.

    python benchmarks/checkpoint_steps.py                     one rank; a minute or two
    mpirun -n 2 python benchmarks/checkpoint_steps.py         data parallel: each rank copies and writes a half

A GPT of 101 million parameters with AdamW, 1.2 GB of state, and a batch of 1,024 tokens, small for such a model: with a
larger one a step takes longer, and a save is a smaller share of it.  A round is some quiet steps, the begin of a save,
steps until all ranks have written, and the end of the save.  Rank 0 prints JSON in its last line: seconds, each that of
the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpitrain  # noqa: F401 - before NumPy, as a training script that follows the documents has it (mpitrain/blas.py)

# isort: split
import numpy as np

from mpitrain import checkpoint
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.tokens import Batch
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

SIZES = GPTConfig(vocab=256, layers=8, width=1024, heads=16, seq_len=128)
ROWS = 8  # sequences of the global batch
QUIET = 2  # steps of a round before a save begins


class Trainer:
    """A training that can be saved while it goes on."""

    def __init__(self, sizes: GPTConfig, rows: int, run: Path) -> None:
        self.sizes, self.rows, self.run = sizes, rows, run
        self.mesh = Mesh(world())
        self.model = GPT(sizes, self.mesh, seed=1)
        self.optimizer = AdamW(self.model.shares(), lr=1e-4)
        self.saving: checkpoint.Saving | None = None
        self.executor = Executor(
            self.model, self.optimizer, self.mesh, complete("1f1b", ranks=1, microbatches=1), ask=self.busy
        )
        self.slabs = checkpoint.slabs_of(self.model.shares(), self.optimizer.state_tensors(), self.mesh)
        self.snapshot = checkpoint.Snapshot()
        self.snapshot.reserve(self.slabs)
        self.steps = 0

    def busy(self) -> list[float]:
        """What a rank says at the end of a step: whether it still writes."""
        return [float(self.saving is not None and self.saving.busy)]

    def step(self) -> float:
        """One; the seconds that it took."""
        random = np.random.default_rng(self.steps)
        tokens = random.integers(0, self.sizes.vocab, (self.rows, self.sizes.seq_len + 1))
        mine = np.arange(self.mesh.dp.rank, self.rows, self.mesh.dp.size)
        inputs, targets = tokens[mine, :-1], tokens[mine, 1:]
        batch = Batch(inputs, targets, mine, np.arange(self.sizes.seq_len), self.steps)
        self.steps += 1
        return self._slowest(lambda: self.executor.step(batch))

    def begin(self) -> float:
        """Begin to save: copy the state of this rank; the seconds."""

        def work() -> None:
            self.saving = checkpoint.begin(self.run, self.steps, self.slabs, {}, world(), snapshot=self.snapshot)

        return self._slowest(work)

    def publish(self) -> float:
        """Make a checkpoint of what was written; the seconds."""
        assert self.saving is not None
        saving, self.saving = self.saving, None
        return self._slowest(saving.finish)

    def _slowest(self, work: Callable[[], Any]) -> float:
        began = time.perf_counter()
        work()
        return float(world().all_reduce(np.array([time.perf_counter() - began]), op="max")[0])


def measured(trainer: Trainer, rounds: int) -> dict[str, Any]:
    """Seconds of quiet steps, of steps beside a save, and of its begin and end, round by round."""
    for _ in range(2):
        trainer.step()
    found: dict[str, list[Any]] = {name: [] for name in ("quiet", "begin", "beside", "publish")}
    for _ in range(rounds):
        found["quiet"].append([trainer.step() for _ in range(QUIET)])
        found["begin"].append(trainer.begin())
        beside = [trainer.step()]
        while trainer.executor.report.asked[0]:
            beside.append(trainer.step())
        found["beside"].append(beside)
        found["publish"].append(trainer.publish())
        if world().rank == 0:
            shutil.rmtree(trainer.run)
    manifest_bytes = 3 * sum(p.size for p in trainer.model.parameters()) * 4
    return {"bytes": manifest_bytes, "rows": trainer.rows, "seq_len": trainer.sizes.seq_len, "seconds": found}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of saves (default 5)")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: that of temporary files)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as mine:
        run = Path(world().exchange(mine)[0]) / "run"
        found = measured(Trainer(SIZES, ROWS, run), options.rounds)
        world().barrier()
    if world().rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
