"""Steps of the default training with and without its trace, by turns; from `trace_cost.py`.

    mpirun -n 8 python benchmarks/trace_steps.py --undisturbed
    mpirun -n 8 python benchmarks/trace_steps.py --dp 2 --tp 2 --pp 2 --microbatches 4

A round is pairs of steps, one that is traced and one of which nobody is told; who comes first changes from pair to
pair.  Every tenth traced step has its operations noted, as in training, and files are written when it is time.  Rank 0
prints JSON in its last line: for each round the seconds of its steps by the clock, and CPU seconds of all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine

from mpitrain import config as settings
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.config import Config
from mpitrain.debug.trace.tracing import tracing
from mpitrain.events import alone
from mpitrain.optim.optimizer import Optimizer
from mpitrain.train import Training

PAIRS = 5  # of a round, which then takes half a second
WAYS = ("off", "on")
WARM_UP = 10


class Paired(Training):
    """The training of settings, whose steps are made by turns."""

    def __init__(self, config: Config, mesh: Mesh, options: argparse.Namespace) -> None:
        super().__init__(config, mesh, [], time.perf_counter())
        self.options = options
        self.times: dict[str, Any] = {way: {"seconds": [], "cpu": []} for way in WAYS}

    def _steps(self, done: int, last: int, steps: int, optimizer: Optimizer) -> tuple[int, bool]:
        dp = self.mesh.dp
        batches = self.tokens.batches(self.config.batch, dp.rank, dp.size, 0, last, self.model.positions_here)
        quiet = self.options.undisturbed

        def make(way: str) -> tuple[float, float]:
            """One step; its seconds and this rank's CPU seconds."""
            with alone() if way == "off" else contextlib.nullcontext():
                began = time.perf_counter(), time.process_time()
                self.executor.run([next(batches)])
                return time.perf_counter() - began[0], time.process_time() - began[1]

        folder = self.folder / "trace"
        with tracing(self.world, folder, ops=self.options.ops):
            for _ in range(WARM_UP):
                make("on")
            for _ in range(self.options.rounds):
                if quiet:
                    time.sleep(machine.REST)
                self.world.barrier()
                with machine.undisturbed() if quiet else contextlib.nullcontext():
                    make("off")  # whatever the pause has left in the caches counts for nobody
                    ways = [way for pair in range(PAIRS) for way in (WAYS if pair % 2 else reversed(WAYS))]
                    mine = [[way, *make(way)] for way in ways]
                told = self.world.exchange(mine)
                for way in WAYS:
                    of_way = [[step[1:] for step in of_rank if step[0] == way] for of_rank in told]
                    self.times[way]["seconds"].append(max(sum(wall for wall, _ in steps) for steps in of_way))
                    self.times[way]["cpu"].append(sum(cpu for steps in of_way for _, cpu in steps))
        written = sum(os.path.getsize(path) for path in folder.glob(f"rank-{self.world.rank:05}.*"))
        traced = WARM_UP + self.options.rounds * PAIRS
        self.times["bytes"] = max(self.world.exchange(written)) / traced
        return last, False

    def _finish(self, last: int, steps: int, asked: bool) -> None:
        """Nothing: there is no curve of it."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--ops", type=int, default=10, help="as --trace-ops")
    parser.add_argument("--undisturbed", action="store_true", help="each round at real-time priority; needs root")
    options, flags = parser.parse_known_args()
    ranks = world()
    with tempfile.TemporaryDirectory() as mine:
        run = Path(ranks.exchange(mine)[0]) / "run"
        steps = WARM_UP + (1 + 2 * PAIRS) * options.rounds
        words = ["--run", str(run), "--steps", str(steps), "--sample-length", "0", *flags]
        config = settings.parse(words)
        mesh = Mesh(ranks, pp=config.pp, dp=config.dp, cp=config.cp, tp=config.tp, ep=config.ep)
        with contextlib.redirect_stdout(sys.stderr):
            training = Paired(config, mesh, options)
            training.run()
        ranks.barrier()
    if ranks.rank == 0:
        print(json.dumps(training.times))


if __name__ == "__main__":
    main()
