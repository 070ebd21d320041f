"""A trace in memory: what each rank did and when, as arrays of spans.

A span is one thing that began and ended on one rank: an action of the executor, an op, a message, a wait.  Spans of a
rank nest as calls do, so what a message belongs to is the span around it.  Names are numbers of `RankTrace.strings`.

    rank.spans["kind"] == KIND["message"]           which spans are messages
    rank.strings[rank.spans["axis"][i]]             the axis of the i-th
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("action", "op", "message", "wait", "arrival", "copy", "disk", "unit")
"""What a span can be; its number in this tuple stands in the span.

action   F3@1; name is the kind of it with stage and micro-batch, `action` is "F" alone
op       `gelu`, or `gelu.backward`
message  a call of the door that blocks, or that posts; `name` is its verb, `all_reduce` or `iall_reduce`
wait     for a call that did not block; `name` is that call's verb
arrival  a point in time: when a call that did not block was seen to be complete; `number` is that call's
copy     what the I/O thread of a store moved, in its own thread: spans of this kind are not nested in others
disk     an operation on a file; of a save in the background in its own thread
unit     weights of a part of the model that come when it works (`fetch`), and go (`release`, a point)
"""

KIND = {name: number for number, name in enumerate(KINDS)}

SPAN = np.dtype(
    [
        ("start", "<i8"),  # ns of this rank's own perf_counter_ns
        ("stop", "<i8"),
        ("kind", "u1"),  # a number of KINDS
        ("depth", "u1"),  # how many spans of this rank are around it
        ("step", "<u4"),  # counted from 1; 0 outside of steps
        ("name", "<u4"),  # from here to `shape`: numbers of strings; 0 is ""
        ("path", "<u4"),  # of the module, `blocks.0.mlp.up`; of a file
        ("action", "<u4"),  # the kind of the action around it: `F`, `SEND_B`, `REDUCE`
        ("site", "<u4"),  # of a message: `train.py:31`
        ("axis", "<u4"),  # of a message
        ("shape", "<u4"),  # of what a message sends, with its dtype: `(4, 512) float32`; of an op's output
        ("number", "<u4"),  # of a message: the how many-th call on its axis
        ("peer", "<i4"),  # of a message: rank on its axis; -1: a collective
        ("tag", "<i4"),  # of a message between two
        ("bytes", "<f8"),  # that a message sends, as the door counts; of a copy and a file operation: moved
    ]
)
"""One span of a rank."""

MEMORY = np.dtype([("time", "<i8"), ("step", "<u4"), ("owner", "<u4"), ("bytes", "<i8")])
"""What one owner held at one time; `owner` is the number of a string: "weights", "activations"."""


@dataclass
class RankTrace:
    """What one rank did.

    Attributes:
        rank, size: in the world.
        host: the name of its machine.
        clock: ranks with the same text share a clock.
        axes: the world ranks of each axis that this rank is on, in axis order: `{"tp": (2, 3)}`.
        strings: what numbers in spans mean; the first is "".
        spans: array of SPAN, by start; of spans that start together the outer one comes first.
        memory: array of MEMORY, by time.
        steps: for each step that was begun a dict with `step`, `start`, `stop` (ns), and, where they are known, `loss`,
            `tokens`; `ops`: whether ops were traced in it.
        dropped: spans that the bound on size left out.
        facts: what the run is: model, layout, versions, words of the command.
    """

    rank: int
    size: int
    host: str = ""
    clock: str = ""
    axes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    strings: list[str] = field(default_factory=lambda: [""])
    spans: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0, SPAN))
    memory: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0, MEMORY))
    steps: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)

    def of_kind(self, *kinds: str) -> np.ndarray[Any, Any]:
        """The spans of these kinds, in order."""
        return self.spans[np.isin(self.spans["kind"], [KIND[kind] for kind in kinds])]

    def text(self, number: int) -> str:
        """The string of a number."""
        return self.strings[number]


@dataclass
class Trace:
    """What the ranks of a run did.

    Attributes:
        ranks: ascending; some may be missing.
        folder: where it was read from.
    """

    ranks: list[RankTrace]
    folder: Path = Path()
