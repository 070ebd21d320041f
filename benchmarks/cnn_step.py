"""CPU milliseconds of a training step of the digits CNN, mpitrain's and PyTorch's eager one, of the same network.

    python benchmarks/cnn_step.py --rounds 5

PyTorch has it twice, with its images as it lays them by default and with channels last.  All begin with the same
weights and see the same images; one thread, in this process and by turns, SGD with momentum.
"""

from __future__ import annotations

import mpitrain  # noqa: F401 - before NumPy

# isort: split
import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import twin_cnn

from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.data.images import ImageBatch
from mpitrain.models.cnn import CNN
from mpitrain.optim import Sgd
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

BATCHES = (64, 256)
STRETCH_S = 0.25
LR, MOMENTUM = 0.01, 0.9

Step = Callable[[], float]
"""One step; returns the loss before it."""


def images(batch: int) -> ImageBatch:
    """As large as the digits are, and as random as they are not: what is computed takes as long."""
    draws = np.random.default_rng(0)
    return ImageBatch(draws.standard_normal((batch, 8, 8, 1)).astype(np.float32), draws.integers(10, size=batch), 0)


def mine(batch: ImageBatch) -> tuple[CNN, Step]:
    """The network, and mpitrain's step."""
    mesh = Mesh(world())
    model = CNN(mesh)
    rows = complete("1f1b", ranks=1, microbatches=1)
    executor = Executor(model, Sgd(model.parameters(), lr=LR, momentum=MOMENTUM), mesh, rows)
    return model, lambda: executor.step(batch)


def peer(model: CNN, batch: ImageBatch, channels_last: bool) -> Step:
    """PyTorch's step of the same network."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    network = twin_cnn.network(model).to(memory_format=layout)
    inputs = twin_cnn.images(batch.inputs).contiguous(memory_format=layout)
    targets = torch.tensor(batch.targets)
    optimizer = torch.optim.SGD(network.parameters(), lr=LR, momentum=MOMENTUM, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def measure(rounds: int) -> dict[str, Any]:
    """CPU ms a step: batch -> side -> one a round.

    Raises:
        AssertionError: the losses of the first steps differ, so it is not the same network.
    """
    result: dict[str, Any] = {}
    for size in BATCHES:
        batch = images(size)
        model, own = mine(batch)
        sides = {
            "mpitrain": own,
            "torch": peer(model, batch, channels_last=False),
            "torch, channels last": peer(model, batch, channels_last=True),
        }
        first = {side: [step() for _ in range(5)] for side, step in sides.items()}
        assert all(np.allclose(losses, first["torch"], rtol=1e-4) for losses in first.values()), first
        repeats = max(3, round(STRETCH_S * 1e3 / max(milliseconds_of(step, 3) for step in sides.values())))
        found: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(rounds):
            for side in list(sides) if number % 2 == 0 else list(reversed(sides)):
                milliseconds_of(sides[side], 1)
                found[side].append(milliseconds_of(sides[side], repeats))
        result[str(size)] = found
    return result


def milliseconds_of(step: Step, repeats: int) -> float:
    """Of one step, CPU time: no step waits for anything."""
    start = time.process_time()
    for _ in range(repeats):
        step()
    return 1e3 * (time.process_time() - start) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps({"ms": measure(options.rounds)}))


if __name__ == "__main__":
    main()
