"""All that a trace says of a run, as numbers: what the summary prints, and `--json` writes."""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass
from typing import Any

from mpitrain.trace.bubbles import Bubbles, bubbles
from mpitrain.trace.held import Held, held
from mpitrain.trace.known import Known
from mpitrain.trace.ops import OpTime, slowest_ops
from mpitrain.trace.sent import Sent, sent
from mpitrain.trace.shares import Share, shares


@dataclass(frozen=True)
class Findings:
    """What was found.

    Attributes:
        known: the trace.
        title: what to call it.
        shares: the time of each rank, in the mean of the steps by which it is judged.
        bubbles: of its pipelines.
        sent: in a mean step.
        ops: the slowest first.
        held: by each rank.
    """

    known: Known
    title: str
    shares: list[Share]
    bubbles: Bubbles | None
    sent: Sent
    ops: list[OpTime]
    held: list[Held]

    @property
    def step_ns(self) -> list[int]:
        """ns of each step that is judged, over all ranks."""
        return [stop - start for start, stop in map(self.known.spans_of.__getitem__, self.known.judged)]

    def as_json(self) -> dict[str, Any]:
        """The same for programs; times in ns, what is not known left out."""
        known = self.known
        found = {
            "title": self.title,
            "ranks": [lane.number for lane in known.lanes],
            "size": max((lane.rank.size for lane in known.lanes), default=0),
            "clocks": {
                "exact": known.clocks.exact,
                "said": known.clocks.said,
                "offset_ns": {str(rank): offset for rank, offset in known.clocks.offset.items()},
                "error_ns": {str(rank): error for rank, error in known.clocks.error.items()},
            },
            "steps": known.steps,
            "steps_cut": known.cut,
            "steps_with_ops": known.with_ops,
            "steps_judged": known.judged,
            "step_ns_median": statistics.median(self.step_ns) if self.step_ns else None,
            "dropped": {str(lane.number): lane.rank.dropped for lane in known.lanes},
            "shares": [
                dataclasses.asdict(share) | {"messages": share.messages, "waits": share.waits, "rest": share.rest}
                for share in self.shares
            ],
            "bubbles": None if self.bubbles is None else dataclasses.asdict(self.bubbles),
            "sent": dataclasses.asdict(self.sent) | {"agrees": self.sent.agrees},
            "ops": list(map(dataclasses.asdict, self.ops)),
            "held": list(map(dataclasses.asdict, self.held)),
        }
        cleaned: dict[str, Any] = _strict(found)
        return cleaned


def findings(known: Known, title: str) -> Findings:
    """Look at all of it."""
    judged = known.judged
    return Findings(
        known,
        title,
        shares(known, judged),
        bubbles(known, judged) if judged else None,
        sent(known, judged),
        slowest_ops(known, [step for step in judged if step in known.with_ops] or known.with_ops),
        held(known),
    )


def _strict(value: Any) -> Any:
    """As JSON holds it: names are texts, and what is not finite is nothing."""
    if isinstance(value, dict):
        return {str(key): _strict(one) for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [_strict(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
