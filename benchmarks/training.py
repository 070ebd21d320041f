"""Trainings that live at once and take turns, round after round: everything that is measured in tokens a second.

In a round each side makes one step that is not counted and then its stretch of counted ones; who begins changes from
round to round, and after each stretch one core's peak is measured anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from processes import Processes
from sides import Task

FIRST_STEPS = 3  # before anything is timed; their last losses must agree


class Turn(NamedTuple):
    """What runs when it is a side's turn: its processes, on a global batch of so many sequences (None: the task's)."""

    processes: Processes
    batch: int | None = None


@contextlib.contextmanager
def alive(*sides: tuple[str, Task, Mapping[str, str]], tuned_malloc: bool = True) -> Iterator[list[Processes]]:
    """The processes of some sides, each a name ("mpitrain" or "torch"), a task and variables of its environment."""
    with contextlib.ExitStack() as stack:
        started = []
        for name, task, environment in sides:
            started.append(Processes(name, task, tuned_malloc=tuned_malloc, environment=environment))
            stack.callback(started[-1].close)
        yield started


def take_turns(
    turns: Mapping[str, Turn],
    *,
    rounds: int,
    stretch: float,
    steps: int | None = None,
    same: Sequence[tuple[str, str]] = (),
    peak: Callable[[], float] | None = None,
    watch: bool = False,
    undisturbed: bool = False,
) -> dict[str, Any]:
    """Measure.

    Args:
        turns: by name, in the order of the first round.
        rounds: how often each has its turn.
        stretch: seconds of counted steps, about; two steps at least.
        steps: counted steps, in place of `stretch`.
        same: pairs of turns whose losses must agree after their first steps.
        peak: measures the flops a second that one core can do.
        watch: see also which share of the steps stands in messages (mpitrain's turns only).
        undisturbed: time each step at real-time priority (`machine.undisturbed`).

    Returns:
        rounds: name -> one result a round (`Processes.run`); steps: name -> counted steps; peaks: what `peak` gave.
    """
    first = {name: turn.processes.run(1, FIRST_STEPS - 1, turn.batch) for name, turn in turns.items()}
    for one, other in same:
        tasks = [turns[name].processes.task for name in (one, other)]
        halves = any(task.dtype.endswith("float16") for task in tasks)
        same_training(tasks[0].dropout, {name: first[name]["loss"] for name in (one, other)}, halves)
    counted = {
        name: steps or max(2, min(200, round(1e3 * stretch / run["ms_per_step"]))) for name, run in first.items()
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in turns}
    peaks = []
    for number in range(rounds):
        for name in list(turns) if number % 2 == 0 else list(reversed(turns)):
            turn = turns[name]
            runs[name].append(turn.processes.run(counted[name], 1, turn.batch, watch, undisturbed))
            if peak is not None:
                peaks.append(peak())
    return {"rounds": runs, "steps": counted, "peaks": peaks}


def same_training(dropout: float, losses: Mapping[str, float], halves: bool = False) -> None:
    """Refuse to compare trainings that are not the same; with dropout the masks differ, so losses only resemble.

    Halves round every value, bfloat16 to one part in 256.
    """
    tolerance = 0.05 if dropout else 4e-3 if halves else 1e-4
    (one, mine), (other, theirs) = losses.items()
    if abs(mine - theirs) > tolerance * abs(theirs):
        raise SystemExit(f"after {FIRST_STEPS} steps the losses differ: {one} {mine:.6f}, {other} {theirs:.6f}")
