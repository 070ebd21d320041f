"""What the check of states costs: CPU time of a step with it over that of one without, on two ranks.

    python benchmarks/check_cost.py
    python benchmarks/check_cost.py --sizes S --rounds 30

The ranks are threads that take turns, so a rank's CPU time is all that its step costs; neither waiting nor what else
runs on the machine counts.  Steps without the check, with it, and with its rules alone (no digests) follow each other;
medians are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from typing import Any

import numpy as np

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.debug.states import StateChecker
from mpitrain.events import listen
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim.adam import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage

SIZES = {
    "mini": GPTConfig(vocab=256, layers=2, width=128, heads=4, seq_len=64),
    "S": GPTConfig(vocab=256, layers=4, width=256, heads=4, seq_len=128),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "cp2": {"cp": 2},
    "tp2": {"tp": 2},
    "tp2 sequence-parallel": {"tp": 2, "sequence_parallel": True},
}
BATCH = 8
WARM_UP = 2


class RulesAlone(StateChecker):
    """Notes no digests."""

    def _note(self, *what: Any) -> None:
        pass


def measure(size: str, layout: str, rounds: int) -> dict[str, float]:
    """Milliseconds of a step of rank 0: plain, with the check, with its rules alone."""

    def main() -> dict[str, float]:
        axes = dict(LAYOUTS[layout])
        cut = axes.pop("sequence_parallel", False)
        mesh = Mesh(world(), **axes)
        model = GPT(SIZES[size], mesh, sequence_parallel=cut)
        executor = Executor(model, AdamW(model.parameters()), mesh, with_update(one_stage(1)))
        numbers = (np.arange(50_000) * 7919 % 104729 % 256).astype(np.uint8)
        corpus = Corpus(numbers[:40_000], numbers[40_000:], 256, "bytes", "numbers", (), (), "")
        tokens = Tokens(corpus, SIZES[size].seq_len)
        checked, rules = (kind(model.parameters(), mesh) for kind in (StateChecker, RulesAlone))
        ways = {"plain": contextlib.nullcontext, "checked": lambda: listen(checked), "rules": lambda: listen(rules)}
        found: dict[str, list[float]] = {way: [] for way in ways}
        batches = tokens.batches(BATCH, mesh.dp.rank, mesh.dp.size, positions=model.positions_here)
        for _ in range(WARM_UP + rounds):
            for way, around in ways.items():
                batch = next(batches)
                with around():
                    start = time.thread_time()
                    executor.step(batch)
                    found[way].append(time.thread_time() - start)
        return {way: 1e3 * statistics.median(times[WARM_UP:]) for way, times in found.items()}

    first: dict[str, float] = LocalWorld(2).run(main)[0]
    return first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(f"{'CPU ms of a step':32}{'plain':>9}{'checked':>9}{'ratio':>8}{'rules alone':>13}")
    for size in options.sizes:
        for layout in LAYOUTS:
            ms = measure(size, layout, options.rounds)
            ratio = ms["checked"] / ms["plain"]
            print(f"{size + ' ' + layout:32}{ms['plain']:9.1f}{ms['checked']:9.1f}{ratio:8.2f}{ms['rules']:13.1f}")


if __name__ == "__main__":
    main()
