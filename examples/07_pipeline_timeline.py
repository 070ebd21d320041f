"""Lesson 7: a pipeline, when each rank was at work, and what its schedule could have promised.

    mpirun -n 2 python examples/07_pipeline_timeline.py 1f1b
    mpirun -n 2 python examples/07_pipeline_timeline.py zb-h1 --svg timeline.svg
    mpitrain local -n 2 examples/07_pipeline_timeline.py        threads take turns, so most of them are idle: to see how

Trains a small GPT whose layers are dealt out to the ranks, with the schedule that is named: gpipe, 1f1b, interleaved or
zb-h1.  A listener on the executor's actions clocks the last step.  Prints its timeline, and the bubble (the share of
time in which ranks were idle) three times: as it was, by the schedule's formula, and as the simulator finds it with the
costs that F, B and W had.  The formula is for stages of equal cost and messages that take no time; what a run idles
more is their difference, and whatever else the machine did.  Ends with the difference to the same training on one rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import mpitrain  # noqa: F401 - before NumPy

# isort: split
import numpy as np

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.tokens import Batch
from mpitrain.debug.timeline import Measured, Stopwatch, expected_bubble
from mpitrain.events import listen
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import AdamW
from mpitrain.pipeline import render
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.partition import balance
from mpitrain.pipeline.passes import complete
from mpitrain.pipeline.picture import svg
from mpitrain.pipeline.simulate import simulate

CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1}  # stages of each rank
STEPS, ROWS = 3, 4  # of the run; sequences of a micro-batch


def batch(step: int, microbatches: int, config: GPTConfig) -> Batch:
    """Random tokens, the same on all ranks: each rank of a pipeline is given the whole batch."""
    rows = ROWS * microbatches
    tokens = np.random.default_rng(step).integers(config.vocab, size=(rows, config.seq_len + 1))
    return Batch(tokens[:, :-1], tokens[:, 1:], np.arange(rows), np.arange(config.seq_len), step)


def train(schedule: str, microbatches: int, layers: int) -> tuple[list[float], Measured]:
    """Train on the surrounding ranks; the losses, and the last step as it was."""
    ranks = world()
    mesh = Mesh(ranks, pp=ranks.size)
    config = GPTConfig(vocab=64, layers=layers, width=64, heads=4, seq_len=64)
    partition = balance([1.0] * layers, ranks.size * CHUNKS[schedule])  # blocks of each stage
    model = GPT(config, mesh, partition=partition, dtype=np.float64)
    rows = complete(schedule, ranks=ranks.size, microbatches=microbatches, chunks=CHUNKS[schedule])
    executor = Executor(model, AdamW(model.parameters(), lr=1e-3), mesh, rows)
    watch = Stopwatch()
    with listen(watch):
        losses = [executor.step(batch(step, microbatches, config)) for step in range(STEPS)]
    return losses, watch.gather(mesh.pp)


def milliseconds(costs: float | Sequence[float]) -> str:
    """What each stage took."""
    return " ".join(f"{cost:.2f}" for cost in (costs if isinstance(costs, Sequence) else [costs]))


def main() -> float:
    """Print the lesson; return the largest difference of a loss to that of one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedule", nargs="?", default="1f1b", choices=CHUNKS)
    parser.add_argument("--microbatches", type=int, help="of a step (default: 4 a rank)")
    parser.add_argument("--svg", type=Path, help="file for a picture of the timeline")
    options = parser.parse_args()
    ranks, name = world(), options.schedule
    microbatches = options.microbatches or 4 * ranks.size
    layers = ranks.size * 2  # two blocks a rank, which interleaved makes two stages of
    losses, step = train(name, microbatches, layers)
    [(serial, _)] = LocalWorld(1).run(train, "1f1b", microbatches, layers)  # the same, in a world of one rank
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, serial, strict=True))
    assert worst < 1e-12, worst
    if ranks.rank == 0:
        shape = {"ranks": ranks.size, "microbatches": microbatches, "chunks": CHUNKS[name]}
        simulated = simulate(complete(name, **shape), step.costs)
        print(f"{name} on {ranks.size} rank{'s' * (ranks.size > 1)}, the last of {STEPS} steps, in ms:\n")
        print(render.text(step.timeline, width=118))
        print("\nand as the simulator plays it, with what F, B and W took in the mean:\n")
        print(render.text(simulated, width=118))
        if ranks.kind == "local":
            print("\nRanks that are threads take turns: at any time all but one are idle.")
        shares = {
            "measured": step.bubble,
            "formula": expected_bubble(name, **shape, costs=step.costs),
            "simulated": simulated.bubble,
        }
        print("\n    bubble  ", *(f"{how} {share:.1%}   " for how, share in shares.items()))
        print(f"    a step   measured {step.makespan:.1f} ms   simulated {simulated.makespan:.1f} ms")
        for kind, costs in zip("FBW", (step.costs.f, step.costs.b, step.costs.w), strict=True):
            if np.any(costs):
                print(f"    {kind} of each stage   {milliseconds(costs)} ms")
        for rank, (busy, waiting) in enumerate(zip(step.busy, step.waiting, strict=True)):
            rest = step.makespan - busy - waiting  # before its first F and after its last B, and what its loop takes
            print(f"    rank {rank}   busy {busy:.1f} ms   waiting for messages {waiting:.1f} ms   else {rest:.1f} ms")
        if options.svg is not None:
            options.svg.write_text(svg(step.timeline, f"{name}, measured, times in ms"), encoding="utf-8")
            print(f"    picture in {options.svg}")
        print(f"\nlargest difference of a loss to the serial run: {worst:.1e}")
    return worst


if __name__ == "__main__":
    main()
