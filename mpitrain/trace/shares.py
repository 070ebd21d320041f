"""Where the time of steps went: on each rank, and in the messages of each axis.

A step of a rank lasts from the begin of its first action to the end of its last.  Of that time

    compute    is in F, B and W outside of messages
    update     in LOAD, COUNT, REDUCE and STEP outside of messages
    messages   in calls of the door and in waits for them, by axis; of it
       waits   until the last of the others had come (debug/trace/waits.py)
    rest       is between actions, and what SEND and RECV do besides their messages

and before it, since the end of the step before, the rank was in the script: reading a batch, say.

Steps that overlap, where a pipeline never drains, are seen as one stretch of time, divided by their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpitrain.pipeline.action import COMPUTE, PER_STEP
from mpitrain.trace.known import Known, Lane

Array = np.ndarray[Any, Any]

UPDATE = ("LOAD", *PER_STEP)


@dataclass
class OfAxis:
    """Messages over one axis, of one rank and a mean step.

    Attributes:
        calls: messages sent; receives and waits are none.
        nbytes: sent.
        ns: in messages.
        waits: of it until the others had come.
    """

    calls: float = 0.0
    nbytes: float = 0.0
    ns: float = 0.0
    waits: float = 0.0


@dataclass
class Share:
    """The time of one rank, of a mean step, in ns.

    Attributes:
        rank: in the world.
        step: the whole of it.
        before: from the end of the step before to its begin, which is no part of it.
        compute, update, rest: as above; messages are in `axes`.
        axes: by name.
        waits_for: rank -> ns that this one waited for it.
    """

    rank: int
    step: float = 0.0
    before: float = 0.0
    compute: float = 0.0
    update: float = 0.0
    axes: dict[str, OfAxis] = field(default_factory=dict)
    waits_for: dict[int, float] = field(default_factory=dict)

    @property
    def messages(self) -> float:
        """In messages of all axes."""
        return sum(of.ns for of in self.axes.values())

    @property
    def waits(self) -> float:
        """Of that until the others had come."""
        return sum(of.waits for of in self.axes.values())

    @property
    def rest(self) -> float:
        """What is left of the step."""
        return max(0.0, self.step - self.compute - self.update - self.messages)


def shares(known: Known, steps: Sequence[int]) -> list[Share]:
    """The time of every rank in the mean of some steps; without steps, of all that was traced.

    Args:
        known: a trace.
        steps: whole ones.
    """
    return [_share(lane, steps) for lane in known.lanes]


def _share(lane: Lane, steps: Sequence[int]) -> Share:
    inside = lane.during(steps)
    number = max(len(steps), 1)
    found = Share(lane.number, (stretch(lane, steps) if steps else _extent(lane)) / number)
    found.before = _before(lane, steps)
    message = lane.is_message & inside
    calls = lane.of("action") | lane.of("op") | lane.of("unit")
    work = calls & inside
    found.compute = float(lane.own[work & lane.flags("action", COMPUTE)].sum()) / number
    found.update = float(lane.own[work & lane.flags("action", UPDATE)].sum()) / number
    sends = ~lane.flags("name", ("recv", "irecv")) & (lane.of("message"))
    for axis in map(lane.rank.text, dict.fromkeys(lane.spans["axis"][message].tolist())):
        here = message & lane.flags("axis", (axis,))
        found.axes[axis] = OfAxis(
            calls=int((here & sends).sum()) / number,
            nbytes=float(lane.spans["bytes"][here & sends].sum()) / number,
            ns=float(lane.length[here].sum()) / number,
            waits=float(lane.waited.ns[here].sum()) / number,
        )
    late = message & (lane.waited.whom >= 0)
    for whom in np.unique(lane.waited.whom[late]).tolist():
        found.waits_for[whom] = float(lane.waited.ns[late & (lane.waited.whom == whom)].sum()) / number
    return found


def stretch(lane: Lane, steps: Sequence[int]) -> int:
    """ns of a rank's steps; of those that overlap every moment once."""
    total, end = 0, -(1 << 63)
    for start, stop in sorted(lane.steps[step] for step in steps):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _before(lane: Lane, steps: Sequence[int]) -> float:
    """ns of the mean between a step and the one before it; 0 where no two follow each other."""
    gaps = [max(0, lane.steps[step][0] - lane.steps[step - 1][1]) for step in steps if step - 1 in lane.steps]
    return sum(gaps) / max(len(gaps), 1)


def _extent(lane: Lane) -> int:
    return int(lane.stop.max() - lane.start.min()) if lane.spans.size else 0
