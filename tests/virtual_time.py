"""Ranks with a clock each, on which computing takes as long as one says and a message is on its way for a while.

    clocks = Clocks(4, message=0.02)
    LocalWorld(4, wrap=clocks.wrap).run(main)             in it: clocks.of(rank).work(0.05)

Nothing waits in truth, so what is measured is the order of things alone, the same on an idle and on a busy machine.  A
message that is received moves the receiver's clock to its arrival; a send that is waited for moves the sender's.  Only
messages from one rank to another take time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.comm.transport import Pending, Transport
from mpitrain.events import Event
from mpitrain.pipeline.action import Action


class Clock:
    """The time of one rank, and as a listener what its actions took."""

    def __init__(self, costs: dict[str, float]) -> None:
        self.now = 0.0
        self.costs = costs
        self.spans: list[tuple[Action, float, float]] = []
        self._start = 0.0

    def restart(self) -> None:
        """Forget what was."""
        self.now = 0.0
        self.spans.clear()

    def __call__(self, event: Event) -> None:
        if event.kind != "action":
            return
        action = event.info["action"]
        if event.phase == "begin":
            self._start = self.now
            self.now += self.costs.get(action.kind, 0.0)
        else:
            self.spans.append((action, self._start, self.now))


class Clocks:
    """The clocks of all ranks of a world.

    Args:
        size: number of ranks.
        message: seconds from a send to its arrival.
        costs: seconds of an action, by kind.
    """

    def __init__(self, size: int, message: float, costs: dict[str, float]) -> None:
        self.message = message
        self.clocks = [Clock(costs) for _ in range(size)]
        self.arrivals: dict[Any, deque[float]] = defaultdict(deque)

    def of(self, rank: int) -> Clock:
        """The clock of a rank of the world."""
        return self.clocks[rank]

    def wrap(self, transport: Transport) -> Transport:
        """For `LocalWorld(..., wrap=...)`."""
        return Timed(transport, self, tuple(range(transport.size)))


class Timed:
    """All verbs of a transport; those from one rank to another by the clocks."""

    def __init__(self, transport: Transport, clocks: Clocks, ranks: tuple[int, ...]) -> None:
        self._transport, self._clocks, self._ranks = transport, clocks, ranks
        self.rank, self.size, self.kind = transport.rank, transport.size, transport.kind
        self._clock = clocks.of(ranks[transport.rank])

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self._transport, verb)
        return found

    def isend(self, buf: np.ndarray, dest: int, tag: int) -> Pending:
        arrival = self._clock.now + self._clocks.message
        self._clocks.arrivals[self._ranks, self.rank, dest, tag].append(arrival)
        return Sent(self._transport.isend(buf, dest, tag), self._clock, arrival)

    def irecv(self, buf: np.ndarray, source: int, tag: int) -> Pending:
        arrivals = self._clocks.arrivals[self._ranks, source, self.rank, tag]
        return Expected(self._transport.irecv(buf, source, tag), self._clock, arrivals)

    def send(self, buf: np.ndarray, dest: int, tag: int) -> None:
        self.isend(buf, dest, tag).wait()

    def recv(self, buf: np.ndarray, source: int, tag: int) -> None:
        self.irecv(buf, source, tag).wait()

    def group(self, ranks: tuple[int, ...], name: str) -> Transport:
        inner = self._transport.group(ranks, name)
        return inner if len(ranks) == 1 else Timed(inner, self._clocks, tuple(self._ranks[rank] for rank in ranks))

    def close(self) -> None:
        self._transport.close()


class Sent:
    """A send, which is complete when it has arrived."""

    def __init__(self, pending: Pending, clock: Clock, arrival: float) -> None:
        self._pending, self._clock, self._arrival = pending, clock, arrival

    def test(self) -> bool:
        return self._pending.test() and self._clock.now >= self._arrival

    def wait(self) -> None:
        self._pending.wait()
        self._clock.now = max(self._clock.now, self._arrival)


class Expected:
    """A receive, which is complete when the oldest message with its tag has arrived."""

    def __init__(self, pending: Pending, clock: Clock, arrivals: deque[float]) -> None:
        self._pending, self._clock, self._arrivals = pending, clock, arrivals

    def test(self) -> bool:
        if not self._pending.test() or self._clock.now < self._arrivals[0]:
            return False
        self._arrivals.popleft()
        return True

    def wait(self) -> None:
        self._pending.wait()
        self._clock.now = max(self._clock.now, self._arrivals.popleft())
