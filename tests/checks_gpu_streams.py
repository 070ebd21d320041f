"""Stale reads: what is read of a device while kernels still run must be what they write (CASES.md C82).

Each check makes a number of rounds and returns how many of them read something old: 0, on any device, however messages
go.  `Work` keeps the device busy, so that in each round its last kernel, which writes the round's numbers, is still to
come when the host goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from checks_device_messages import LIGHT, of_the_door

from mpitrain.backend import to_host
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.memory.store import Region, open_store

ROUNDS = 200
SIZE = 4096  # numbers of a message; a few times as many are above every limit of eager protocols
REGION = "numbers"


class Work:
    """Something that takes a device a while.

    Args:
        xp: of the device.
        width: of the matrices that it multiplies: 2 ms on a chip of 2022 take about 2048.
    """

    def __init__(self, xp: Any, width: int = 2048) -> None:
        self._xp = xp
        self._a = xp.full((width, width), 1.0 / width, np.float32)
        self._b = xp.ones((width, width), np.float32)
        self._c = xp.empty((width, width), np.float32)

    def then_fill(self, x: Any, value: float) -> None:
        """Begin the work, and after it fill x with a number."""
        for _ in range(4):
            self._xp.matmul(self._a, self._b, out=self._c)
        x[...] = value + (self._c[0, 0] - 1.0).astype(x.dtype)  # of the work's result, which is 1


def copies(xp: Any, rounds: int = ROUNDS, width: int = 2048) -> int:
    """What is copied to the host is what the last kernel wrote; what is copied to the device is not ahead of it."""
    work, stale = Work(xp, width), 0
    x, y = xp.zeros(SIZE), xp.zeros(SIZE)
    for value in range(1, rounds + 1):
        work.then_fill(x, value)
        host = to_host(x)
        sent = host + 1.0
        y[...] = xp.asarray(sent)
        sent[...] = -1.0  # it is the host's own: the device must have read it
        stale += not (to_host(y) == value + 1.0).all()
    return stale


def messages(
    xp: Any, ranks: int = 2, rounds: int = ROUNDS, width: int = 2048, use: Callable[[], None] = lambda: None
) -> int:
    """Messages from arrays that a kernel is about to write, into arrays that the next kernel reads, over threads."""

    def main() -> int:
        use()
        return rounds_of_messages(world(), xp, rounds, width)

    return sum(LocalWorld(ranks).run(main))


def door(xp: Any, way: str, use: Callable[[], None] = lambda: None) -> None:
    """Everything that is promised of messages, of device arrays between two threads, "staged" or directly ("mpi")."""

    def main() -> None:
        use()
        of_the_door(world(), xp, way, LIGHT)

    LocalWorld(2).run(main)


def rounds_of_messages(w: Communicator, xp: Any, rounds: int, width: int = 2048) -> int:
    """As `messages`, on the ranks of an axis."""
    work, stale, me, n = Work(xp, width), 0, w.rank, w.size
    x, y = xp.zeros(SIZE * n), xp.zeros(SIZE * n)
    after, before = (me + 1) % n, (me - 1) % n
    for value in range(1, rounds + 1):
        work.then_fill(x, value + me)
        verb = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "iall_reduce", "isend", "shift")[value % 7]
        total = float(sum(value + rank for rank in range(n)))
        expected = np.full(SIZE * n, total)
        if verb == "all_reduce":
            w.all_reduce(x, out=y)
        elif verb == "iall_reduce":
            request = w.iall_reduce(x)
            y[...] = request.wait()
        elif verb == "all_gather":
            y[...] = w.all_gather(x[:SIZE])
            expected = np.repeat([float(value + rank) for rank in range(n)], SIZE)
        elif verb == "reduce_scatter":
            y[...] = xp.concatenate([w.reduce_scatter(x)] * n)
        elif verb == "all_to_all":
            y[...] = w.all_to_all(x)
            expected = np.repeat([float(value + rank) for rank in range(n)], SIZE)
        elif verb == "shift":
            y[...] = w.shift(x)
            expected = np.full(SIZE * n, float(value + before))
        else:
            arrives = w.irecv(y.shape, y.dtype, before, tag=value % 3, out=y)
            sends = w.isend(x, after, tag=value % 3)
            sends.wait()
            x[...] = -5.0  # the message has what was there when it was sent
            arrives.wait()
            expected = np.full(SIZE * n, float(value + before))
        y *= 2.0  # the next kernel
        stale += not np.array_equal(to_host(y), 2.0 * expected)
    return stale


def offloaded(xp: Any, rounds: int = ROUNDS, width: int = 2048, where: str = "host") -> int:
    """What is put into a store while a kernel is about to write it comes back as written, also fetched ahead."""
    work, stale = Work(xp, width), 0
    x = xp.zeros(SIZE)
    store = open_store(where, [Region(REGION, 2 * SIZE, x.dtype)], like=x, rank=0)
    try:
        for value in range(1, rounds + 1):
            start = SIZE * (value % 2)
            work.then_fill(x, value)
            store.put(REGION, start, x)
            if value % 3 == 0:
                store.prefetch(REGION, start, start + SIZE)
            elif value % 3 == 1:
                store.flush()
                x[...] = -1.0  # it is ours again
            back = store.get(REGION, start, start + SIZE)
            back += 1.0  # the next kernel
            stale += not bool((to_host(back) == value + 1.0).all())
    finally:
        store.close()
    return stale
