"""What asynchronous pipelines compute, replayed on one rank without a pipeline: the reference of their proofs.

    for each micro-batch    put the weights of each stage to the version that its table says
                            one forward and one backward of the whole model, as anybody would
    after a mini-batch      put the weights to the newest version, update, keep a copy as the next version

Nothing of the library's schedules, executor or weight pool is used: the tables are read from the papers' rules, and
every version of every weight is kept.

Source: the update rules of Harlap et al. 2018, arXiv:1806.03377 (weight stashing, vertical sync), and of Narayanan et
al. 2020, arXiv:2006.09503 (2BW).  Their stages 1 ... n are 0 ... n - 1 here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.autograd.tape import Tape
from mpitrain.nn.module import Module
from mpitrain.optim import Optimizer

Rule = Callable[[int, int, int, int], int]
"""(stage, number of stages, micro-batch, micro-batches of a mini-batch) -> how many updates the weights have seen with
which the stage computes it."""


def stashing(stage: int, stages: int, micro: int, micros: int) -> int:
    """w^(t+1) = w^(t) - v grad f(w_1^(t-n+1), w_2^(t-n+2), ..., w_n^(t)): the later a stage, the newer its weights.

    Stage i has seen all but n - 1 - i of the gradients before, and updates after each `micros` of them.
    """
    return max(0, micro - (stages - 1 - stage)) // micros


def vertical_sync(stage: int, stages: int, micro: int, micros: int) -> int:
    """w^(t+1) = w^(t) - v grad f(w_1^(t-n+1), ..., w_n^(t-n+1)): every stage as old as the first."""
    return max(0, micro - (stages - 1)) // micros


def double_buffered(stage: int, stages: int, micro: int, micros: int) -> int:
    """W^(t+1) = W^(t) - v grad f(W^(t-1)): one batch late, on every stage."""
    return max(0, micro // micros - 1)


def newest(stage: int, stages: int, micro: int, micros: int) -> int:
    """W^(t+1) = W^(t) - v grad f(W^(t)): what all who flush compute."""
    return micro // micros


class Replayed(NamedTuple):
    """losses: mean of each mini-batch over its targets; norms: of its gradient, before clipping; versions: of each
    micro-batch, on each stage."""

    losses: list[float]
    norms: list[float]
    versions: list[tuple[int, ...]]


def replay(
    model: Module,
    optimizer: Optimizer,
    rows: Iterable[Sequence[Any]],
    rule: Rule,
    stage_of: Callable[[str], int],
    stages: int,
    micros: int = 1,
    lr: Callable[[int], float] | None = None,
    clip: float = math.inf,
) -> Replayed:
    """Train a whole model with the weights that a pipeline would use; both are left as they are at the end.

    Args:
        model: all stages; `model(batch)` is the sum of the loss over the batch's targets.
        optimizer: over its parameters.
        rows: the mini-batches of each row.  Between two rows the pipeline is empty: the next one begins with the newest
            weights on all stages, and counts its mini-batches from 0.
        rule: which version computes what.
        stage_of: the stage of a parameter, by its name.
        stages: how many there are.
        micros: micro-batches of a mini-batch.
        lr: learning rate by number of updates done; the optimizer's own unless given.
        clip: largest global norm of a mini-batch's gradient.
    """
    parameters = model.parameters()
    kept = [[p.data.copy() for p in parameters]]  # by version
    losses, norms, versions = [], [], []
    for row in rows:
        first = len(kept) - 1
        for number, batch in enumerate(row):
            model.start_step()
            total, share = 0.0, 1.0 / batch.count if batch.count else 0.0
            for place, part in enumerate(batch.split(micros)):
                micro = number * micros + place
                used = tuple([first + rule(stage, stages, micro, micros) for stage in range(stages)])
                for i, p in enumerate(parameters):
                    p.data[...] = kept[used[stage_of(p.name)]][i]
                with Tape() as tape:
                    loss = model(part)
                tape.run_backward([(loss, np.full_like(loss.data, share))])
                total += float(loss.data)
                versions.append(used)
            losses.append(total * share)
            norms.append(math.sqrt(sum(float((p.grad**2).sum()) for p in parameters)))
            for p in parameters:
                p.grad *= min(1.0, clip / (norms[-1] + 1e-6))
            for p, value in zip(parameters, kept[-1], strict=True):
                p.data[...] = value
            optimizer.step(None if lr is None else lr(optimizer.updates))
            kept.append([p.data.copy() for p in parameters])
    return Replayed(losses, norms, versions)


def gpt_stage(layers: Sequence[int]) -> Callable[[str], int]:
    """The stage of a GPT's parameters: token table and positions on the first, last norm and head on the last.

    Args:
        layers: blocks on each stage.
    """
    stage_of_block = [stage for stage, count in enumerate(layers) for _ in range(count)]

    def stage_of(name: str) -> int:
        part, *rest = name.split(".")
        if part == "blocks":
            return stage_of_block[int(rest[0])]
        return {"table": 0, "positions": 0, "norm": len(layers) - 1, "head": len(layers) - 1}[part]

    return stage_of
