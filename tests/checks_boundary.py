"""Messages of any size between the stages of a pipeline, as checks that any world of four ranks can run.

MPI buffers small messages, so a pipeline whose neighbours wait for each other works on toy sizes and hangs on real
ones.  Each check runs 1F1B, interleaved and ZB-H1 with eight micro-batches on two and on four stages, and compares
losses, norms and weights with one rank.  The model does next to nothing, so a boundary may have any size.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from mpitrain.autograd.tensor import Tensor
from mpitrain.comm.alone import Alone
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.debug.compare import compare
from mpitrain.nn.module import Boundary, Module
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.sgd import Sgd
from mpitrain.pipeline.action import parse
from mpitrain.pipeline.check import check
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

KIB, MIB = 1 << 10, 1 << 20
WIDTH = 64
MICROS = 8
Way = tuple[str, int, int]
"""Schedule, ranks of pp, chunks."""
WAYS: list[Way] = [("1f1b", 2, 1), ("interleaved", 2, 2), ("1f1b", 4, 1), ("interleaved", 4, 2), ("zb-h1", 4, 1)]
FEW: list[Way] = [("interleaved", 2, 2), ("1f1b", 4, 1)]


@dataclass
class Rows:
    """Rows that are made from their numbers when they are wanted, so that a batch takes no memory."""

    first: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.first

    def split(self, parts: int) -> list[Rows]:
        size = self.count // parts
        return [Rows(start, start + size) for start in range(self.first, self.stop, size)]

    @property
    def values(self) -> np.ndarray:
        """(rows, WIDTH)"""
        return np.cos(np.arange(self.first, self.stop)[:, None] * 0.7 + np.arange(WIDTH))


class Scale(Module):
    """One weight a column."""

    def __init__(self, stage: int) -> None:
        super().__init__(f"scales.{stage}")
        self.weight = Parameter(
            f"{self.name}.weight", (WIDTH,), init=lambda *_: 1.0 + np.sin(stage + np.arange(WIDTH)) / 8
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Thin(Module):
    """Each stage scales: x <- x * weight, by numbers near one; the loss is the sum of the squares at the end."""

    def __init__(self, mesh: Mesh, stages: int) -> None:
        super().__init__("thin")
        self.num_stages = stages
        self.stages = tuple(range(mesh.pp.rank, stages, mesh.pp.size))
        self.scales = [Scale(stage) for stage in self.stages]
        self.materialize(mesh, 0, np.float64)

    def forward_stage(self, stage: int, batch: Rows, *inputs: Tensor, carry: Any = None) -> tuple[Tensor, ...]:
        (x,) = inputs or (Tensor(batch.values),)
        y = self.scales[self.stages.index(stage)](x)
        return (y,) if stage < self.num_stages - 1 else ((y * y).sum(),)

    def boundary(self, stage: int, batch: Rows) -> tuple[Boundary, ...]:
        return (Boundary((batch.count, WIDTH), np.dtype(np.float64), {}),) if stage else ()


def train(
    world: World, schedule: str, pp: int, chunks: int, nbytes: int, prepare: Callable[[Executor], None] = lambda _: None
) -> dict[str, np.ndarray]:
    """Losses, norms and all weights after two steps whose boundary messages have so many bytes."""
    mesh = Mesh(world, pp=pp)
    model = Thin(mesh, pp * chunks)
    rows = complete(schedule, ranks=pp, microbatches=MICROS, chunks=chunks)
    executor = Executor(model, Sgd(model.parameters(), lr=0.1, momentum=0.9), mesh, rows, clip=0.1)
    prepare(executor)
    size = MICROS * nbytes // (8 * WIDTH)  # rows of a step, the same on all ranks of dp
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(2):
        found["losses"].append(executor.step(Rows(step * size, (step + 1) * size)))
        assert executor.report is not None
        found["norms"].append(executor.report.grad_norm)
    assert executor.bytes_in_flight == 0
    for told in world.exchange({p.name: p.data.tolist() for p in model.parameters()}):
        found |= told
    return {name: np.array(values) for name, values in found.items()}


@functools.lru_cache(maxsize=8)
def _alone(stages: int, nbytes: int) -> dict[str, np.ndarray]:
    return train(World(Alone(), "none"), "interleaved", 1, stages, nbytes)


def equals_one_rank(world: World, nbytes: int, ways: list[Way]) -> None:
    """Train in several ways and compare each with one rank, which is rank 0: a large message is slow to make."""
    for schedule, pp, chunks in ways:
        mine = train(world, schedule, pp, chunks, nbytes)
        if world.rank == 0:
            worst = compare(mine, _alone(pp * chunks, nbytes))[0]
            assert worst.ok, f"{schedule} on {pp} ranks, {nbytes} bytes: {worst}"


def synchronous_sends() -> Any:
    """While it is entered no send is complete before its receive is posted, however small it is.

    Ranks that are threads have no other sends.  Under MPI they become Issend.
    """
    module = sys.modules.get("mpitrain.comm.mpi_transport")
    if module is None:
        return nullcontext()
    return mock.patch.object(module.MpiTransport, "isend", _issend)


def _issend(self: Any, buf: np.ndarray, dest: int, tag: int) -> Any:
    from mpitrain.comm.in_flight import MpiPending

    return MpiPending(self._flight, self._comm.Issend(buf, dest, tag), (buf,))


def with_blocking_sends(executor: Executor) -> None:
    """Make an executor send as it must not: each send returns when MPI lets it, and receives are posted when needed.

    MPI buffers a small message and returns at once.  It returns from the send of a large one when that is received,
    and where the neighbour is in such a send itself, never.
    """
    links = executor.links

    def send(kind: str, stage: int, unit: int, arrays: Sequence[np.ndarray]) -> None:
        peer = links._rank_of[stage + 1 if kind == "F" else stage - 1]
        for array in arrays:
            links._axis.send(array, peer, links._tag(kind, stage, unit))

    links.send = send  # type: ignore[method-assign]
    executor._plan(1).next_receive.clear()


def blocked_at(schedule: str, pp: int, chunks: int) -> list[tuple[int, int, int]]:
    """Where ranks would wait for ever if sends blocked, as the checker foresees it: (rank, peer, tag) of each send."""
    checked = check(complete(schedule, ranks=pp, microbatches=MICROS, chunks=chunks))
    stages, found = pp * chunks, []
    for rank, word in re.findall(r"rank (\d+) at (SEND_[^;]+)", checked.blocking_hang or ""):
        kind, micro, stage, _ = parse(word)
        peer = checked.placement[stage + (1 if kind == "SEND_F" else -1)]
        found.append((int(rank), peer, 2 * ((micro or 0) * stages + stage) + (kind == "SEND_B")))
    return found


def _check(nbytes: int, synchronous: bool, ways: list[Way] = WAYS) -> Callable[[World], None]:
    def boundaries(world: World) -> None:
        with synchronous_sends() if synchronous else nullcontext():
            equals_one_rank(world, nbytes, ways)

    size = f"{nbytes // MIB}_MiB" if nbytes >= MIB else f"{nbytes // KIB}_KiB"
    boundaries.__name__ = f"boundaries_of_{size}" + ("_sent_synchronously" if synchronous else "")
    return boundaries


CHECKS = [
    *(_check(nbytes, synchronous) for nbytes in (KIB, 64 * KIB) for synchronous in (False, True)),
    _check(4 * MIB, False, FEW),
]
MORE = [
    *(_check(nbytes, synchronous) for nbytes in (4 * MIB, 8 * MIB) for synchronous in (False, True)),
]
"""Those that take long."""
