"""A step as one line of letters a rank: what it did most in each moment.

       0 ms                 33.69                67.37               101.06
rank 0 |FFFFttFF..pBBBttBBFFFF.......

F B W    computing             U   update: LOAD COUNT REDUCE STEP
t p d    bytes move over tp, pp, dp: the first letter of the axis
.        waiting for others    (blank) between actions, or not traced
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpitrain.pipeline.action import COMPUTE
from mpitrain.trace.known import Lane
from mpitrain.trace.shares import UPDATE
from mpitrain.trace.words import plain

WAITS, NOTHING = ".", " "
_FINE = 64  # parts of a column


def strip(lane: Lane, step: int, start: int, stop: int, columns: int) -> str:
    """The line of one rank.

    Args:
        lane: of the rank.
        step: of which.
        start, stop: ns by the clock of all: what the line reaches from and to.
        columns: letters.
    """
    parts = columns * _FINE
    painted = np.full(parts, ord(NOTHING), np.uint8)
    here = np.flatnonzero((lane.step == step) & (lane.of("action") | lane.is_message))
    here = here[np.argsort(lane.is_message[here], kind="stable")]  # messages over the actions that they are in
    scale = parts / max(stop - start, 1)
    begins = np.clip((lane.start[here] - start) * scale, 0, parts)
    ends = np.clip((lane.stop[here] - start) * scale, 0, parts)
    waits = np.clip((lane.start[here] + lane.waited.ns[here] - start) * scale, 0, parts)
    for at, a, b, w in zip(here.tolist(), begins.tolist(), ends.tolist(), waits.tolist(), strict=True):
        first, last, moves = round(a), round(b), round(w)
        painted[first:last] = ord(_letter(lane, at))
        if lane.is_message[at]:
            painted[first : max(first, moves)] = ord(WAITS)
    return "".join(chr(np.bincount(column).argmax()) for column in painted.reshape(columns, _FINE))


def letters(lanes: Sequence[Lane], drawn: Sequence[str]) -> str:
    """What the letters in some strips mean."""
    there = set("".join(drawn))
    said = [f"{kind} computing" for kind in [" ".join(kind for kind in COMPUTE if kind in there)] if kind]
    said += ["U update"] * ("U" in there)
    of_letter: dict[str, list[str]] = {}
    for axis in dict.fromkeys(axis for lane in lanes for axis in lane.rank.axes):
        of_letter.setdefault(_axis_letter(axis), []).append(plain(axis, 16))
    said += [f"{letter} {', '.join(axes[:3])}" for letter, axes in of_letter.items() if letter in there]
    said += [f"{WAITS} waiting"] * (WAITS in there)
    return "   ".join(said)


def _letter(lane: Lane, at: int) -> str:
    if lane.is_message[at]:
        return _axis_letter(lane.rank.text(lane.spans["axis"][at]))
    kind = lane.rank.text(lane.spans["action"][at])
    return kind if kind in COMPUTE else "U" if kind in UPDATE else NOTHING


def _axis_letter(axis: str) -> str:
    return axis[0].lower() if axis[:1].isascii() and axis[:1].isalpha() else "m"
