"""Adafactor's sums over parameters of which ranks hold parts: two messages for each set of axes that cut some.

A matrix brings the sums of its rows where other ranks hold other columns, those of its columns where they hold other
rows, a number for the matrix where either, and one for the tensor; a bias the last alone.  The second message has one
number a tensor.  Over tp alone, with h the width, L layers, and with E/e experts here:

    first       (t-1) beta_wide [L (4 h + 10) + tables (h + 2)]      5 h + 13 with a projection of keys of its own
    second      (t-1) beta_wide [L 6 + tables]                       8
    experts     (t-1) beta_wide E/e (2 h + 2), twice (e t - 1) beta_wide 2, for the 2 h + 5 and the 3 of an MLP

With ZeRO every tensor is cut by rows besides, along the axes that sum its gradient.

Source: Shazeer and Stern 2018, arXiv:1804.04235, algorithm 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mpitrain.plan.traffic.lines import Line
from mpitrain.plan.traffic.slabs import ATOMS, EXPERTS, Slab, merged, shares
from mpitrain.plan.traffic.step import Step

AXES = ("edp", "ep", "cp", "tp")


def optimizer(step: Step) -> Iterator[Line]:
    """What Adafactor's ranks tell each other in a step."""
    if step.optimizer != "adafactor":
        return
    asked: dict[tuple[str, ...], tuple[int, int]] = {}  # axes -> numbers in the first message, in the second
    for slab in shares(step):
        for axes, numbers, later in _sums(step, slab):
            if axes:
                before = asked.get(axes, (0, 0))
                asked[axes] = before[0] + numbers, before[1] + later
    for axes, both in asked.items():
        n, _ = merged(step, axes)
        name = "+".join(axes).replace("edp+ep", "dp")
        for numbers, calls in zip(both, (1, int(both[1] > 0)), strict=True):
            yield Line(name, "optimizer", "all_gather", n, calls, n * step.beta_wide * numbers)


def _sums(step: Step, slab: Slab) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """Of each sum that is asked for: over which axes, its numbers in the first message and in the second."""
    cuts = {axis: dim for axis, dim in _dims(step, slab).items() if merged(step, (axis,))[0] > 1}
    last = len(slab.shape) - 1
    if last > 0:
        matrices = math.prod(slab.shape[:-2])
        n, m = slab.shape[-2:]
        yield tuple(axis for axis in AXES if cuts.get(axis) == last), matrices * n, 0
        yield tuple(axis for axis in AXES if cuts.get(axis) == last - 1), matrices * m, 0
        yield tuple(axis for axis in AXES if cuts.get(axis, -1) >= last - 1), matrices, 0
    yield tuple(axis for axis in AXES if axis in cuts), 1, 1


def _dims(step: Step, slab: Slab) -> dict[str, int]:
    """axis -> the dim of the whole tensor that it cuts."""
    dims = {} if slab.tp_dim is None else {"tp": slab.tp_dim}
    if slab.axes == EXPERTS:
        dims["ep"] = 0
    return dims | (dict.fromkeys(ATOMS[slab.axes], 0) if step.zero else {})
