"""A transport on which every message takes a while longer: `LocalWorld(4, wrap=delayed(0.02))`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mpitrain.comm.transport import Pending, Transport


class Late:
    """A message that is complete when it is, and not before `due`."""

    def __init__(self, pending: Pending, due: float, sleep: Callable[[float], None]) -> None:
        self._pending = pending
        self._due = due
        self._sleep = sleep

    def test(self) -> bool:
        return self._pending.test() and time.monotonic() >= self._due

    def wait(self) -> None:
        self._pending.wait()
        self._sleep(self._due)


class Delayed:
    """All verbs of a transport, each message `seconds` late, counted from when this rank posts it.

    `messages` counts them; `waited` is the time for which this rank had nothing to do but wait for a late one.
    """

    def __init__(self, transport: Transport, seconds: float) -> None:
        self._transport = transport
        self._seconds = seconds
        self.rank, self.size, self.kind = transport.rank, transport.size, transport.kind
        self.messages = 0
        self.waited = 0.0

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        do = getattr(self._transport, verb)

        def late(*args: Any, **how: Any) -> Any:
            self.messages += 1
            due = time.monotonic() + self._seconds
            if verb.startswith("i"):  # isend, iall_reduce, ...
                return Late(do(*args, **how), due, self._sleep)
            do(*args, **how)
            self._sleep(due)
            return None

        return late

    def _sleep(self, due: float) -> None:
        seconds = max(0.0, due - time.monotonic())
        self.waited += seconds
        time.sleep(seconds)

    def group(self, ranks: tuple[int, ...], name: str) -> Transport:
        return Delayed(self._transport.group(ranks, name), self._seconds)

    def close(self) -> None:
        self._transport.close()


def delayed(seconds: float) -> Callable[[Transport], Transport]:
    """A wrapper for `LocalWorld(..., wrap=...)`."""
    return lambda transport: Delayed(transport, seconds)
