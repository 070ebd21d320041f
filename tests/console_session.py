"""A debugged run of a small MLP without a terminal: what inspectors say at the places where it stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitrain.comm.baton import Ended
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.debug.console.watch import Watch
from mpitrain.debug.stepper import Stepper
from mpitrain.events import Event
from mpitrain.models.mlp import MLP
from mpitrain.nn.module import mark_recompute
from mpitrain.optim import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

CLASSES = 3
WIDTH = 8
ROWS = 12  # of a global batch


@dataclass
class Points:
    """Some rows of a batch."""

    inputs: np.ndarray
    targets: np.ndarray

    @property
    def count(self) -> int:
        return len(self.targets)

    def split(self, parts: int) -> list[Points]:
        cut = np.array_split(np.arange(self.count), parts)
        return [Points(self.inputs[piece], self.targets[piece]) for piece in cut]


def points(step: int, mesh: Mesh) -> Points:
    """This rank's rows of the batch of a step."""
    random = np.random.default_rng(step)
    inputs, targets = random.normal(size=(ROWS, 4)), random.integers(CLASSES, size=ROWS)
    mine = slice(mesh.dp.rank, None, mesh.dp.size)
    return Points(inputs[mine], targets[mine])


Goal = Callable[[Any, Event], bool]
Look = Callable[[Sequence[Watch]], Any]


def session(
    stops: Sequence[tuple[Goal | None, Look]],
    *,
    meddle: Callable[[Any, Mesh, int], None] | None = None,
    hear: Callable[[Watch, Event], None] | None = None,
    model_of: Callable[[Mesh], Any] | None = None,
    steps: int = 2,
    micros: int = 2,
    zero: int = 0,
    recompute: bool = False,
    dtype: Any = np.float64,
    schedule: str = "1f1b",
    batch_of: Callable[[np.ndarray, np.ndarray], Any] = Points,
    ranks: int = 4,
    **axes: int,
) -> list[Any]:
    """Train, and look at all ranks at each stop.

    Args:
        stops: how far all ranks go (None: to the end), and what looks at them then.
        meddle: called on every rank before each step.
        hear: told of each event of each rank after its watch.
        batch_of: makes a batch of inputs and targets.

    Returns:
        What each look gave.
    """
    watches: dict[int, Watch] = {}
    found: list[Any] = []

    def train() -> None:
        mesh = Mesh(world(), **axes)
        model = (
            MLP((4, WIDTH, WIDTH, CLASSES), mesh, seed=1, dtype=dtype, zero=zero)
            if model_of is None
            else model_of(mesh)
        )
        if recompute:
            mark_recompute(model, "blocks.*")
        rows = complete(schedule, ranks=mesh.pp.size, microbatches=micros)
        executor = Executor(model, AdamW(model.shares(), lr=1e-2), mesh, rows, clip=0.01)
        for step in range(steps):
            if meddle is not None:
                meddle(model, mesh, step)
            rows = points(step, mesh)
            executor.step(batch_of(rows.inputs, rows.targets))

    def companions(ranks: Any) -> list[Callable[[Event], None]]:
        watch = watches[ranks.rank] = Watch(ranks)
        return [watch, *([lambda event: hear(watch, event)] if hear is not None else [])]

    at = 0
    mistakes: list[BaseException] = []

    def prompt(why: str) -> None:  # must return, or nobody would go on
        nonlocal at
        if why == "failed":
            at = len(stops) + 1
        elif 0 < at <= len(stops):
            try:
                found.append(stops[at - 1][1]([watches[rank] for rank in sorted(watches)]))
            except BaseException as error:
                mistakes.append(error)
                stepper.end(1)
                return
        goal = stops[at][0] if at < len(stops) else None
        at += 1
        stepper.go(goal)

    stepper = Stepper(ranks, prompt, companions)

    def body() -> None:
        with stepper.around():
            train()

    try:
        LocalWorld(ranks, debugger=stepper).run(body)
    except Ended:
        raise mistakes[0] from None
    return found


def to(action: str, step: int = 1, phase: str = "begin") -> Goal:
    """To an action of a step."""
    return lambda view, event: (
        event.kind == "action" and event.phase == phase and view.step == step and event.name == action
    )


def op(name: str, path: str | None = None, phase: str = "begin", step: int = 1) -> Goal:
    """To an op."""

    def is_there(view: Any, event: Event) -> bool:
        is_it = event.kind == "op" and event.phase == phase and event.name == name and view.step >= step
        return is_it and (path is None or event.info["path"] == path)

    return is_there
