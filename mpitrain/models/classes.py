"""What networks that tell classes apart have in common: the loss, and how many rows they told right."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from mpitrain.autograd.auxiliary import add_counts, collect, counting
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, to_device, to_host
from mpitrain.nn.loss import cross_entropy

CORRECT = "correct"
"""What forward passes count: the rows whose class has the highest score."""


def loss_of_classes(scores: Tensor, targets: Any, like: Array, counts: bool = True) -> Tensor:
    """The sum over the rows that count of the cross-entropy; counts the rows that are told right.

    Args:
        scores: (b, classes).
        targets: (b,) class numbers; IGNORE for rows that do not count.
        like: an array where the scores are: there go targets from the host.
        counts: whether this rank is the one that counts, of those that have the same rows.
    """
    targets = to_device(targets, like=like)
    if counting():
        right = (scores.data.argmax(-1) == targets).sum()  # IGNORE is no class
        add_counts(CORRECT, [int(to_host(right)) if counts else 0])
    return cross_entropy(scores, targets)


def accuracy(executor: Any, batches: Iterable[Any]) -> tuple[float, float]:
    """Mean loss and share of right answers over the rows of all ranks' batches; the same on every rank.

    Args:
        executor: of a model that counts CORRECT.
        batches: of this rank, as for `executor.evaluate`.
    """
    rows = 0

    def counted() -> Iterable[Any]:
        nonlocal rows
        for batch in batches:
            rows += batch.count
            yield batch

    with collect() as said:
        loss = executor.evaluate(counted())
    mesh = executor.mesh
    right = float(said.counts.get(CORRECT, np.zeros(1))[0])
    rows = 0 if mesh.coords["tp"] or mesh.coords["pp"] else rows  # others were given the same ones
    right, total = mesh.world.all_reduce(np.array([right, rows]))
    return loss, float(right / total) if total else 0.0
