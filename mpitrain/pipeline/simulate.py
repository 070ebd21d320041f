"""Plays a schedule on a clock: when every action begins and ends, how long ranks are idle, what they hold in memory.

Nothing is computed and no message sent.  A rank does its row in order; F, B and W take the time that they cost, a send
none, and a receive lasts until its message is there.  A lane beside the rank does what EVICT and FETCH ask for, in
their order; a B waits for its FETCH.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from mpitrain.errors import ScheduleError
from mpitrain.pipeline.action import COMPUTE, MOVES, Action, Schedule, placement
from mpitrain.pipeline.check import Checked, Key, check, peak_in_flight, sent_by

__all__ = ["Checked", "Costs", "Sizes", "Span", "Timeline", "check", "simulate", "until_stuck"]


@dataclass(frozen=True)
class Costs:
    """What one micro-batch (or slice of one) costs, in any unit of time.

    f, b, w: of an F, a B and a W of one stage, a number for all stages or one for each; a B with no W after it costs
    b + w.  message: from a send to the arrival.  copy: of an EVICT and of a FETCH of one stage, as f.
    """

    f: float | Sequence[float] = 1.0
    b: float | Sequence[float] = 1.0
    w: float | Sequence[float] = 1.0
    message: float = 0.0
    copy: float | Sequence[float] = 0.0


@dataclass(frozen=True)
class Sizes:
    """Bytes by stage, of one micro-batch (or slice of one).

    saved: what an F keeps for its B; kept: how much of that a B leaves to its W; boundary: of a message into the stage,
    as large as that of its gradient back (nothing is sent into stage 0, whatever is given for it).
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
    for each rank as `Checked.peaks`; peak_bytes: for each rank as `simulate` says, None without sizes; copies: what
    the lane beside each rank moves, empty where nothing is offloaded.
    """

    rows: Schedule
    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    idle: tuple[float, ...]
    bubble: float
    peak_micros: tuple[int, ...]
    peak_bytes: tuple[int, ...] | None
    copies: tuple[tuple[Span, ...], ...] = ()


def simulate(rows: Schedule, costs: Costs | None = None, sizes: Sizes | None = None, trains_from: int = 0) -> Timeline:
    """Play rows that `check` accepts; `trains_from` as there.

    A send has a span of no length.  A receive has one from when the rank comes to it until the message is there, which
    is `costs.message` after its send.  LOAD, COUNT and REDUCE cost nothing, nor does STEP; but where a row is one step
    its STEP lasts until all ranks have come to it.

    With `sizes`, the peak of a rank is the largest sum of

        saved[q]       from the start of an F on stage q to the end of its B, without the time from the end of what its
                       EVICT moves to the beginning of what its FETCH does
        kept[q]        from then to the end of the W, where there is one
        boundary[q]    what comes into stage q: with the sender from SEND_F to the end of RECV_F, with the receiver from
                       there to the start of its F; where both are one rank, from the end of one F to the start of the
                       next.  Likewise the gradient of it on its way back: from SEND_B, or the end of the B, to the end
                       of RECV_B, and from there to the start of the B.

    at the beginning and end of every action: a message that is used at once, or received at once, counts for that
    moment.  What others have received at a moment is gone before what this rank does then.

    Raises:
        ScheduleError: what `check` refuses, or costs or sizes that are negative or not of this number of stages.

    Cost: about 4 us an action.
    """
    checked = check(rows, trains_from)
    play = _Play(rows, costs or Costs(), len(checked.placement))
    play.run()
    return _timeline(play, checked.peaks, None if sizes is None else _peak_bytes(play, checked, sizes))


def until_stuck(rows: Schedule, costs: Costs | None = None) -> Timeline:
    """Play rows that `check` refuses for a deadlock alone: every rank has spans up to the receive at which it waits.

    The makespan is when the last rank stops; bytes are not counted.
    """
    play = _Play(rows, costs or Costs(), len(placement(rows)))
    play.run()
    return _timeline(play, tuple(map(peak_in_flight, rows)), None)


def _timeline(play: _Play, peaks: tuple[int, ...], peak_bytes: tuple[int, ...] | None) -> Timeline:
    makespan = max(play.clock)
    busy = tuple(sum(span.stop - span.start for span in spans if span.action.kind in COMPUTE) for spans in play.spans)
    idle = tuple(max(makespan - time, 0.0) for time in busy)
    return Timeline(
        rows=play.rows,
        spans=tuple(map(tuple, play.spans)),
        makespan=makespan,
        busy=busy,
        idle=idle,
        bubble=sum(idle) / (len(play.rows) * makespan) if makespan else 0.0,
        peak_micros=peaks,
        peak_bytes=peak_bytes,
        copies=tuple(map(tuple, play.copies)) if any(play.copies) else (),
    )


class _Play:
    """The clock of every rank, and the spans so far."""

    def __init__(self, rows: Schedule, costs: Costs, num_stages: int) -> None:
        self.rows = rows
        f, b, w = (_by_stage(cost, num_stages, name) for cost, name in ((costs.f, "f"), (costs.b, "b"), (costs.w, "w")))
        split = {action.stage for row in rows for action in row if action.kind == "W"}
        whole = [b[stage] if stage in split else b[stage] + w[stage] for stage in range(num_stages)]
        self.cost = {"F": f, "B": whole, "W": w}
        self.copy = _by_stage(costs.copy, num_stages, "copy")
        self.copies: list[list[Span]] = [[] for _ in rows]
        self.fetched: dict[Key, float] = {}  # by the B: when what it fetches is there
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
                    start = now = max(now, self.fetched.get(action, 0.0))
                    now += self.cost[kind][action.stage]
                elif kind in MOVES:
                    lane = self.copies[rank]
                    begin = max(now, lane[-1].stop if lane else 0.0)
                    lane.append(Span(action, begin, begin + self.copy[action.stage]))
                    if kind == "FETCH":
                        self.fetched[action._replace(kind="B")] = lane[-1].stop
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
            raise ScheduleError(
                f"sizes of {name} must be {num_stages} numbers, one for each stage, and not negative: {list(given)}"
            )
    return tuple(_peak(play, rank, checked.placement, sizes) for rank in range(len(play.rows)))


def _peak(play: _Play, rank: int, placement: tuple[int, ...], sizes: Sizes) -> int:
    """The most bytes that a rank holds, following its row."""
    spans = play.spans[rank]
    here = {stage for stage, on in enumerate(placement) if on == rank}
    split = {span.action.stage for span in spans if span.action.kind == "W"}
    boundary = [0, *sizes.boundary[1:], 0]  # into stage q, and out of the stage before it
    rounding = 1e-12 * max(play.clock)  # times that differ by less are the same moment
    on_their_way: list[tuple[float, int]] = []  # a heap: when it will have been received, or evicted, bytes
    moves = {span.action: span for span in play.copies[rank]}
    held = peak = 0

    def until(time: float) -> int:
        """Bytes that others have received, or that have left for the store, until then."""
        received = 0
        while on_their_way and on_their_way[0][0] <= time + rounding:
            received += heappop(on_their_way)[1]
        return received

    for (kind, micro, stage, part), start, stop in spans:
        held -= until(start)
        if kind == "F":
            held += sizes.saved[stage] - boundary[stage]
        elif kind == "B":
            held -= boundary[stage + 1]
        peak = max(peak, held)
        held -= until(stop)
        match kind:
            case "F":
                held += boundary[stage + 1] if stage + 1 in here else 0
            case "B":
                held += (sizes.kept[stage] if stage in split else 0) - sizes.saved[stage]
                held += boundary[stage] if stage - 1 in here else 0
            case "W":
                held -= sizes.kept[stage]
            case "EVICT":
                heappush(on_their_way, (moves[Action(kind, micro, stage, part)].stop, sizes.saved[stage]))
            case "FETCH":
                held += sizes.saved[stage]
            case "RECV_F" | "RECV_B":
                held += boundary[stage if kind == "RECV_F" else stage + 1]
            case "SEND_F" | "SEND_B":
                sent = boundary[stage + 1 if kind == "SEND_F" else stage]
                heappush(on_their_way, (play.received[kind, micro, stage, part], sent))
                held += sent
        peak = max(peak, held)
    return peak
