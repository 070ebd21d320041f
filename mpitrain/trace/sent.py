"""What a step sends, by axis, verb and cause, beside what was predicted before it ran.

The cause of a message follows from the op and the action around it, so it is known of steps in which ops were noted;
of all other steps what was sent over each axis with each verb.  Bytes are those that the door counts: payload times the
factor of the best algorithm, whatever the MPI library does.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpitrain.comm.payload import LIKE_BLOCKING
from mpitrain.plan.traffic import cause_of
from mpitrain.trace.known import Known, Lane

Array = np.ndarray[Any, Any]
Key = tuple[str, str, str]

MOST_LINES = 10_000  # of a prediction that a file holds
DIGEST = "(1, 2) int64"  # what `Digests.confirm` sends


@dataclass
class Kind:
    """Messages of one kind, in the mean of the ranks that send it and of steps.

    Attributes:
        axis, verb: of them; cause: as plan.traffic names it, "" where ops were not noted.
        ranks: how many ranks send it, or were predicted to.
        calls, nbytes: of a rank and step.
        theory: bytes that were predicted; None: nothing was.
        agrees: whether every rank sent what was predicted for it, to the byte.
        sites: places in the program, those that send most first.
    """

    axis: str
    verb: str
    cause: str
    ranks: int = 0
    calls: float = 0.0
    nbytes: float = 0.0
    theory: float | None = None
    agrees: bool = True
    sites: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Sent:
    """What steps sent.

    Attributes:
        kinds: the most bytes first.
        steps: how many steps they are the mean of.
        by_cause: whether their causes are known.
        predicted: whether there is a theory.
        at_most: whether that is a bound alone.
        odd: steps in which a rank sent other bytes than predicted over some axis: (step, rank, axis, verb, sent,
            predicted); looked for where every step sends the same.
        outside_calls, outside_bytes: of all ranks together, outside of steps.
    """

    kinds: list[Kind]
    steps: int
    by_cause: bool
    predicted: bool
    at_most: bool
    odd: list[tuple[int, int, str, str, float, float]] = field(default_factory=list)
    outside_calls: int = 0
    outside_bytes: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether all is as predicted."""
        return self.predicted and not self.odd and all(kind.agrees for kind in self.kinds)


def sent(known: Known, steps: Sequence[int]) -> Sent:
    """What a mean step sends; without steps what all of the trace does.

    Args:
        known: a trace.
        steps: whole ones, any; those with ops are taken for the causes.
    """
    with_ops = [step for step in steps if step in known.with_ops]
    taken, by_cause = (with_ops, True) if with_ops else (steps, False)
    theory = {lane.number: predicted_by(lane) for lane in known.lanes}
    is_predicted = all(found is not None for found in theory.values()) and bool(steps)  # theory is of steps
    measured: dict[Key, dict[int, tuple[float, float]]] = defaultdict(dict)
    sites: dict[Key, Counter[str]] = defaultdict(Counter)
    for lane in known.lanes:
        for key, (calls, nbytes) in _of_lane(lane, taken, by_cause, sites).items():
            measured[key][lane.number] = calls / max(len(taken), 1), nbytes / max(len(taken), 1)
    wanted: dict[Key, dict[int, float]] = defaultdict(dict)
    for rank, lines in theory.items() if is_predicted else ():
        for (axis, cause, verb), nbytes in (lines or {}).items():
            key = axis, verb, cause if by_cause else ""
            wanted[key][rank] = wanted[key].get(rank, 0.0) + nbytes
    kinds = []
    for key in dict.fromkeys([*measured, *wanted]):
        of, should = measured.get(key, {}), wanted.get(key, {})
        ranks = of.keys() | should.keys()
        kinds.append(
            Kind(
                *key,
                ranks=len(ranks),
                calls=sum(calls for calls, _ in of.values()) / len(ranks),
                nbytes=sum(nbytes for _, nbytes in of.values()) / len(ranks),
                theory=sum(should.values()) / len(ranks) if is_predicted else None,
                agrees=all(_same(of.get(rank, (0, 0.0))[1], should.get(rank, 0.0)) for rank in ranks),
                sites=[site for site, _ in sites[key].most_common()],
            )
        )
    kinds.sort(key=lambda kind: (-max(kind.nbytes, kind.theory or 0.0), -kind.calls))
    loose = _is_bound(known)
    odd = [] if loose or not is_predicted else _odd(known, steps, theory)
    outside = [(lane, _sends(lane) & (lane.step == 0)) for lane in known.lanes] if known.steps else []
    calls = sum(int(at.sum()) for _, at in outside)
    nbytes = sum(float(lane.spans["bytes"][at].sum()) for lane, at in outside)
    return Sent(kinds, len(taken), by_cause, is_predicted, loose, odd, calls, nbytes)


def predicted_by(lane: Lane) -> dict[tuple[str, str, str], float] | None:
    """(axis, cause, verb) -> bytes of a step, as the rank's file says; None: it says nothing that can be read."""
    about = lane.rank.facts.get("traffic")
    lines, steps = (about.get("lines"), about.get("steps")) if isinstance(about, dict) else (None, None)
    if not isinstance(lines, list) or type(steps) is not int or steps < 1 or len(lines) > MOST_LINES:
        return None
    found: dict[tuple[str, str, str], float] = {}
    for line in lines:
        if not isinstance(line, list) or len(line) != 5 or not all(isinstance(word, str) for word in line[:3]):
            return None
        nbytes = line[4]
        if type(nbytes) not in (int, float) or not 0 <= nbytes < 1e18:
            return None
        axis, cause, verb = line[:3]
        found[axis, cause, verb] = found.get((axis, cause, verb), 0.0) + nbytes / steps
    return found


def _is_bound(known: Known) -> bool:
    """Whether a prediction is a bound, or a mean over several steps, alone."""
    about, schedule = known.fact("traffic", dict), known.fact("schedule", dict)
    return about.get("at_most") is True or about.get("steps", 1) != 1 or schedule.get("drains") is False


def _same(found: float, wanted: float) -> bool:
    return math.isclose(found, wanted, rel_tol=1e-9, abs_tol=0.5)


def _of_lane(
    lane: Lane, steps: Sequence[int], by_cause: bool, sites: dict[Key, Counter[str]]
) -> dict[Key, tuple[int, float]]:
    """(axis, verb, cause) -> calls, bytes, of one rank in some steps."""
    at = np.flatnonzero(_sends(lane) & lane.during(steps))
    columns = [lane.spans[name][at] for name in ("axis", "name", "action", "path", "site")]
    around = lane.around[at]
    inside = (around >= 0) & (
        lane.of("op")[around] | (lane.of("unit")[around] & lane.flags("name", ("fetch",))[around])
    )
    columns.append(np.where(inside, lane.spans["name"][around], 0))
    table = np.stack([column.astype(np.int64) for column in columns], axis=1)
    distinct, number = np.unique(table, axis=0, return_inverse=True)
    number = number.reshape(-1)
    calls = np.bincount(number, minlength=len(distinct))
    nbytes = np.bincount(number, weights=lane.spans["bytes"][at], minlength=len(distinct))
    found: dict[Key, tuple[int, float]] = {}
    for row, count, amount in zip(distinct.tolist(), calls.tolist(), nbytes.tolist(), strict=True):
        axis, verb, action, path, site, op = (lane.rank.text(text) for text in row)
        key = axis, LIKE_BLOCKING.get(verb, verb), cause_of(axis, action, path, op) if by_cause else ""
        before = found.get(key, (0, 0.0))
        found[key] = before[0] + count, before[1] + amount
        sites[key][site] += round(amount) + count
    return found


def _sends(lane: Lane) -> Array:
    """Which spans are messages that it sends, but for digests that ranks compare under --check: no theory has them."""
    sends = lane.of("message") & ~lane.flags("name", ("recv", "irecv"))
    if lane.rank.facts.get("checked") is True:
        sends &= ~(lane.flags("name", ("all_gather",)) & lane.flags("shape", (DIGEST,)))
    return sends


def _odd(
    known: Known, steps: Sequence[int], theory: dict[int, dict[tuple[str, str, str], float] | None]
) -> list[tuple[int, int, str, str, float, float]]:
    """Where a rank sent other bytes in a step over an axis than it was to."""
    found = []
    for lane in known.lanes:
        wanted: dict[tuple[str, str], float] = defaultdict(float)
        for (axis, _, verb), nbytes in (theory[lane.number] or {}).items():
            wanted[axis, verb] += nbytes
        verbs = [LIKE_BLOCKING.get(text, text) for text in lane.rank.strings]
        at = np.flatnonzero(_sends(lane) & lane.during(steps))
        table = np.stack([lane.step[at], *(lane.spans[name][at].astype(np.int64) for name in ("axis", "name"))], axis=1)
        distinct, number = np.unique(table, axis=0, return_inverse=True)
        amounts = np.bincount(number.reshape(-1), weights=lane.spans["bytes"][at], minlength=len(distinct)).tolist()
        sums: dict[int, dict[tuple[str, str], float]] = {step: dict.fromkeys(wanted, 0.0) for step in steps}
        for (step, axis, verb), amount in zip(distinct.tolist(), amounts, strict=True):
            of_step, key = sums[step], (lane.rank.text(axis), verbs[verb])
            of_step[key] = of_step.get(key, 0.0) + amount
        for step, of_step in sums.items():
            for (axis, verb), is_sent in of_step.items():
                if not _same(is_sent, wanted.get((axis, verb), 0.0)):
                    found.append((step, lane.number, axis, verb, is_sent, wanted.get((axis, verb), 0.0)))
    return found
