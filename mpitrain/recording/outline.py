"""Which messages of a rank are in its recording: their numbers, as spans.

Messages of steps that were not recorded have numbers, too, so the numbers of a recording have gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mpitrain.recording.lines import Call
from mpitrain.recording.reading import RankReader

MOST_SPANS = 4


class Outline(NamedTuple):
    """What can be stopped at.

    Attributes:
        spans: first and last number of messages that follow each other.
        steps: the same of all that were sent in recorded steps; None: there are none.
    """

    spans: list[tuple[int, int]]
    steps: tuple[int, int] | None

    def has(self, n: int) -> bool:
        """Whether message n is recorded."""
        return any(first <= n <= last for first, last in self.spans)


def outline(folder: Path, rank: int) -> Outline:
    """Which messages are recorded of a rank.

    Raises:
        RecordingError: there is no recording of it, or it is damaged.

    Cost: reads the index once, not the values.
    """
    reader = RankReader(folder, rank)
    spans: list[tuple[int, int]] = []
    steps: tuple[int, int] | None = None
    try:
        while (line := reader.next()) is not None:
            if not isinstance(line, Call):
                continue
            if spans and line.n == spans[-1][1] + 1:
                spans[-1] = (spans[-1][0], line.n)
            else:
                spans.append((line.n, line.n))
            if line.step:
                steps = (line.n if steps is None else steps[0], line.n)
    finally:
        reader.close()
    return Outline(spans, steps)


def told_spans(spans: Sequence[tuple[int, int]]) -> str:
    """`1 to 17, 25, 1018 to 1072`; of many the longest."""
    longest = sorted(sorted(spans, key=lambda span: span[0] - span[1])[:MOST_SPANS])
    more = f" and {len(spans) - len(longest)} shorter runs" if len(spans) > len(longest) else ""
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in longest) + more
