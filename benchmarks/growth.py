"""How cost grows: the time of a step, or of a part of it, over ranks, layers, tensors, micro-batches, T and d.

    python benchmarks/growth.py --rounds 3
    python benchmarks/growth.py --sweeps ranks layers

Each sweep doubles one number and keeps the rest small, so that what is measured is the code around the arithmetic.  The
exponent is the slope of the line through the upper half of the points on logarithmic scales: 1 is linear, and small
sizes, where fixed costs hide the growth, have no say.  Times are CPU seconds of the process, the least of the rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from sides import SEED

from mpitrain import checkpoint
from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data import corpus
from mpitrain.data.tokens import Tokens
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.nn import init as initial
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.optim import AdamW
from mpitrain.optim.clip import clip
from mpitrain.parallel.data import BucketedReducer, FlatReducer
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import one_stage

Costs = dict[str, float]
"""Seconds by what they are of."""

SMALL = GPTConfig(layers=1, width=32, heads=2, seq_len=16)
STRETCH_S = 0.05


def cpu_seconds(run: Callable[[], Any], least: float = STRETCH_S) -> float:
    """CPU seconds of one call, over as many as take `least` seconds; the first is not counted."""
    run()
    calls, start = 0, time.process_time()
    while True:
        run()
        calls += 1
        passed = time.process_time() - start
        if passed >= least:
            return passed / calls


def training(config: GPTConfig, batch: int, micro: int = 1) -> Callable[[], Any]:
    """One step of a training of this rank, with its share of a batch; collective."""
    everyone = world()
    mesh = Mesh(everyone)
    tokens = Tokens(corpus.load(), config.seq_len, SEED)
    model = GPT(config, mesh, seed=SEED)
    rows = with_update(one_stage(micro))
    executor = Executor(model, AdamW(model.parameters(), lr=1e-3), mesh, rows, clip=1.0)
    mine = tokens.batch_at(0, batch, everyone.rank, everyone.size)
    return lambda: executor.step(mine)


def over_ranks(ranks: int) -> Costs:
    """All ranks' work in one process, one sequence a rank: what a step and what a start take of the processor."""
    times: list[float] = []

    def rank() -> None:
        step = training(SMALL, ranks)
        step()
        world().barrier()
        if world().rank == 0:
            times.append(time.process_time())
        for _ in range(steps):
            step()
        world().barrier()
        if world().rank == 0:
            times.append(time.process_time())

    steps = max(2, 64 // ranks)
    begin = time.process_time()
    LocalWorld(ranks).run(rank)
    return {"step": (times[1] - times[0]) / steps, "start": times[0] - begin}


def over_layers(layers: int) -> Costs:
    return _step_and_start(GPTConfig(layers=layers, width=32, heads=2, seq_len=16), 2)


def over_micro_batches(micro: int) -> Costs:
    return _step_and_start(SMALL, micro, micro)


def _step_and_start(config: GPTConfig, batch: int, micro: int = 1) -> Costs:
    begin = time.process_time()
    step = training(config, batch, micro)
    start = time.process_time() - begin
    return {"step": cpu_seconds(step), "start": start}


def over_sequence(length: int) -> Costs:
    return {"step": cpu_seconds(training(GPTConfig(layers=1, width=64, heads=2, seq_len=length), 1))}


def over_width(width: int) -> Costs:
    return {"step": cpu_seconds(training(GPTConfig(layers=1, width=width, heads=2, seq_len=64), 1))}


class Factor(Module):
    """y = x p."""

    def __init__(self, name: str, decay: bool) -> None:
        super().__init__(name)
        self.weight = Parameter(f"{name}.weight", (16,), init=initial.ones, decay=decay)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Chain(Module):
    """y = x p_1 p_2 ... p_n: as many small tensors and as many ops."""

    def __init__(self, tensors: int) -> None:
        super().__init__("chain")
        self.factors = [Factor(f"factors.{i}", decay=i % 2 == 0) for i in range(tensors)]
        self.materialize(Mesh(world()))

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = factor(x)
        return x


def over_tensors(tensors: int) -> Costs:
    """What is done once a tensor: recording, walking back, reducing, clipping, updating, saving."""
    model, mesh = Chain(tensors), Mesh(world())
    parameters = model.parameters()
    optimizer = AdamW(parameters, lr=1e-3)
    x = Tensor(np.ones(16, np.float32))

    def forward_backward() -> None:
        model.start_step()
        with Tape() as tape:
            y = model(x)
        tape.run_backward([(y, np.ones(16, np.float32))])

    def clipped() -> None:
        clip((p.grad for p in parameters), [flat.grads for flat in model.flats], 1.0, lambda squares: squares)

    def reduced(ranks: int, kind: type[FlatReducer] | type[BucketedReducer]) -> float:
        """CPU seconds of one reduction, all ranks together."""
        times: list[float] = []

        def rank() -> None:
            chain = Chain(tensors)
            parameters = chain.parameters()
            reducer = kind(chain.flats, Mesh(world()))
            for count in (1, 3):
                start = time.process_time()
                for _ in range(count):
                    for p in reversed(parameters):
                        p.touched = True
                        reducer.add(p)
                    reducer.finish()
                world().barrier()
                times.append((time.process_time() - start) / count)

        LocalWorld(ranks).run(rank)
        return times[-1]

    def saved() -> None:
        slabs = checkpoint.slabs_of(parameters, optimizer.state_tensors(), mesh)
        with tempfile.TemporaryDirectory(prefix="mpitrain-bench-") as folder:
            checkpoint.save(folder, 1, slabs, {"updates": 0}, world())

    begin = time.process_time()
    saved()
    saving = time.process_time() - begin
    return {
        "forward and backward": cpu_seconds(forward_backward),
        "clip": cpu_seconds(clipped),
        "optimizer": cpu_seconds(optimizer.step),
        "flat reducer": reduced(2, FlatReducer),
        "bucketed reducer": reduced(2, BucketedReducer),
        "checkpoint": saving,
    }


SWEEPS: dict[str, tuple[Callable[[int], Costs], tuple[int, ...], str]] = {
    "ranks": (over_ranks, (1, 2, 4, 8, 16, 32, 64), "ranks as threads, one sequence each"),
    "layers": (over_layers, (1, 3, 6, 12, 25, 50, 100, 200), "layers of width 32"),
    "tensors": (over_tensors, (10, 100, 300, 1000, 3000, 10_000), "parameters of 16 numbers"),
    "micro-batches": (over_micro_batches, (1, 2, 4, 8, 16, 32, 64, 128, 256), "micro-batches of one sequence"),
    "T": (over_sequence, (64, 128, 256, 512, 1024, 2048), "tokens of one sequence, width 64"),
    "d": (over_width, (32, 64, 128, 256, 512, 1024), "width, 64 tokens"),
}
"""Name -> what is measured at a size, the sizes, and what the size counts."""

LINEAR = ("ranks", "layers", "tensors", "micro-batches")
"""Sweeps whose cost must be at most linear; T and d grow as their products do."""


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Slope of the least-squares line through the upper half of the points, both axes logarithmic."""
    half = len(sizes) // 2
    x = [math.log(size) for size in sizes[half:]]
    y = [math.log(second) for second in seconds[half:]]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def sweep(name: str, rounds: int) -> Iterator[tuple[int, Costs]]:
    """The least of the rounds at each size; a round is a whole sweep."""
    measure, sizes, _ = SWEEPS[name]
    best: dict[int, Costs] = {}
    for _ in range(rounds):
        for size in sizes:
            costs = measure(size)
            before = best.setdefault(size, costs)
            best[size] = {part: min(before[part], cost) for part, cost in costs.items()}
    yield from best.items()


def measure(names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Sweep -> part -> {sizes, seconds, exponent}."""
    found: dict[str, Any] = {}
    for name in names:
        points = list(sweep(name, rounds))
        sizes = [size for size, _ in points]
        found[name] = {}
        for part in points[0][1]:
            seconds = [costs[part] for _, costs in points]
            found[name][part] = {"sizes": sizes, "seconds": seconds, "exponent": exponent(sizes, seconds)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    options = parser.parse_args()
    print(json.dumps({"sweeps": measure(options.sweeps, options.rounds)}))


if __name__ == "__main__":
    main()
