"""The bubble of each schedule from a run's own events, beside its formula and the simulator.

    mpirun -n 2 python -m mpi4py benchmarks/pipeline_bubble.py --rounds 5

Two ranks share a GPT of 4 blocks, cut in the middle: a vocabulary of 64 makes embedding and head too cheap to matter,
so that both cost the same.  The trainings take turns; the ranks' clocks (mpitrain/debug/timeline.py) say what a step
was like.  Formula and simulator are given the times that F, B and W took in that very step.

The whole step of each schedule whose bubble is the median is kept, to be drawn (pipeline_page.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from typing import Any, NamedTuple

import mpitrain  # noqa: F401 - before NumPy (mpitrain/blas.py)

# isort: split
import machine
import numpy as np

from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.tokens import Batch
from mpitrain.debug.timeline import Measured, Stopwatch, expected_bubble
from mpitrain.events import listen
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.partition import balance
from mpitrain.pipeline.passes import complete
from mpitrain.pipeline.simulate import simulate

SIZES = GPTConfig(vocab=64, layers=4, width=256, heads=4, seq_len=128)
MICROBATCHES = 8
ROWS = 4  # sequences of a micro-batch
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1}
"""By name: stages of a rank."""
FIRST_STEPS = 3  # that nobody looks at
STEPS = 2  # of a round


class Training(NamedTuple):
    """A pipeline that stands ready."""

    name: str
    executor: Executor

    @classmethod
    def of(cls, name: str) -> Training:
        """With the same initial values as all others."""
        mesh = Mesh(world(), pp=world().size)
        partition = balance([1.0] * SIZES.layers, mesh.pp.size * SCHEDULES[name])
        model = GPT(SIZES, mesh, partition=partition)
        optimizer = AdamW(model.parameters(), lr=1e-3)
        return cls(name, Executor(model, optimizer, mesh, complete(name, **_shape(name)), clip=1.0))

    def steps(self, batches: list[Batch], undisturbed: bool = False) -> list[Measured]:
        """Train, and see what each step was like; the same on every rank."""
        watch = Stopwatch(keep=len(batches))
        for batch in batches:
            if undisturbed:
                time.sleep(machine.REST)
                world().barrier()
            with machine.undisturbed() if undisturbed else contextlib.nullcontext(), listen(watch):
                world().barrier()
                self.executor.step(batch)
        return [watch.gather(self.executor.mesh.pp, step) for step in range(len(batches))]


def _shape(name: str) -> dict[str, int]:
    return {"ranks": world().size, "microbatches": MICROBATCHES, "chunks": SCHEDULES[name]}


def _batches(number: int, seed: int) -> list[Batch]:
    """Random tokens, the same on every rank."""
    random = np.random.default_rng(seed)
    rows = ROWS * MICROBATCHES
    made = []
    for step in range(number):
        tokens = random.integers(SIZES.vocab, size=(rows, SIZES.seq_len + 1))
        made.append(Batch(tokens[:, :-1], tokens[:, 1:], np.arange(rows), np.arange(SIZES.seq_len), step))
    return made


def _facts(name: str, step: Measured) -> dict[str, Any]:
    """Plain numbers; times in milliseconds."""
    costs = step.costs
    return {
        "measured": step.bubble,
        "formula": expected_bubble(name, **_shape(name), costs=costs),
        "simulated": simulate(complete(name, **_shape(name)), costs).bubble,
        "makespan": step.makespan,
        "busy": step.busy,
        "waiting": step.waiting,
        "f": costs.f,
        "b": costs.b,
        "w": costs.w,
        "message": step.message,
    }


def measure(rounds: int, undisturbed: bool) -> dict[str, list[Measured]]:
    """The steps of each schedule, all rounds."""
    trainings = [Training.of(name) for name in SCHEDULES]
    for training in trainings:
        training.steps(_batches(FIRST_STEPS, 0))
    found: dict[str, list[Measured]] = {training.name: [] for training in trainings}
    for number in range(rounds):
        for training in trainings if number % 2 == 0 else reversed(trainings):
            found[training.name] += training.steps(_batches(1 + STEPS, 1 + number), undisturbed)[1:]
    return found


def _lanes(steps: list[Measured]) -> list[str]:
    """The step whose bubble is the median: for each rank `action begin end` in milliseconds, one after the other."""
    step = sorted(steps, key=lambda step: step.bubble)[len(steps) // 2]
    return ["; ".join(f"{action} {start:.3f} {stop:.3f}" for action, start, stop in lane) for lane in step.spans]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--undisturbed", action="store_true", help="each step at real-time priority")
    options = parser.parse_args()
    found = measure(options.rounds, options.undisturbed)
    if world().rank:
        return
    schedules = {name: [_facts(name, step) for step in steps] for name, steps in found.items()}
    drawn = {name: _lanes(steps) for name, steps in found.items()}
    print(json.dumps({"microbatches": MICROBATCHES, "schedules": schedules, "drawn": drawn}), flush=True)


if __name__ == "__main__":
    main()
