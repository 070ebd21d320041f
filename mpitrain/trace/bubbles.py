"""How much of a step pipelines are idle: measured, played again with the same costs, and by the schedule's formula."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitrain.debug.timeline import Measured, expected_bubble
from mpitrain.errors import ScheduleError
from mpitrain.pipeline.action import MOVES, Action, parse
from mpitrain.pipeline.simulate import Span, simulate
from mpitrain.trace.known import Known, Lane

MOST_STAGES = 1 << 16
LOOKED_AT = 32  # steps, or rows of steps that overlap, spread over the trace


@dataclass(frozen=True)
class Bubbles:
    """The idle share of the time from the first F to the last B or W over the ranks of a pipeline: 0 ... 1.

    Attributes:
        pipelines: the world ranks of each.
        idle: world rank -> its own share.
        measured: the mean of all of them.
        played: what the schedule has with the same times of F, B and W, and messages that cost nothing; None: unknown.
        formula: of equal stages; None: unknown.
        steps: how many were looked at.
    """

    pipelines: list[tuple[int, ...]]
    idle: Mapping[int, float]
    measured: float
    played: float | None
    formula: float | None
    steps: int


def bubbles(known: Known, steps: Sequence[int]) -> Bubbles | None:
    """Of the mean of some steps; None: there is no pipeline.

    Args:
        known: a trace.
        steps: whole ones.
    """
    lanes = {lane.number: lane for lane in known.lanes}
    pipelines = sorted({tuple(lane.rank.axes["pp"]) for lane in known.lanes if len(lane.rank.axes.get("pp", ())) > 1})
    pipelines = [ranks for ranks in pipelines if all(rank in lanes for rank in ranks)]
    rows = _rows(known, steps)
    looked_at = rows[:: max(1, -(-len(rows) // LOOKED_AT))]
    idle: dict[int, list[float]] = {}
    played, formula = [], []
    for ranks in pipelines:
        for row in looked_at:
            acted = [_actions(lanes[rank], row) for rank in ranks]
            if not all(any(span.action.kind == "F" for span in of) for of in acted):
                continue
            measured = Measured.of([[span for span in of if span.action.kind not in MOVES] for of in acted])
            for rank, busy in zip(ranks, measured.busy, strict=True):
                idle.setdefault(rank, []).append(1.0 - busy / measured.makespan if measured.makespan else 0.0)
            played.append(_played(measured, acted))
            formula.append(_formula(known, measured, len(ranks), len(row)))
    if not idle:
        return None
    mean = {rank: statistics.fmean(found) for rank, found in idle.items()}
    return Bubbles(pipelines, mean, statistics.fmean(mean.values()), _mean(played), _mean(formula), len(looked_at))


def _rows(known: Known, steps: Sequence[int]) -> list[list[int]]:
    """Steps, those together that overlap."""
    rows: list[list[int]] = []
    end = -(1 << 63)
    lane = known.lanes[0]
    for step in sorted(steps, key=lambda step: lane.steps[step]):
        start, stop = lane.steps[step]
        if start < end:
            rows[-1].append(step)
        else:
            rows.append([step])
        end = max(end, stop)
    return rows


def _actions(lane: Lane, steps: Sequence[int]) -> list[Span]:
    """What a rank did in some steps, in seconds by the clock of all."""
    at = np.flatnonzero(lane.of("action") & lane.during(steps))
    found = []
    for text, start, stop in zip(lane.words("name", at), lane.start[at].tolist(), lane.stop[at].tolist(), strict=True):
        action = _parsed(text)
        if action is not None:
            found.append(Span(action, 1e-9 * start, 1e-9 * stop))
    return found


def _parsed(text: str) -> Action | None:
    """The action of a name; None: it is none, or of a stage that no pipeline has.  A file may say anything."""
    try:
        action = parse(text)
    except ScheduleError:
        return None
    return action if action.stage < MOST_STAGES else None


def _played(measured: Measured, acted: Sequence[Sequence[Span]]) -> float | None:
    """The same rows in a simulator."""
    try:
        rows = [[span.action for span in of] for of in acted]
        back = min((action.stage for row in rows for action in row if action.kind == "B"), default=0)  # below all froze
        return simulate(rows, measured.costs, trains_from=back).bubble
    except (ScheduleError, ValueError, IndexError):
        return None


def _formula(known: Known, measured: Measured, ranks: int, batches: int) -> float | None:
    about = known.fact("schedule", dict)
    sizes: dict[str, Any] = {name: about.get(name) for name in ("microbatches", "chunks", "slices")}
    if not all(type(size) is int and 0 < size < 10**6 for size in sizes.values()):
        return None
    name = str(about.get("name"))
    return expected_bubble(name, ranks=ranks, batches=batches, costs=measured.costs, **sizes)


def _mean(found: Sequence[float | None]) -> float | None:
    known = [one for one in found if one is not None]
    return statistics.fmean(known) if known and len(known) == len(found) else None
