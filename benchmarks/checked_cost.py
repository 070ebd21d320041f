"""What checked mode costs: time of a step with messages compared over that of one without.

    mpirun -n 2 python benchmarks/checked_cost.py
    mpirun -n 4 python benchmarks/checked_cost.py --layouts dp2,tp2 pp2,dp2 --rounds 30
    mpitrain local -n 2 benchmarks/checked_cost.py

Steps with and without follow each other, so that what else the machine does meets both.  Of each the median and the
fastest are printed, for rank 0: waiting counts.  Ranks that are threads take turns, so there it is CPU time of the
whole process.  The last rows are single calls, in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim.adam import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_messages, with_update
from mpitrain.pipeline.schedules import one_f_one_b, one_stage

SIZES = {
    "mini": GPTConfig(vocab=256, layers=2, width=128, heads=4, seq_len=64),
    "S": GPTConfig(vocab=256, layers=4, width=256, heads=4, seq_len=128),
}
BATCH, MICROBATCHES = 8, 4
WARM_UP = 3


def layout(text: str) -> dict[str, int]:
    """`dp2,tp2` as axes."""
    return {part.rstrip("0123456789"): int(part.lstrip("abcdefghijklmnopqrstuvwxyz")) for part in text.split(",")}


def stepper(size: str, axes: dict[str, int]) -> Callable[[], None]:
    mesh = Mesh(world(), **axes)
    model = GPT(SIZES[size], mesh)
    rows = one_stage(1) if mesh.pp.size == 1 else with_messages(one_f_one_b(mesh.pp.size, MICROBATCHES))
    executor = Executor(model, AdamW(model.parameters()), mesh, with_update(rows))
    numbers = (np.arange(50_000) * 7919 % 104729 % 256).astype(np.uint8)
    corpus = Corpus(numbers[:40_000], numbers[40_000:], 256, "bytes", "numbers", (), (), "")
    tokens = Tokens(corpus, SIZES[size].seq_len)
    batches = tokens.batches(BATCH, mesh.dp.rank, mesh.dp.size, positions=model.positions_here)
    return lambda: executor.step(next(batches)) and None


def sides(act: Callable[[], None], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each round, without and with the checks."""
    clock = time.process_time if world().kind == "local" else time.perf_counter
    found: tuple[list[float], list[float]] = [], []
    for _ in range(WARM_UP + rounds):
        for on in (False, True):
            world().barrier()
            world().set_checked(on)
            start = clock()
            act()
            world().barrier()
            found[on].append(clock() - start)
            world().set_checked(False)
    return found[0][WARM_UP:], found[1][WARM_UP:]


def row(name: str, plain: list[float], checked: list[float], unit: float) -> str:
    medians, least = [1e3 * statistics.median(s) / unit for s in (plain, checked)], [min(plain), min(checked)]
    ratio, ratio_of_least = medians[1] / medians[0], least[1] / least[0]
    return f"{name:32}{medians[0]:10.2f}{medians[1]:10.2f}{ratio:8.2f}{ratio_of_least:10.2f}"


def main() -> None:
    ranks = world()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--layouts", nargs="+", default=[f"{axis}{ranks.size}" for axis in ("dp", "tp", "pp")])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    lines = [f"{'ms of a step':32}{'plain':>10}{'checked':>10}{'ratio':>8}{'of least':>10}"]
    for size in options.sizes:
        for text in options.layouts:
            plain, checked = sides(stepper(size, layout(text)), options.rounds)
            lines.append(row(f"{size} {text}", plain, checked, 1))
    lines.append(f"{'us of a call':32}")
    x, calls = np.ones(1024, np.float32), 50
    verbs: dict[str, Callable[[], object]] = {
        "all_reduce of 4 KiB": lambda: ranks.all_reduce(x),
        "iall_reduce of 4 KiB, waited for": lambda: ranks.iall_reduce(x).wait(),
        "barrier": ranks.barrier,
    }
    for name, call in verbs.items():

        def act(call: Callable[[], object] = call) -> None:
            for _ in range(calls):
                call()

        plain, checked = sides(act, options.rounds)
        lines.append(row(name, plain, checked, calls * 1e-3))
    if ranks.rank == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
