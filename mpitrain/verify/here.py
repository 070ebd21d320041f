"""Record a training function in this process: its ranks are threads.

    one_rank = record(1, train)
    verdict = judge(one_rank[0], record(4, train))

Nothing is started and nothing is written, so a run of a tiny model takes milliseconds: for sweeps and tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.debug.capture import Record, recording
from mpitrain.events import listen
from mpitrain.verify.stale import Replay, courses_of


def record(ranks: int, train: Callable[[], Any], steps: int | None = None) -> list[list[Record]]:
    """Run `train` on every rank of a world of so many.

    Args:
        ranks: number of ranks.
        train: builds everything on `world()` and runs steps.
        steps: ends it after so many.

    Returns:
        The records of each rank.

    Raises:
        Exception: whatever the first rank that failed raised.
    """
    kept: list[list[Record]] = [[] for _ in range(ranks)]
    record_on(kept, train, steps)
    return kept


def record_on(kept: list[list[Record]], train: Callable[[], Any], steps: int | None = None) -> None:
    """The same into lists that the caller holds, one a rank, so that they remain if a rank fails."""

    def body() -> None:
        me = world()
        with recording(me, kept[me.rank].append, steps):
            train()

    LocalWorld(len(kept)).run(body)


def replay(schedule: str, ranks: Sequence[Sequence[Record]], train: Callable[[], Any]) -> list[Record]:
    """Record the replay of a pipeline that never drains on one rank: what it should equal.

    Args:
        schedule: by name.
        ranks: what its ranks have recorded.
        train: the same training on one rank.
    """
    kept: list[list[Record]] = [[]]

    def body() -> None:
        with listen(Replay(world(), courses_of(schedule, ranks))):
            train()

    record_on(kept, body)
    return kept[0]
