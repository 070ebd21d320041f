"""A training in which one rank falls behind, or all are slow.   python behind_script.py HOW RANK MARK LIMIT [FLAGS...]

In step 3 rank RANK writes the time to the file MARK, and then: `SIGSTOP` stops it, `loop` has it compute for ever,
`sleep` for 30 seconds.  With `delays` every rank is late now and then, by up to MARK seconds, and none falls behind.
The time limit is LIMIT seconds from step 2 on: the start, on a loaded machine, may take longer.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mpitrain.comm.world import world
from mpitrain.events import Event, listen
from mpitrain.train import main

FLAGS = ["--data", __file__, *"--model gpt-tiny --batch 12 --steps 6 --eval-every 0 --sample-length 0".split()]
SMALL = "--layers 1 --width 16 --heads 2 --seq-len 16 --batch 4 --eval-every 0 --sample-length 0".split()
SHARE = 0.05  # of the steps in which a rank is late


def _stop() -> None:
    time.sleep(0.7)  # a look of its own sees it here
    os.kill(os.getpid(), signal.SIGSTOP)


def _loop() -> None:
    while True:  # HERE it loops
        pass


def _sleep() -> None:
    time.sleep(30)  # HERE it sleeps


HOWS: dict[str, Callable[[], None]] = {"SIGSTOP": _stop, "loop": _loop, "sleep": _sleep}


class Fall:
    """A listener that leaves its rank behind, in the forward pass of step 3."""

    def __init__(self, how: str, mark: Path) -> None:
        self.how, self.mark = how, mark
        self.step = 0

    def __call__(self, event: Event) -> None:
        if event.kind != "action" or event.phase != "begin":
            return
        self.step += event.name.startswith("LOAD0")
        if self.step == 3 and event.name.startswith("F"):
            self.mark.write_text(repr(time.time()))
            HOWS[self.how]()


class Limit:
    """A listener that sets the time limit, as --timeout does before."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.steps = 0

    def __call__(self, event: Event) -> None:
        if event.kind == "action" and event.phase == "begin" and event.name.startswith("LOAD0"):
            self.steps += 1
            if self.steps == 2:
                world().board.limit = self.seconds


class Delays:
    """A listener that is late now and then."""

    def __init__(self, rank: int, most: float) -> None:
        self.random, self.most = random.Random(rank), most

    def __call__(self, event: Event) -> None:
        at_load = event.kind == "action" and event.phase == "begin" and event.name.startswith("LOAD0")
        if at_load and self.random.random() < SHARE:
            time.sleep(self.random.uniform(0, self.most))


if __name__ == "__main__":
    how, rank, mark, limit, *more = sys.argv[1:]
    with contextlib.ExitStack() as stack:
        stack.enter_context(listen(Limit(float(limit))))
        if how == "delays":
            stack.enter_context(listen(Delays(world().rank, float(mark))))
            main(["--data", __file__, *SMALL, *more])
        else:
            if world().rank == int(rank):
                stack.enter_context(listen(Fall(how, Path(mark))))
            main([*FLAGS, "--run", str(Path(mark).parent / "run"), *more])
