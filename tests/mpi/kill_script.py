"""A training in which one rank comes to grief.   python kill_script.py HOW PHASE RANK MARK [FLAGS...]

In step 2, as PHASE begins, rank RANK writes the time to the file MARK and then ends as HOW says.  What begins is told
by the events of the training itself; a save is known by its first message after the optimizer's step.  The layout is
what FLAGS say, data parallel without.
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
from mpitrain.events import Event, listen
from mpitrain.train import main

# phase -> (kind of event, start of its name, start of the action before a message)
PHASES = {
    "data": ("action", "LOAD", ""),
    "forward": ("action", "F", ""),
    "backward": ("action", "B", ""),
    "all-reduce": ("message", "all_reduce", "REDUCE"),
    "step": ("action", "STEP", ""),
    "save": ("message", "exchange", "STEP"),
}
PIPELINE_PHASES = {
    "forward": ("action", "F", ""),
    "receive": ("action", "RECV", ""),
    "backward": ("action", "B", ""),
    "step": ("action", "STEP", ""),
}
FLAGS = ["--data", __file__, *"--model gpt-tiny --batch 12 --steps 4 --save-every 1 --eval-every 0".split()]
FLAGS += ["--sample-length", "0"]


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


class Fault:
    """A listener that ends this rank."""

    def __init__(self, how: str, phase: str, mark: Path) -> None:
        self.how, self.mark = how, mark
        self.wanted = {**PHASES, **PIPELINE_PHASES}[phase]
        self.action = ""  # the last that began
        self.step = 0

    def __call__(self, event: Event) -> None:
        if event.phase != "begin":
            return
        if event.kind == "action":
            self.action = event.name
            self.step += event.name.startswith("LOAD0")
        kind, name, action = self.wanted
        if self.step == 2 and event.kind == kind and event.name.startswith(name) and self.action.startswith(action):
            time.sleep(0.2)  # the others wait already
            self.mark.write_text(repr(time.time()))
            FAULTS[self.how]()


if __name__ == "__main__":
    path = Path(sys.argv[4])
    flags = [*FLAGS, "--run", str(path.parent / "run"), *sys.argv[5:]]
    if world().rank == int(sys.argv[3]):
        with listen(Fault(sys.argv[1], sys.argv[2], path)):
            main(flags)
    else:
        main(flags)
