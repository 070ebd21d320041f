"""What is to be recorded, as a command line says it: `3,5` ranks, `100:103` steps."""

from __future__ import annotations

from mpitrain.errors import ConfigError

MOST_RANKS = 1 << 20
MOST_STEPS = 10**9


def ranks_of(text: str) -> list[int]:
    """The ranks of `3,5`, in rising order.

    Raises:
        ConfigError: it is no list of ranks.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 8 and int(word) < MOST_RANKS for word in words):
        raise ConfigError(f"--record-ranks {text[:80]!r}: must be numbers of ranks, as 3,5.")
    return sorted({int(word) for word in words})


def steps_of(text: str) -> tuple[int, int]:
    """The first and the last step of `100:103`, or of `100`.

    Raises:
        ConfigError: it is no range of steps.
    """
    words = text.split(":")
    known = len(words) in (1, 2) and all(w.isascii() and w.isdigit() and 0 < len(w) < 11 for w in words)
    first, last = (int(words[0]), int(words[-1])) if known else (0, 0)
    if not 1 <= first <= last <= MOST_STEPS:
        raise ConfigError(f"--record-steps {text[:80]!r}: must be the first step and the last, from 1 on: 100:103.")
    return first, last
