"""A model that fits on paper, y = w_n ... w_1 x, one weight a stage, and its training by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpitrain.nn.module import Boundary, Module
from mpitrain.nn.parameter import Parameter


@dataclass
class Numbers:
    """x and the y that is wanted for it."""

    x: np.ndarray
    y: np.ndarray

    @property
    def count(self):
        return len(self.x)

    def split(self, parts):
        return [Numbers(x, y) for x, y in zip(np.split(self.x, parts), np.split(self.y, parts), strict=True)]


class Factor(Module):
    """One weight, 1 + stage / 8 at the start."""

    def __init__(self, stage):
        super().__init__(f"factors.{stage}")
        self.weight = Parameter(f"{self.name}.weight", (1,), init=lambda *_: np.array([1 + stage / 8]))

    def forward(self, x):
        return self.weight * x


class Chain(Module):
    """One factor a stage; the loss is the sum of (y - w_n ... w_1 x)^2 / 2."""

    def __init__(self, mesh, stages):
        super().__init__("chain")
        self.num_stages = stages
        self.stages = tuple(range(mesh.pp.rank, stages, mesh.pp.size))
        self.factors = [Factor(stage) for stage in self.stages]
        self.materialize(mesh, 0, np.float64)

    def forward_stage(self, stage, batch, *inputs, carry=None):
        (x,) = inputs or (batch.x,)
        y = self.factors[self.stages.index(stage)](x)
        return (y,) if stage < self.num_stages - 1 else (((y - batch.y) ** 2.0).sum() * 0.5,)

    def forward(self, batch):
        inputs = ()
        for stage in self.stages:
            inputs = self.forward_stage(stage, batch, *inputs)
        return inputs[0]

    def boundary(self, stage, batch):
        return (Boundary(batch.x.shape, np.float64, {}),) if stage else ()


def numbers(batches, size):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(batches, size))
    return [Numbers(row, 0.3 * row + 0.01 * generator.normal(size=size)) for row in x]


def on_paper(batches, stages, lr, age):
    """w_i <- w_i - lr dL/dw_i, with the derivatives by hand; age(i, t): version that stage i uses at time t."""
    history = [np.array([1.0 + stage / 8 for stage in range(stages)])]
    for t, batch in enumerate(batches):
        w = np.array([history[age(i, t)][i] for i in range(stages)])
        error = (batch.x * w.prod() - batch.y) * batch.x
        gradient = np.array([error.mean() * np.delete(w, i).prod() for i in range(stages)])
        history.append(history[-1] - lr * gradient)
    return history
