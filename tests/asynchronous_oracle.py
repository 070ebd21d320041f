"""What asynchronous schemes compute, on one rank without messages: the reference of their proofs.

    one_by_one      the gradient of step t is applied in step t + K
    side_by_side    worker w's own gradient of step t is applied, weighted, in step t + its delay
    apart           a model and an optimizer for each worker, weights averaged after every H steps

Nothing of the library's reducers or executor is used: gradients wait in plain lists, a model each stands for a worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.autograd.auxiliary import collect, seeds_of
from mpitrain.autograd.tape import Tape
from mpitrain.nn.module import Module
from mpitrain.optim import Optimizer


class Told(NamedTuple):
    """losses: of each step, the mean over all targets; norms: root of the mean of the squares of what was clipped."""

    losses: list[float]
    norms: list[float]


class Own(NamedTuple):
    """One worker's gradient: the sum of its losses, its targets, its mean gradient and the norm before clipping."""

    loss: float
    targets: int
    gradients: list[np.ndarray]
    norm: float


def own(model: Module, batch: Any, clip: float = math.inf) -> Own:
    """The gradient of the mean loss over a batch, no longer than `clip`."""
    model.start_step()
    with collect() as said, Tape() as tape:
        loss = model(batch)
    seed = np.full_like(loss.data, 1.0 / batch.count if batch.count else 0.0)
    tape.run_backward([(loss, seed), *(seeds_of(said.losses, 1.0 / batch.rows) if said.losses else ())])
    gradients = [p.grad.copy() if p.touched else np.zeros_like(p.grad) for p in model.parameters()]
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
    return Own(float(loss.data), batch.count, [g * min(1.0, clip / (norm + 1e-6)) for g in gradients], norm)


def apply(model: Module, optimizer: Optimizer, gradients: Sequence[np.ndarray]) -> None:
    for p, g in zip(model.parameters(), gradients, strict=True):
        p.grad[...] = g
        p.touched = True
    optimizer.step()


def one_by_one(
    model: Module, optimizer: Optimizer, batches: Sequence[Any], delay: int, clip: float = math.inf, start: int = 0
) -> Told:
    """Stale gradients of whole batches, from a step on; no update where none has arrived."""
    found = []
    for t, batch in enumerate(batches):
        found.append(own(model, batch, clip))
        if t < start:
            apply(model, optimizer, found[t].gradients)
        elif t >= start + delay:
            apply(model, optimizer, found[t - delay].gradients)
    return Told([each.loss / each.targets for each in found], [each.norm for each in found])


def side_by_side(
    model: Module, optimizer: Optimizer, steps: Sequence[Sequence[Any]], staleness: int, clip: float = math.inf
) -> Told:
    """Stale gradients of workers; `steps`: of each step the batch of each worker."""
    past: list[list[list[np.ndarray]]] = []
    told = Told([], [])
    for t, batches in enumerate(steps):
        found = [own(model, batch, clip) for batch in batches]
        _tell(told, found)
        targets = sum(each.targets for each in found)
        past.append([[g * each.targets / targets for g in each.gradients] for each in found])
        sums = [np.zeros_like(p.grad) for p in model.parameters()]
        for worker in range(len(batches)):
            delay = worker % (staleness + 1)
            if t >= delay:
                sums = [total + g for total, g in zip(sums, past[t - delay][worker], strict=True)]
        apply(model, optimizer, sums)
    return told


def apart(
    models: Sequence[Module],
    optimizers: Sequence[Optimizer],
    steps: Sequence[Sequence[Any]],
    local_steps: int,
    with_moments: bool = False,
    clip: float = math.inf,
) -> Told:
    """Local SGD; afterwards the models are as their workers are."""
    told = Told([], [])
    learned = np.zeros(len(models))
    for t, batches in enumerate(steps):
        found = [own(model, batch, clip) for model, batch in zip(models, batches, strict=True)]
        _tell(told, found)
        learned += [each.targets for each in found]
        for model, optimizer, each in zip(models, optimizers, found, strict=True):
            apply(model, optimizer, each.gradients)
        if (t + 1) % local_steps == 0:
            average([[p.data for p in model.parameters()] for model in models], learned)
            if with_moments:
                states = [optimizer.state_dict() for optimizer in optimizers]
                average([[a for of in state.values() for a in of.values()] for state in states], learned)
            learned[:] = 0
    return told


def average(of_workers: Sequence[Sequence[np.ndarray]], weights: np.ndarray) -> None:
    """Put in the place of each array the weighted mean of those of all workers."""
    for arrays in zip(*of_workers, strict=True):
        mean = sum(w * array for w, array in zip(weights / weights.sum(), arrays, strict=True))
        for array in arrays:
            array[...] = mean


def _tell(told: Told, found: Sequence[Own]) -> None:
    told.losses.append(sum(each.loss for each in found) / sum(each.targets for each in found))
    told.norms.append(math.sqrt(sum(each.norm**2 for each in found) / len(found)))
