"""What a recording costs: CPU time of a recorded step over that of one which is not, and bytes a step and rank.

    python benchmarks/record_cost.py
    python benchmarks/record_cost.py --size S --ranks 4 --rounds 5

The ranks are threads that take turns, so a rank's CPU time is all that its step costs; neither waiting nor what else
runs on the machine counts, and the system writes to the disk in its own time.  Runs of ten steps in rank order that are
not recorded, recorded with values, and with digests, follow each other; medians are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.debug.recorder import record
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim.adam import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

SIZES = {
    "mini": GPTConfig(vocab=256, layers=2, width=128, heads=4, seq_len=64),
    "S": GPTConfig(vocab=256, layers=4, width=256, heads=4, seq_len=128),
}
LAYOUTS: dict[str, dict[str, int]] = {
    "dp": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp2 tp2": {"pp": 2, "tp": 2},
}
WAYS = ("plain", "values", "digest")
STEPS, WARM_UP, BATCH = 10, 3, 16


def run(size: str, axes: dict[str, int], ranks: int, way: str) -> tuple[float, float]:
    """CPU milliseconds of a step of rank 0, and bytes that it keeps of one."""

    def main() -> float:
        with record(world(), folder, sent=way) if way != "plain" else contextlib.nullcontext():
            world().set_deterministic()
            mesh = Mesh(world(), **axes)
            numbers = np.random.default_rng(0).integers(0, 256, 60_000).astype(np.uint8)
            corpus = Corpus(numbers[:40_000], numbers[40_000:], 256, "bytes", "numbers", (), (), "")
            tokens = Tokens(corpus, SIZES[size].seq_len)
            model = GPT(SIZES[size], mesh)
            micros = 2 if mesh.pp.size > 1 else 1
            rows = complete("1f1b", ranks=mesh.pp.size, microbatches=micros)
            executor = Executor(model, AdamW(model.parameters(), lr=1e-3), mesh, rows)
            times = []
            for batch in tokens.batches(BATCH, mesh.dp.rank, mesh.dp.size, 0, STEPS):
                began = time.thread_time()
                executor.step(batch)
                times.append(1000 * (time.thread_time() - began))
            return statistics.median(times[WARM_UP:])

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "r"
        milliseconds: list[Any] = LocalWorld(ranks).run(main)
        kept = sum(path.stat().st_size for path in folder.glob("rank-00000*")) if way != "plain" else 0
    return milliseconds[0], kept / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", choices=SIZES, default="mini")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print(f"{asked.size}, {asked.ranks} ranks, {BATCH} sequences a step")
    print(f"{'layout':10} {'plain ms':>9} {'values':>8} {'digest':>8} {'values MiB':>11} {'digest MiB':>11}")
    for layout, axes in LAYOUTS.items():
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(asked.rounds):
            for way in WAYS:
                found[way].append(run(asked.size, axes, asked.ranks, way))
        plain, values, digest = (statistics.median(ms for ms, _ in found[way]) for way in WAYS)
        sizes = [found[way][0][1] / 2**20 for way in WAYS[1:]]
        print(
            f"{layout:10} {plain:9.1f} {values / plain:7.2f}x {digest / plain:7.2f}x {sizes[0]:11.2f} {sizes[1]:11.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
