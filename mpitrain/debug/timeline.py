"""The clock of a real step: when every action began and ended, on all ranks of a pipeline.

    watch = Stopwatch()
    with listen(watch):
        executor.step(batch)
    measured = watch.gather(mesh.pp)
    print(measured.bubble)                       the idle share of the step, 1 - busy / makespan
    print(render.text(measured.timeline))        drawn as the simulator's are, in milliseconds

    time    0            14.9           29.81          44.71
    rank 0| F0---- F1----   .      .    B0----------- F2----
    rank 1|   .      .    F0---- B0----------- F1---- B1----

A listener: the executor tells it of its actions, and no line of the executor is about time.  A step is seen from the
beginning of its first F to the end of its last B or W over all ranks; what comes before and after them (counting
targets, summing gradients, the update) is no matter of the schedule.  Of the time in F, B and W it also knows how much
passed in messages over each axis: those of tensor parallelism, or of tokens on their way to experts.  What the rank's
I/O thread moved meanwhile, to and from a store, is drawn in a lane below the rank's.

`perf_counter` is one clock for all processes of a host.  Between hosts clocks are compared at a few barriers, which is
good to about the time of a small message.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from mpitrain.comm.communicator import Communicator
from mpitrain.errors import ScheduleError
from mpitrain.events import Event
from mpitrain.pipeline.action import COMPUTE, Action, parse
from mpitrain.pipeline.check import peak_in_flight, sent_by
from mpitrain.pipeline.simulate import Costs, Span, Timeline

BARRIERS = 5  # at which the clocks of hosts are compared
KEPT_COPIES = 100_000  # of the I/O thread, the newest


class _Step(NamedTuple):
    """What one rank did.

    spans: in seconds of its own clock; nbytes: at each end the bytes in flight, if they were asked for; inside: seconds
    of F, B and W in messages, by axis.
    """

    spans: list[Span]
    seen: set[Action]
    nbytes: list[int]
    inside: dict[str, float]


class Stopwatch:
    """A listener that notes when each action of this rank begins and ends.

    Args:
        keep: how many of the newest steps are kept.
        with_bytes: note the bytes in flight at the end of each action, too.  They are counted over the arrays of all
            tapes, which takes longer than many an action: times are then no good.
    """

    def __init__(self, keep: int = 1, with_bytes: bool = False) -> None:
        self._with_bytes = with_bytes
        self._steps: deque[_Step] = deque(maxlen=keep)
        self._executor: object = None
        self._began = self._message_began = 0.0
        self._inside: dict[str, float] = {}  # of the action that runs
        self._copies: deque[Span] = deque(maxlen=KEPT_COPIES)  # told late: which step they are of, times tell

    def __call__(self, event: Event) -> None:
        if event.kind == "message":
            self._message(event)
        if event.kind == "copy":
            kind = "FETCH" if event.info["kind"] == "read" else "EVICT"
            self._copies.append(Span(Action(kind, 0), event.info["start"], event.info["stop"]))
        if event.kind != "action":
            return
        if event.phase == "begin":
            self._inside = {}
            self._began = time.perf_counter()
            return
        now = time.perf_counter()
        action, executor = event.info["action"], event.info["executor"]
        # Every action stands once in a row, so one that comes again is of the next step.
        if not self._steps or executor is not self._executor or action in self._steps[-1].seen:
            self._executor = executor
            self._steps.append(_Step([], set(), [], {}))
        step = self._steps[-1]
        step.spans.append(Span(action, self._began, now))
        step.seen.add(action)
        if self._with_bytes:
            step.nbytes.append(executor.bytes_in_flight)
        if action.kind in COMPUTE:
            for axis, seconds in self._inside.items():
                step.inside[axis] = step.inside.get(axis, 0.0) + seconds

    def _message(self, event: Event) -> None:
        if event.phase == "begin":
            self._message_began = time.perf_counter()
            return
        axis = event.info["axis"]
        self._inside[axis] = self._inside.get(axis, 0.0) + time.perf_counter() - self._message_began

    def __len__(self) -> int:
        """Steps that are kept."""
        return len(self._steps)

    def seconds(self) -> dict[str, float]:
        """The time of this rank in each kind of action (`F`, `RECV_B`, `STEP`), in the mean of the steps kept."""
        total: dict[str, float] = defaultdict(float)
        for step in self._steps:
            for span in step.spans:
                total[span.action.kind] += (span.stop - span.start) / len(self)
        return dict(total)

    def gather(self, axis: Communicator, step: int = -1) -> Measured:
        """The same step of all ranks of an axis, on every one of them; collective.

        Args:
            axis: usually mesh.pp, the ranks of one pipeline; lanes come in its order.
            step: which of the kept ones, counted as a list is.

        Raises:
            ScheduleError: a rank has not kept that step, or did no F in it; on every rank.

        Cost: a few hundred bytes an action, sent to every rank.
        """
        mine = self._steps[step] if -len(self) <= step < len(self) else None
        found = axis.exchange(
            None
            if mine is None or not any(span.action.kind == "F" for span in mine.spans)
            else [
                [[str(action), start, stop] for action, start, stop in mine.spans],
                mine.nbytes,
                mine.inside,
                [
                    [str(action), start, stop]
                    for action, start, stop in self._copies
                    if stop > mine.spans[0].start and start < mine.spans[-1].stop
                ],
            ]
        )
        lacking = [rank for rank, lane in enumerate(found) if lane is None]
        if lacking:
            raise ScheduleError(
                f"rank {lacking[0]} of axis {axis.name} keeps no step {step} in which it did an F.\n"
                "Listen on every rank while the executor makes a step: with listen(watch): executor.step(batch)."
            )
        fast = _clock_offsets(axis)
        lanes, copies = (
            [
                [Span(parse(text), start - ahead, stop - ahead) for text, start, stop in of_rank[which]]
                for of_rank, ahead in zip(found, fast, strict=True)
            ]
            for which in (0, 3)
        )
        counted = [nbytes for _, nbytes, _, _ in found]
        inside = [seconds for _, _, seconds, _ in found]
        return Measured.of(lanes, tuple(map(max, counted)) if all(counted) else None, inside, copies)


@dataclass(frozen=True)
class Measured:
    """A step as it was; all times in milliseconds, from the beginning of its first F over all ranks.

    spans: for each rank its actions in order, those that a schedule has: F, B, W and messages.  A send's span ends when
    it was posted, a receive's when the message was there.
    makespan: the end of the last B or W over all ranks.
    peak_bytes: for each rank the most bytes in flight at the end of an action, None where they were not noted.
    inside: for each rank the part of `busy` that passed in messages of F, B and W, waiting for other ranks included, by
    axis: `{"ep": 3.1, "tp": 0.8}`.
    copies: for each rank what its I/O thread moved in that time, a FETCH or an EVICT each; empty where no rank has one.
    """

    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    peak_bytes: tuple[int, ...] | None
    inside: tuple[Mapping[str, float], ...] = ()
    copies: tuple[tuple[Span, ...], ...] = ()

    @classmethod
    def of(
        cls,
        lanes: Sequence[Sequence[Span]],
        peak_bytes: tuple[int, ...] | None = None,
        inside: Sequence[Mapping[str, float]] | None = None,
        copies: Sequence[Sequence[Span]] = (),
    ) -> Measured:
        """From spans and times of messages in seconds by one clock, one lane a rank."""
        work = [span for lane in lanes for span in lane if span.action.kind in COMPUTE]
        begin, end = min(span.start for span in work), max(span.stop for span in work)
        spans = tuple(
            tuple(
                Span(action, 1e3 * (max(start, begin) - begin), 1e3 * (stop - begin))
                for action, start, stop in lane
                if action.kind not in ("LOAD", "COUNT", "REDUCE", "STEP") and stop > begin
            )
            for lane in lanes
        )
        times = [{axis: 1e3 * seconds for axis, seconds in of.items()} for of in inside or [{} for _ in lanes]]
        moved = tuple(
            tuple(
                Span(action, 1e3 * (max(start, begin) - begin), 1e3 * (min(stop, end) - begin))
                for action, start, stop in lane
                if stop > begin and start < end
            )
            for lane in copies
        )
        return cls(spans, 1e3 * (end - begin), peak_bytes, tuple(times), moved if any(moved) else ())

    @property
    def busy(self) -> tuple[float, ...]:
        """For each rank the time in F, B and W."""
        return self._time_in(*COMPUTE)

    @property
    def waiting(self) -> tuple[float, ...]:
        """For each rank the time in receives.

        What is neither busy nor waiting is the executor's own, and that of sends.
        """
        return self._time_in("RECV_F", "RECV_B")

    @property
    def bubble(self) -> float:
        """The idle share of the whole: 1 - mean busy / makespan."""
        return 1.0 - statistics.fmean(self.busy) / self.makespan

    @cached_property
    def costs(self) -> Costs:
        """What an F, a B and a W took on each stage in the mean, for the simulator; messages at no cost.

        The backward of a stage that does not part it is the B.
        """
        times: dict[tuple[str, int], list[float]] = defaultdict(list)
        for span in self._work():
            times[span.action.kind, span.action.stage].append(span.stop - span.start)
        stages = range(1 + max(stage for _, stage in times))
        f, b, w = ([statistics.fmean(times.get((kind, stage), [0.0])) for stage in stages] for kind in COMPUTE)
        return Costs(f, b, w)

    @property
    def message(self) -> float:
        """The median time from the beginning of a send to the end of its receive, of receives that waited; else 0.

        What arrives before it is needed costs no time.  Where ranks are threads they take turns, and this says little.
        """
        sent = {span.action: span.start for lane in self.spans for span in lane}
        taken = [
            span.stop - sent[send]
            for lane in self.spans
            for span in lane
            if span.action.kind.startswith("RECV")
            and (send := Action(*sent_by(span.action))) in sent
            and span.start < sent[send]
        ]
        return statistics.median(taken) if taken else 0.0

    @property
    def timeline(self) -> Timeline:
        """As the simulator's, to be drawn by `mpitrain.pipeline.render`."""
        rows = [[span.action for span in lane] for lane in self.spans]
        return Timeline(
            rows=rows,
            spans=self.spans,
            makespan=self.makespan,
            busy=self.busy,
            idle=tuple(self.makespan - time for time in self.busy),
            bubble=self.bubble,
            peak_micros=tuple(map(peak_in_flight, rows)),
            peak_bytes=self.peak_bytes,
            copies=self.copies,
        )

    def _work(self) -> list[Span]:
        return [span for lane in self.spans for span in lane if span.action.kind in COMPUTE]

    def _time_in(self, *kinds: str) -> tuple[float, ...]:
        return tuple(sum(span.stop - span.start for span in lane if span.action.kind in kinds) for lane in self.spans)


def _clock_offsets(axis: Communicator) -> list[float]:
    """By how many seconds each rank's clock is ahead of rank 0's; exactly 0 where it is the same clock."""
    clocks = axis.exchange(clock_name())
    passed = []
    if any(name != clocks[0] for name in clocks):
        for _ in range(BARRIERS):
            axis.barrier()
            passed.append(time.perf_counter())
    at = axis.exchange(passed)
    return [
        0.0 if name == clocks[0] else statistics.median(a - b for a, b in zip(times, at[0], strict=True))
        for name, times in zip(clocks, at, strict=True)
    ]


def clock_name() -> str:
    """The same for all processes that share a clock, which starts when the kernel does."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def expected_bubble(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    slices: int = 1,
    batches: int = 1,
    costs: Costs | None = None,
) -> float:
    """The idle share of a schedule by its formula, for p ranks of equal stages and messages that cost nothing.

        gpipe, 1f1b      (p - 1) / (m + p - 1)
        interleaved      (p - 1) / (v m + p - 1)
        zb-h1            idle / (m (F + B + W) + idle)   with idle = (p - 1) (F + B - W)
        terapipe         (p - 1) / (m s + p - 1)         s slices
        pipedream(-2bw)  (p - 1) / (n m + p - 1)         n batches

    Args:
        name, ranks, microbatches, chunks, slices, batches: as for `mpitrain.pipeline.schedules.compute_rows`; there are
            at least as many micro-batches as ranks.
        costs: only their proportions count, and only for zb-h1; of several stages the mean.

    Source: Narayanan et al. 2021, arXiv:2104.04473, sections 2.1 and 2.2 (there relative to the ideal time, not to the
    whole); Qi et al. 2023, arXiv:2401.10241, table 1.
    """
    if name == "zb-h1":
        found = costs or Costs()
        f, b, w = (statistics.fmean(c) if isinstance(c, Sequence) else c for c in (found.f, found.b, found.w))
        idle = (ranks - 1) * max(f + b - w, 0.0)
        return idle / (microbatches * (f + b + w) + idle)
    units = microbatches * chunks * slices * batches
    return (ranks - 1) / (units + ranks - 1)
