"""Gradients that a reducer keeps from one step to the next: late ones, and what PowerSGD has left out.

stale       K steps late: K times the gradients, of no more steps than there are
powersgd    errors and factors (powersgd.py)
"""

from __future__ import annotations

from mpitrain.config import Config
from mpitrain.plan.memory.powersgd import left_out
from mpitrain.plan.memory.state import model_state
from mpitrain.plan.traffic.step import Step


def pending_gradients(step: Step, config: Config) -> int:
    """Bytes of them on this rank at the end of the run."""
    late = _steps_late(step, config)
    return (late * model_state(step).gradients if late else 0) + left_out(step, config.powersgd_feedback)


def _steps_late(step: Step, config: Config) -> int:
    """Of how many steps gradients of this rank are on their way at the end: of no more than there are."""
    if config.reducer != "stale":
        return 0
    late = step.dp_rank // step.ep % (config.staleness + 1) if config.stale_workers else config.staleness
    last = [steps - config.stale_start for steps in (config.steps, config.stop_after) if steps is not None]
    return max(0, min([late, *last]))
