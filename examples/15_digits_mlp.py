"""Lesson 15: a multi-layer perceptron learns to read digits, by the same executor as a GPT, on any ranks.

    python examples/15_digits_mlp.py
    mpitrain local -n 4 examples/15_digits_mlp.py --tp 2
    mpirun -n 4 python examples/15_digits_mlp.py --pp 2 --microbatches 4

Scikit-learn's handwritten digits, 8 x 8 pixels, are learned in some seconds (pip install scikit-learn).  To this model
an image is a row of 64 numbers.  A batch is divided over dp, the hidden units over tp, the blocks over the stages of a
pipeline; nothing of the loop below knows how.

Prints how many of the images are told right: at the end those that were never trained on, on all ranks together.  Ends
with the difference to a serial run, of the first steps in float64.
"""

from __future__ import annotations

import mpitrain  # noqa: F401 - before NumPy

# isort: split
import argparse
import math
from typing import Any

import numpy as np

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.together import together
from mpitrain.comm.world import world
from mpitrain.data.digits import digits
from mpitrain.data.images import Images
from mpitrain.models.classes import accuracy
from mpitrain.models.mlp import MLP
from mpitrain.optim import AdamW
from mpitrain.optim.lr import cosine
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

BATCH, PEAK, HIDDEN = 64, 3e-3, (128, 96)


def start(images: Images, args: argparse.Namespace, pp: int, tp: int, dtype: Any) -> Executor:
    """The network on the surrounding ranks, and what trains it."""
    mesh = Mesh(world(), pp=pp, tp=tp)
    model = MLP((math.prod(images.shape), *HIDDEN, 10), mesh, seed=args.seed, dtype=dtype)
    optimizer = AdamW(model.parameters(), lr=PEAK, weight_decay=0.05)
    per_epoch = images.order(BATCH).steps_per_epoch
    rows = complete("1f1b", ranks=pp, microbatches=args.microbatches)
    rate = lambda update: cosine(update, args.epochs * per_epoch, per_epoch, PEAK)  # noqa: E731
    return Executor(model, optimizer, mesh, rows, lr=rate)


def train(executor: Executor, images: Images, steps: int) -> list[float]:
    """The losses; every fourth epoch is told."""
    mesh, per_epoch, reports = executor.mesh, images.order(BATCH).steps_per_epoch, []
    for batch in images.batches(BATCH, mesh.dp.rank, mesh.dp.size, stop_step=steps):
        executor.step(batch)
        reports.append(executor.report)
        if mesh.is_reporter and len(reports) % (4 * per_epoch) == 0:
            seen = reports[-per_epoch:]
            right = sum(report.counted["correct"][0] for report in seen) / sum(report.targets for report in seen)
            loss = np.mean([report.loss for report in seen])
            print(f"    epoch {batch.epoch + 1:2d}  loss {loss:.4f}  {right:6.1%} of the images told right")
    return [report.loss for report in reports]


def main() -> None:
    """Train, test, and compare with one rank."""
    parser = argparse.ArgumentParser(description="A multi-layer perceptron learns to read digits.")
    parser.add_argument("--pp", type=int, default=1, help="stages of the pipeline")
    parser.add_argument("--tp", type=int, default=1, help="ranks that divide hidden units; others divide images")
    parser.add_argument("--microbatches", type=int, default=1, help="parts of a batch that go through one by one")
    parser.add_argument("--epochs", type=int, default=16, help="how often each image is seen")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order")
    args = parser.parse_args()

    images = together(world(), lambda: digits(args.seed))  # a host may lack them
    executor = start(images, args, args.pp, args.tp, np.float32)
    mesh, steps = executor.mesh, args.epochs * images.order(BATCH).steps_per_epoch
    if mesh.is_reporter:
        print(f"{executor.model.num_parameters:,} parameters, dp {mesh.dp.size}, pp {mesh.pp.size}, tp {mesh.tp.size}")
    train(executor, images, steps)
    loss, share = accuracy(executor, images.test(BATCH, mesh.dp.rank, mesh.dp.size))

    losses = train(start(images, args, args.pp, args.tp, np.float64), images, 3)
    if mesh.is_reporter:
        print(f"test: loss {loss:.4f}, {share:.2%} of {len(images.test_images)} images told right")
        [serial] = LocalWorld(1).run(lambda: train(start(images, args, 1, 1, np.float64), images, 3))
        print(f"largest difference of a loss to the serial run: {np.abs(np.subtract(losses, serial)).max():.1e}")


if __name__ == "__main__":
    main()
