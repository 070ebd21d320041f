"""The all-reduce in rank order beside MPI's own, for long messages.

    mpirun -n 4 python -m mpi4py benchmarks/ordered_sums.py --rounds 5

Both are `Communicator.all_reduce` in place, as the gradients are reduced: in deterministic mode and without it.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from mpitrain.comm.world import world

MIB = (1, 4, 16)
STRETCH_S = 0.12
MODES = {"ordered": True, "mpi": False}


def measure(rounds: int) -> dict[str, Any]:
    """Milliseconds of the slowest rank: MiB -> mode -> one a round."""
    ranks = world()
    found: dict[str, Any] = {}
    for mib in MIB:
        x = np.zeros(mib * 2**20 // 4, np.float32)
        _agree(x.size)
        slowest = max(_ms(x, on, 2) for on in MODES.values())
        repeats = int(ranks.broadcast(np.array(max(2, round(1e3 * STRETCH_S / slowest)))))
        times: dict[str, list[float]] = {name: [] for name in MODES}
        for number in range(rounds):
            for name in list(MODES) if number % 2 == 0 else list(reversed(MODES)):
                _ms(x, MODES[name], 1)
                times[name].append(_ms(x, MODES[name], repeats))
        found[str(mib)] = times
    return found


def _ms(x: np.ndarray, ordered: bool, repeats: int) -> float:
    """Milliseconds of one all-reduce, on the slowest rank."""
    ranks = world()
    ranks.mode.deterministic = ordered
    ranks.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        ranks.all_reduce(x, out=x)
    mine = 1e3 * (time.perf_counter() - start) / repeats
    return float(ranks.all_reduce(np.array(mine), op="max"))


def _agree(size: int) -> None:
    """Both ways must give the same sums before either is timed."""
    ranks = world()
    x = np.random.default_rng(ranks.rank).random(size, np.float32)
    sums = []
    for ordered in MODES.values():
        ranks.mode.deterministic = ordered
        sums.append(ranks.all_reduce(x))
    np.testing.assert_allclose(*sums, rtol=1e-5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found = measure(options.rounds)
    if world().rank == 0:
        print(json.dumps({"ranks": world().size, "ms": found}), flush=True)


if __name__ == "__main__":
    main()
