"""How fast steps go, for a person who waits: tokens a second, and what is left."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds(work: Callable[[], object]) -> float:
    """How long `work()` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Clock:
    """How fast steps go; what happens between `restart` and the next step's begin does not count."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens  # of a step
        self._since = time.perf_counter()
        self.seconds = 0.0  # of a step, a mean in which the last 20 steps or so weigh
        self.speed_of_step = 0.0

    def tick(self, steps: int = 1) -> None:
        """A step ends, or so many that overlapped."""
        now = time.perf_counter()
        took, self._since = (now - self._since) / steps, now
        self.seconds += (took - self.seconds) * (0.05 if self.seconds else 1.0)
        self.speed_of_step = self._tokens / took

    def restart(self) -> None:
        """Something else was done since the last step."""
        self._since = time.perf_counter()

    @property
    def speed(self) -> float:
        """Tokens a second over all ranks."""
        return self._tokens / self.seconds
