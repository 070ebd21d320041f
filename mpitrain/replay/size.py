"""How much a recording of a run of the trainer will take, from the formulas of its messages.

Of each call the recorder keeps what the rank brings and what it gets.  With n ranks and S bytes of the larger side:

    all_reduce, all_to_all      S brought, S got             send, shift     S brought; the like of it is got
    all_gather                  S/n brought, S got           reduce_scatter  S brought, S/n got

Sums of halves arrive in float32.  Beside the values each call has two lines in the index.  At the beginning of a range
stands what the rank holds: weights, masters and what optimizer and reducer keep.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mpitrain.backend import is_half
from mpitrain.debug import outlives
from mpitrain.pipeline.executor import Executor
from mpitrain.plan.traffic import Line, Step, traffic

LINES = 520
"""Bytes of a call's lines in the index, about."""
OF_A_STEP = 60
"""Bytes of a tensor's line after each step, about."""


def of_step(step: Step, values: bool) -> int:
    """Bytes that are kept of one step on a rank.

    Args:
        step: as the rank sees it; of a row of steps its share is told.
        values: whether what is sent is kept, or a digest of it.
    """
    found = traffic(step)
    return round(sum(_kept(line, step, values) + line.calls * LINES for line in found.lines) / found.row)


def of_evaluation(step: Step, rows: int, values: bool) -> int:
    """Bytes that are kept of a forward pass of so many rows a rank: half of a step's messages inside of the model."""
    one = replace(step, batch=rows * step.dp, microbatches=1, row=1, zero=0 if step.zero < 3 else 3)
    lines = [line for line in traffic(one).lines if line.axis in ("tp", "cp", "ep", "pp")]
    return round(sum(_kept(line, one, values) + line.calls * LINES for line in lines) / 2)


def of_state(executor: Executor) -> int:
    """Bytes of what a rank holds at the beginning of a range."""
    return sum(math.prod(array.shape) * array.dtype.itemsize for _, _, array in outlives.tensors(executor))


def sums_of_state(executor: Executor) -> int:
    """Bytes of the sums that are noted after each step."""
    return OF_A_STEP * sum(1 for _ in outlives.tensors(executor))


def _kept(line: Line, step: Step, values: bool) -> float:
    """Bytes of the values of these calls."""
    wide = 2.0 if line.verb == "all_reduce" and line.cause in ("gradients",) and is_half(step.dtype) else 1.0
    brought, got = {
        "all_gather": (1 / line.n, 1.0),
        "reduce_scatter": (1.0, wide / line.n),
    }.get(line.verb, (1.0, wide))
    return float(line.calls * line.payload) * (brought * values + got)
