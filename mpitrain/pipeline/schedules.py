"""In which order the work of a step is done: pure generators of compute order.

A schedule says only F and B; messages, gradient sums and the update come from `mpitrain.pipeline.passes`.
"""

from __future__ import annotations

from mpitrain.errors import ScheduleError
from mpitrain.pipeline.action import Action, Schedule


def one_stage(num_microbatches: int) -> Schedule:
    """Gradient accumulation: the pipeline of one stage.

        F0 B0 F1 B1 F2 B2 ...

    At most one micro-batch is in flight, so activation memory does not grow with their number.
    """
    if num_microbatches < 1:
        raise ScheduleError(f"a step needs at least 1 micro-batch, not {num_microbatches}")
    return [[Action(kind, micro) for micro in range(num_microbatches) for kind in ("F", "B")]]
