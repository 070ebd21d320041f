"""A convolutional network against one rank, as checks that any world can run: threads here, MPI's ranks in tests/mpi.

The images are drawn, so no package is needed that brings some.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import numpy as np

from mpitrain.backend import to_host
from mpitrain.comm.alone import Alone
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.data.images import Images
from mpitrain.debug.compare import compare
from mpitrain.debug.states import StateChecker
from mpitrain.events import listen
from mpitrain.models.cnn import CNN, accuracy
from mpitrain.nn.module import mark_recompute
from mpitrain.optim import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.partition import Partition
from mpitrain.pipeline.passes import complete

CLASSES, BATCH, STEPS = 4, 12, 5
GROUPS = ((3, 5), (4,))


@functools.cache
def patterns(seed: int = 7, count: int = 40) -> Images:
    """Noisy images of 7 x 6 pixels, of which the pools leave some over; 16 more to test with."""
    random = np.random.default_rng(seed)
    labels = random.integers(CLASSES, size=count + 16)
    pixels = random.standard_normal((CLASSES, 7, 6, 2))[labels] + random.standard_normal((count + 16, 7, 6, 2))
    return Images(pixels[:count], labels[:count], pixels[count:], labels[count:], seed)


def train(
    world: World,
    schedule: str = "1f1b",
    micros: int = 1,
    stages: tuple[int, ...] | None = None,
    zero: int = 0,
    checked: bool = False,
    dtype: Any = np.float64,
    xp: Any = np,
    policy: Any = None,
    norms: dict[str, bool] | None = None,
    again: str = "",
    **axes: int,
) -> dict[str, dict[str, np.ndarray]]:
    """What steps report, the last gradients and weights of this rank, and what it tells of test images.

    With norms: of the model's batch norms; their running statistics come as well.  `again`: what is recomputed.
    """
    mesh = Mesh(world, **axes)
    partition = None if stages is None else Partition(stages)
    how = {"seed": 3, "dtype": dtype, "zero": zero, "xp": xp, **(norms or {})}
    model = CNN(mesh, (7, 6, 2), GROUPS, CLASSES, partition=partition, **how)
    if again:
        mark_recompute(model, again, mesh.pp.exchange)
    chunks = model.num_stages // mesh.pp.size
    rows = complete(schedule, ranks=mesh.pp.size, microbatches=micros, chunks=chunks)
    executor = Executor(model, AdamW(model.shares(), lr=3e-3), mesh, rows, clip=0.5, policy=policy)
    images, steps = patterns(), []
    with listen(StateChecker(model.parameters(), mesh)) if checked else nullcontext():
        for batch in images.batches(BATCH, mesh.dp.rank, mesh.dp.size, stop_step=STEPS):
            loss = executor.step(batch)
            assert executor.report is not None
            steps.append([loss, executor.report.grad_norm, *executor.report.counted["correct"]])
    loss, right = accuracy(executor, images.test(5, mesh.dp.rank, mesh.dp.size))
    held = model.parameters() if not zero else model.shares()
    found = {"told": {"steps": np.array(steps), "test": np.array([loss, right])}}
    if norms:
        found["kept"] = {each.name: to_host(each.array).copy() for each in model.buffers()}
    return found | {
        "gradients": {p.name: to_host(p.grad).copy() for p in held},
        "weights": {p.name: to_host(p.data).copy() for p in held},
    }


@functools.cache
def alone(**norms: bool) -> dict[str, dict[str, np.ndarray]]:
    return train(World(Alone(), "none"), norms=norms)


def equals_one_rank(world: World, **how: Any) -> None:
    """Train on this world and alone, and compare by the rule of `debug.compare`: all that this rank holds."""
    whole, found = alone(**how.get("norms", {})), train(world, **how)
    kinds = tuple(kind for kind in whole if not how.get("zero") or kind in ("told", "kept"))  # of rows what they do
    for kind in kinds:
        for worst in compare(found[kind], {name: whole[kind][name] for name in found[kind]})[:1]:
            assert worst.ok, f"{kind}: {worst}"
    names = {name for each in world.exchange(list(found["weights"])) for name in each}
    assert names == set(whole["weights"])


def images_over_all_ranks(world: World) -> None:
    equals_one_rank(world)


def micro_batches(world: World) -> None:
    equals_one_rank(world, micros=3)


def a_pipeline_of_two(world: World) -> None:
    equals_one_rank(world, pp=2, micros=3, checked=True)


def a_pipeline_that_parts_backward(world: World) -> None:
    equals_one_rank(world, pp=2, micros=3, schedule="zb-h1", stages=(1, 2))


def stages_without_a_convolution(world: World) -> None:
    equals_one_rank(world, pp=4, micros=2, stages=(0, 2, 1, 0))


def rows_of_weights(world: World) -> None:
    equals_one_rank(world, zero=3)


NORMS = {"batch_norm": True}


def norms_over_all_ranks(world: World) -> None:
    """Each rank has another part of the batch, of the last one but padding; statistics are of the whole."""
    equals_one_rank(world, norms=NORMS, checked=True)


def norms_in_a_pipeline(world: World) -> None:
    equals_one_rank(world, norms=NORMS, pp=2, checked=True)


def norms_that_are_made_again(world: World) -> None:
    """Running statistics take each batch once."""
    equals_one_rank(world, norms=NORMS, again="blocks.*")


def norms_and_rows_of_weights(world: World) -> None:
    equals_one_rank(world, norms=NORMS, zero=3)


CHECKS = [
    images_over_all_ranks,
    micro_batches,
    a_pipeline_of_two,
    a_pipeline_that_parts_backward,
    stages_without_a_convolution,
    rows_of_weights,
    norms_over_all_ranks,
    norms_in_a_pipeline,
    norms_that_are_made_again,
    norms_and_rows_of_weights,
]
