"""Which ops take the most time: their own, without what is inside of them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpitrain.trace.known import Known


@dataclass(frozen=True)
class OpTime:
    """One op in all layers alike, in the mean of ranks and steps.

    Attributes:
        op: `gelu`, `gelu.backward`.
        where: of which module: `blocks.*.mlp`.
        calls: of a rank and step.
        ns: its own, of a rank and step.
        slowest: the rank on which it took longest.
        worst: ns there.
    """

    op: str
    where: str
    calls: float
    ns: float
    slowest: int
    worst: float


def slowest_ops(known: Known, steps: Sequence[int]) -> list[OpTime]:
    """All ops, those that take most first; ranks that never make one do not count for its mean.

    Args:
        known: a trace.
        steps: whole ones with ops.
    """
    number = max(len(steps), 1)
    found: dict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
    for lane in known.lanes:
        at = np.flatnonzero(lane.of("op") & lane.during(steps))
        if not at.size:
            continue
        table = np.stack([lane.spans["name"][at], lane.spans["path"][at]], axis=1)
        distinct, which = np.unique(table, axis=0, return_inverse=True)
        which = which.reshape(-1)
        calls = np.bincount(which, minlength=len(distinct))
        own = np.bincount(which, weights=lane.own[at], minlength=len(distinct))
        sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for (name, path), count, ns in zip(distinct.tolist(), calls.tolist(), own.tolist(), strict=True):
            amounts = sums[lane.rank.text(name), any_layer(lane.rank.text(path))]
            amounts[0] += count / number
            amounts[1] += ns / number
        for key, amounts in sums.items():
            found[key].append((lane.number, *amounts))
    ops = []
    for (op, where), of in found.items():
        slowest, _, worst = max(of, key=lambda one: one[2])
        mean_calls, mean_ns = (sum(one[column] for one in of) / len(of) for column in (1, 2))
        ops.append(OpTime(op, where, mean_calls, mean_ns, int(slowest), worst))
    return sorted(ops, key=lambda one: -one.ns)


def any_layer(path: str) -> str:
    """`blocks.3.mlp.up` as `blocks.*.mlp.up`: layers are alike."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
