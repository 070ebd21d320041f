"""Lesson 11: a convolutional network learns to read digits, and what waits for backward waits encoded.

    python examples/11_digits_cnn.py
    mpitrain local -n 4 examples/11_digits_cnn.py --pp 2
    mpirun -n 4 python examples/11_digits_cnn.py --gist 8
    mpirun -n 4 python examples/11_digits_cnn.py --batch-norm

Scikit-learn's handwritten digits, 8 x 8 pixels, are learned in some seconds (pip install scikit-learn).  A batch is
divided over dp, the convolutions over the stages of a pipeline.  With --gist the activations that backward will need
wait encoded: lossless, or rounded to 16, 10 or 8 bits.  With --batch-norm each channel is normalised over the batch of
all ranks, and tests go by the statistics that were kept.

Prints what the activations take either way, and how many of the images are told right: at the end those that were never
trained on, on all ranks together.  Ends with the difference to a serial run, of the first steps in float64.
"""

from __future__ import annotations

import mpitrain  # noqa: F401 - before NumPy

# isort: split
import argparse
from typing import Any

import numpy as np

from mpitrain.autograd import Tape
from mpitrain.comm.devices import device_of_rank
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.together import together
from mpitrain.comm.world import world
from mpitrain.data.digits import digits
from mpitrain.data.images import Images
from mpitrain.device import DEVICES
from mpitrain.memory.gist import Gist
from mpitrain.models.cnn import CNN, accuracy
from mpitrain.optim import Sgd
from mpitrain.optim.lr import cosine
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

BATCH, PEAK = 64, 0.1
POLICIES = {"none": None, "lossless": Gist(), **{str(bits): Gist(bits=bits) for bits in (16, 10, 8)}}


def start(images: Images, args: argparse.Namespace, pp: int, dtype: Any) -> Executor:
    """The network on the surrounding ranks, and what trains it."""
    xp = device_of_rank(world(), args.device).xp
    mesh = Mesh(world(), pp=pp)
    norms = {"batch_norm": args.batch_norm, "per_microbatch": args.per_microbatch}
    model = CNN(mesh, images.shape, groups=((16, 32), (64,)), classes=10, seed=args.seed, dtype=dtype, xp=xp, **norms)
    optimizer = Sgd(model.parameters(), lr=PEAK, momentum=0.9, weight_decay=1e-3)
    per_epoch = images.order(BATCH).steps_per_epoch
    rows = complete("1f1b", ranks=pp, microbatches=args.microbatches)
    rate = lambda update: cosine(update, args.epochs * per_epoch, per_epoch, PEAK)  # noqa: E731
    return Executor(model, optimizer, mesh, rows, lr=rate, policy=POLICIES[args.gist])


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


def print_bytes(images: Images, args: argparse.Namespace) -> None:
    """What waits after forward of one batch on one rank, as it is and encoded."""
    [model] = LocalWorld(1).run(lambda: CNN(Mesh(world()), images.shape, batch_norm=args.batch_norm))
    batch, plain = images.batch_at(0, BATCH), 0
    print(f"Activations of {BATCH} images at the first step:")
    for name, policy in POLICIES.items():
        with Tape(policy) as tape:
            model(batch)
        plain = tape.nbytes if policy is None else plain
        print(f"    --gist {name:<9}{tape.nbytes / 1024:>8,.1f} KiB{plain / tape.nbytes:>7.2f}x")


def main() -> None:
    """Train, test, and compare with one rank."""
    parser = argparse.ArgumentParser(description="A convolutional network learns to read digits.")
    parser.add_argument("--pp", type=int, default=1, help="stages of the pipeline; other ranks divide the images")
    parser.add_argument("--microbatches", type=int, default=1, help="parts of a batch that go through one by one")
    parser.add_argument("--batch-norm", action="store_true", help="normalise channels, over the whole batch")
    parser.add_argument("--per-microbatch", action="store_true", help="... over each micro-batch by itself")
    parser.add_argument("--epochs", type=int, default=16, help="how often each image is seen")
    parser.add_argument("--gist", choices=POLICIES, default="none", help="how activations wait for backward")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="what computes; cuda: a GPU for each rank")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order")
    args = parser.parse_args()

    images = together(world(), lambda: digits(args.seed))  # a host may lack them
    executor = start(images, args, args.pp, np.float32)
    mesh, steps = executor.mesh, args.epochs * images.order(BATCH).steps_per_epoch
    if mesh.is_reporter:
        print_bytes(images, args)
        print(
            f"dp {mesh.dp.size}, pp {mesh.pp.size} with {executor.model.partition.layers} convolutions, {steps} steps"
        )
    train(executor, images, steps)
    loss, share = accuracy(executor, images.test(BATCH, mesh.dp.rank, mesh.dp.size))

    losses = train(start(images, args, args.pp, np.float64), images, 3)
    if mesh.is_reporter:
        print(f"test: loss {loss:.4f}, {share:.2%} of {len(images.test_images)} images told right")
        [serial] = LocalWorld(1).run(lambda: train(start(images, args, 1, np.float64), images, 3))
        print(f"largest difference of a loss to the serial run: {np.abs(np.subtract(losses, serial)).max():.1e}")


if __name__ == "__main__":
    main()
