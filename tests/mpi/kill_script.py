"""A small training in which one rank comes to grief.   python kill_script.py HOW PHASE RANK MARK

It has the phases of a real step, with the messages of a real step: data, forward, backward, all-reduce, step, save.  In
step 2, at the start of PHASE, rank RANK writes the time to the file MARK and then ends as HOW says.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mpitrain.comm.world import world

PHASES = ("data", "forward", "backward", "all-reduce", "step", "save")
Enter = Callable[[str], None]  # called with the phase that begins


def _raise() -> None:
    raise RuntimeError("one rank comes to grief")


def _raise_exit() -> None:
    raise SystemExit(4)


def _out_of_memory() -> None:
    np.empty(2**55)


FAULTS: dict[str, Callable[[], object]] = {
    "raise": _raise,
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit(3)": lambda: sys.exit(3),
    "raise SystemExit": _raise_exit,
    "os._exit": lambda: os._exit(5),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "MemoryError": _out_of_memory,
}


def train(enter: Enter, folder: Path, steps: int = 4) -> None:
    """Linear regression, data parallel; saves after every step."""
    ranks = world()
    weight = np.zeros(8)
    for step in range(steps):
        enter("data")
        rng = np.random.default_rng([step, ranks.rank])
        x = rng.normal(size=(16, 8))
        y = x @ np.arange(8.0)
        enter("forward")
        error = x @ weight - y
        count = ranks.all_reduce(np.array([len(y)], np.int64))
        enter("backward")
        grad = x.T @ error / count[0]
        enter("all-reduce")
        grad = ranks.all_reduce(grad)
        enter("step")
        norm = np.sqrt(ranks.all_reduce(np.array([grad @ grad]), op="max"))
        weight -= 0.1 * grad / max(1.0, norm[0])
        enter("save")
        if ranks.rank == 0:
            np.save(folder / f"step-{step}.npy", weight)
        ranks.barrier()


def main() -> None:
    how, phase, rank, mark = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    seen = 0

    def enter(begins: str) -> None:
        nonlocal seen
        if begins == phase and world().rank == rank:
            seen += 1
            if seen == 2:
                time.sleep(0.2)  # the others wait already
                mark.write_text(repr(time.time()))
                FAULTS[how]()

    train(enter, mark.parent)


if __name__ == "__main__":
    main()
