"""Plays a schedule on a clock: when every action begins and ends, how long ranks are idle, what they hold in memory.

Nothing is computed and no message sent.  A rank does its row in order; F, B and W take the time that they cost, a send
none, and a receive lasts until its message is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpitrain.errors import ScheduleError
from mpitrain.pipeline.action import COMPUTE, Action, Schedule
from mpitrain.pipeline.check import Checked, Key, check, sent_by

__all__ = ["Checked", "Costs", "Sizes", "Span", "Timeline", "check", "simulate"]


@dataclass(frozen=True)
class Costs:
    """What one micro-batch (or slice of one) costs, in any unit of time.

    f, b, w: of an F, a B and a W of one stage, a number for all stages or one for each; a B with no W after it costs
    b + w.  message: from a send to the arrival.
    """

    f: float | Sequence[float] = 1.0
    b: float | Sequence[float] = 1.0
    w: float | Sequence[float] = 1.0
    message: float = 0.0


@dataclass(frozen=True)
class Sizes:
    """Bytes by stage, of one micro-batch (or slice of one).

    saved: what an F keeps for its B; kept: how much of that a B leaves to its W; boundary: of a message into the stage,
    as large as that of its gradient back (there is none into stage 0).
    """

    saved: Sequence[int]
    kept: Sequence[int]
    boundary: Sequence[int]


class Span(NamedTuple):
    """An action with its beginning and end."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """A schedule on a clock that starts at 0.

    rows: the schedule; spans: every action of every row in order; makespan: when the last rank is done; busy, idle: for
    each rank the time in F, B and W, and the rest of the makespan; bubble: the idle fraction of the whole; peak_micros:
    for each rank as `Checked.peaks`; peak_bytes: for each rank as `simulate` says, None without sizes.
    """

    rows: Schedule
    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    idle: tuple[float, ...]
    bubble: float
    peak_micros: tuple[int, ...]
    peak_bytes: tuple[int, ...] | None


def simulate(rows: Schedule, costs: Costs | None = None, sizes: Sizes | None = None) -> Timeline:
    """Play rows that `check` accepts.

    A send has a span of no length.  A receive has one from when the rank comes to it until the message is there, which
    is `costs.message` after its send.  LOAD, COUNT and REDUCE cost nothing, nor does STEP; but where a row is one step
    its STEP lasts until all ranks have come to it.

    With `sizes`, the peak of a rank is the largest sum, at any moment, of

        saved[q]       from the start of an F on stage q to the end of its B
        kept[q]        from then to the end of the W, where there is one
        boundary[q]    what comes into stage q: with the sender from SEND_F to the end of RECV_F, with the receiver from
                       there to the start of its F; where both are one rank, from the end of one F to the start of the
                       next.  Likewise the gradient of it on its way back: from SEND_B, or the end of the B, to the end
                       of RECV_B, and from there to the start of the B.

    What ends at a moment is gone before what starts then.

    Raises:
        ScheduleError: what `check` refuses, or costs or sizes that are negative or not of this number of stages.

    Cost: about 4 us an action.
    """
    checked = check(rows)
    play = _Play(rows, costs or Costs(), len(checked.placement))
    play.run()
    makespan = max(play.clock)
    busy = tuple(sum(span.stop - span.start for span in spans if span.action.kind in COMPUTE) for spans in play.spans)
    idle = tuple(max(makespan - time, 0.0) for time in busy)
    return Timeline(
        rows=rows,
        spans=tuple(map(tuple, play.spans)),
        makespan=makespan,
        busy=busy,
        idle=idle,
        bubble=sum(idle) / (len(rows) * makespan) if makespan else 0.0,
        peak_micros=checked.peaks,
        peak_bytes=None if sizes is None else _peak_bytes(play, checked, sizes),
    )


class _Play:
    """The clock of every rank, and the spans so far."""

    def __init__(self, rows: Schedule, costs: Costs, num_stages: int) -> None:
        self.rows = rows
        f, b, w = (_by_stage(cost, num_stages, name) for cost, name in ((costs.f, "f"), (costs.b, "b"), (costs.w, "w")))
        split = {action.stage for row in rows for action in row if action.kind == "W"}
        whole = [b[stage] if stage in split else b[stage] + w[stage] for stage in range(num_stages)]
        self.cost = {"F": f, "B": whole, "W": w}
        self.message = _by_stage(costs.message, 1, "message")[0]
        self.clock = [0.0] * len(rows)
        self.spans: list[list[Span]] = [[] for _ in rows]
        self.sent: dict[Key, float] = {}
        self.received: dict[Key, float] = {}  # by the send: when its receive ended

    def run(self) -> None:
        waiting: dict[Key, int] = {}
        at_step: list[int] = []  # ranks that have come to the STEP of the whole
        ready = list(range(len(self.rows)))
        while ready:
            rank = ready.pop()
            row, spans = self.rows[rank], self.spans[rank]
            now = self.clock[rank]
            while len(spans) < len(row):
                action = row[len(spans)]
                kind = action.kind
                start = now
                if kind in self.cost:
                    now += self.cost[kind][action.stage]
                elif kind.startswith("SEND"):
                    self.sent[action] = now
                    if action in waiting:
                        ready.append(waiting.pop(action))
                elif kind.startswith("RECV"):
                    key = sent_by(action)
                    if key not in self.sent:
                        waiting[key] = rank
                        break
                    now = self.received[key] = max(now, self.sent[key] + self.message)
                elif kind == "STEP" and action.micro is None:
                    at_step.append(rank)
                    break  # nothing comes after it
                spans.append(Span(action, start, now))
            self.clock[rank] = now
        together = max(self.clock)
        for rank in at_step:
            self.spans[rank].append(Span(self.rows[rank][-1], self.clock[rank], together))
            self.clock[rank] = together


def _by_stage(cost: float | Sequence[float], num_stages: int, name: str) -> list[float]:
    costs = [float(one) for one in cost] if isinstance(cost, Sequence) else [float(cost)] * num_stages
    if len(costs) != num_stages:
        raise ScheduleError(f"costs of {name} are given for {len(costs)} stages, the schedule has {num_stages}")
    if not all(0 <= one < float("inf") for one in costs):
        raise ScheduleError(f"costs of {name} must be finite and not negative: {costs}")
    return costs


def _peak_bytes(play: _Play, checked: Checked, sizes: Sizes) -> tuple[int, ...]:
    num_stages = len(checked.placement)
    for name in ("saved", "kept", "boundary"):
        given = getattr(sizes, name)
        if len(given) != num_stages or min(given) < 0:
            raise ScheduleError(f"sizes of {name} must be {num_stages} numbers, one for each stage: {list(given)}")
    tick = max(max(play.clock), 1e-300) * 1e-12  # times that differ by rounding are the same moment
    return tuple(
        _peak([(round(time / tick), change) for time, change in _changes(play, rank, checked, sizes)])
        for rank in range(len(play.rows))
    )


def _changes(play: _Play, rank: int, checked: Checked, sizes: Sizes) -> list[tuple[float, int]]:
    """When the bytes that a rank holds change, and by how much."""
    place, split = checked.placement, {action.stage for action in play.rows[rank] if action.kind == "W"}
    changes: list[tuple[float, int]] = []
    for span in play.spans[rank]:
        (kind, micro, stage, part), start, stop = span
        match kind:
            case "F" | "B":
                into, out = (stage, stage + 1) if kind == "F" else (stage + 1, stage)  # boundaries
                if 0 < into < len(place):
                    changes.append((start, -sizes.boundary[into]))
                next_stage = stage + (1 if kind == "F" else -1)
                if 0 <= next_stage < len(place) and place[next_stage] == rank:
                    changes.append((stop, sizes.boundary[out]))
                if kind == "F":
                    changes.append((start, sizes.saved[stage]))
                else:
                    left = sizes.kept[stage] if stage in split else 0
                    changes.append((stop, left - sizes.saved[stage]))
            case "W":
                changes.append((stop, -sizes.kept[stage]))
            case "RECV_F" | "RECV_B":
                changes.append((stop, sizes.boundary[stage if kind == "RECV_F" else stage + 1]))
            case "SEND_F" | "SEND_B":
                held = sizes.boundary[stage + 1 if kind == "SEND_F" else stage]
                changes += (start, held), (play.received[kind, micro, stage, part], -held)
    return changes


def _peak(changes: list[tuple[int, int]]) -> int:
    total = peak = 0
    for _, change in sorted(changes):  # at one moment, what ends stands first
        total += change
        peak = max(peak, total)
    return peak
