"""What ranks held, by owner: the most at the ends of actions, and what was held when it was most in all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitrain.debug.owners import OWNERS
from mpitrain.trace.known import Known, Lane

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Held:
    """What one rank held.

    Attributes:
        rank: in the world.
        peak: bytes of all owners together, the most.
        step: in which that was.
        at_peak: owner -> bytes then.
        largest: owner -> the most bytes it ever held.
        predicted: owner -> bytes that were predicted for it.
    """

    rank: int
    peak: int
    step: int
    at_peak: Mapping[str, int]
    largest: Mapping[str, int]
    predicted: Mapping[str, int]


def held(known: Known, step: int | None = None) -> list[Held]:
    """Of each rank of which memory was noted, in one step or in all."""
    return [found for lane in known.lanes if (found := _of_lane(lane, step)) is not None]


def owners(found: list[Held]) -> list[str]:
    """Names of all owners that held anything, in the order of tables."""
    names = [owner for owner in OWNERS if any(of.largest.get(owner) for of in found)]
    return names + sorted({owner for of in found for owner in of.largest if of.largest[owner]}.difference(names))


@dataclass(frozen=True)
class Amounts:
    """What owners held at all times at which something changed.

    Attributes:
        owners: their names.
        times: ns of the rank's own clock.
        steps: in which they are.
        nbytes: (times, owners).
    """

    owners: list[str]
    times: Array
    steps: Array
    nbytes: Array


def amounts_of(lane: Lane) -> Amounts | None:
    """What was held on a rank; None: nothing was noted."""
    rows = lane.rank.memory
    if not rows.size:
        return None
    numbers, owner = (found.reshape(-1) for found in np.unique(rows["owner"], return_inverse=True))
    times, moment = (found.reshape(-1) for found in np.unique(rows["time"], return_inverse=True))
    newest = np.zeros((times.size, numbers.size), np.int64)  # number of the row that holds, from 1
    newest[moment, owner] = np.arange(1, rows.size + 1)
    newest = np.maximum.accumulate(newest, axis=0)  # bytes are noted where they change, and stay until then
    nbytes = np.concatenate([np.zeros(1, np.int64), rows["bytes"].astype(np.int64)])[newest]
    steps = np.zeros(times.size, np.int64)
    steps[moment] = rows["step"]
    return Amounts([lane.rank.text(number) for number in numbers.tolist()], times, steps, nbytes)


def _of_lane(lane: Lane, step: int | None) -> Held | None:
    found = amounts_of(lane)
    if found is None:
        return None
    inside = np.flatnonzero(found.steps == step) if step is not None else np.arange(found.times.size)
    if not inside.size:
        return None
    nbytes = found.nbytes[inside]
    totals = nbytes.sum(axis=1)
    peak = int(totals.argmax())
    return Held(
        lane.number,
        int(totals[peak]),
        int(found.steps[inside[peak]]),
        dict(zip(found.owners, nbytes[peak].tolist(), strict=True)),
        dict(zip(found.owners, nbytes.max(axis=0).tolist(), strict=True)),
        _predicted(lane),
    )


def _predicted(lane: Lane) -> dict[str, int]:
    about = lane.rank.facts.get("memory")
    if not isinstance(about, dict):
        return {}
    return {owner: nbytes for owner, nbytes in about.items() if type(nbytes) is int and 0 <= nbytes < 1 << 60}
