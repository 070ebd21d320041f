"""What a forward pass says besides its output: losses of its own, and numbers that are counted.

A part of the model may have an opinion of its own work: a router wants its experts equally busy, wherever in the
pipeline it stands.  It adds a loss where it makes it, and whoever runs the pass seeds it in backward, beside the
outputs:

    with collect() as said, Tape() as tape:
        outputs = model(batch)                       # inside: add_loss("blocks.1.mlp", value, 0.01)
    tape.run_backward([*seeds_of_outputs, *seeds_of(said.losses, 1 / rows)])

Such a loss is a sum over the rows of the batch that are here, and the objective takes its mean over the rows of the
whole step: it counts rows, not tokens, so its strength depends on no layout and no number of micro-batches.

A model whose parts do so says it: `adds_losses` has the rows counted, `counted` names what is (`nn.module.Module`).

Where nobody collects, as in evaluation or in the second forward of a recomputed part, nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

from mpitrain.autograd.inner import hand_out
from mpitrain.autograd.tape import Seed
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import array_module


class AuxiliaryLoss(NamedTuple):
    """One loss besides the main one.

    Attributes:
        name: of the part of the model that added it.
        value: () the sum over the rows that are here.
        coefficient: its weight in the objective.
    """

    name: str
    value: Tensor
    coefficient: float


class Said:
    """What one forward pass has said.

    Attributes:
        losses: in the order in which they were added.
        counts: by name, the sums of what was counted: float64 vectors on the host.
    """

    def __init__(self) -> None:
        self.losses: list[AuxiliaryLoss] = []
        self.counts: dict[str, np.ndarray] = {}

    def add_to(self, totals: dict[str, np.ndarray]) -> None:
        """Add the counts to those of other passes."""
        for name, vector in self.counts.items():
            totals[name] = totals[name] + vector if name in totals else vector


def seeds_of(losses: Sequence[AuxiliaryLoss], scale: float) -> list[Seed]:
    """Seeds of auxiliary losses for the tape that they are on.

    Args:
        scale: of the gradients, over the number of rows in the mean.
    """
    return [
        (value, array_module(value.data).full_like(value.data, scale * coefficient)) for _, value, coefficient in losses
    ]


SAID: ContextVar[Said | None] = ContextVar("mpitrain.said", default=None)
"""Who collects just now, one a rank; None: nobody."""


@contextmanager
def collect() -> Iterator[Said]:
    """Collect what the forward passes inside say."""
    said = Said()
    token = SAID.set(said)
    try:
        yield said
    finally:
        SAID.reset(token)


def add_loss(name: str, value: Tensor, coefficient: float) -> None:
    """Add a loss to the objective, if anyone collects.

    Args:
        name: of the part of the model.
        value: () the sum over the rows of the batch that are here; where ranks share a row, of this rank's part of it.
        coefficient: weight of the mean over rows.
    """
    if not value.requires_grad:
        return
    hand_out(value)
    said = SAID.get()
    if said is not None:
        said.losses.append(AuxiliaryLoss(name, value, coefficient))


def counting() -> bool:
    """Whether anyone collects: else nothing need be counted."""
    return SAID.get() is not None


def add_counts(name: str, numbers: Any) -> None:
    """Count, if anyone collects: `numbers` are added to those of the same name, over micro-batches and ranks.

    Args:
        name: one of the model's `counted`.
        numbers: a vector on the host, as long as that says.
    """
    said = SAID.get()
    if said is not None:
        vector = np.asarray(numbers, np.float64)
        before = said.counts.get(name)
        said.counts[name] = vector if before is None else before + vector
