"""What comes from a trace's files, made fit to be shown."""

from __future__ import annotations

import math

LONGEST_TEXT = 400
"""Characters of a name that is shown."""


def shown(text: object) -> str:
    """Text of bounded length, without signs that cannot be seen or that turn the direction of reading."""
    begin = str(text)[: LONGEST_TEXT + 1]
    plain = "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in begin)
    return plain if len(plain) <= LONGEST_TEXT else plain[: LONGEST_TEXT - 1] + "…"


def number_of(value: object) -> float | int | None:
    """A number that JSON has; None for all else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value
