"""Inspectors of the console on many layouts: nothing is called wrong in a run that is right, and nothing fails.

    PYTHONPATH=.:tests python tests/inspect_layouts.py [NUMBER]        all, or the layouts from that number on

Each layout trains two steps of a small GPT and is stopped every so many events, at other places on each rank, and at
places of one program; there all inspectors look at all there is.  Prints a line a layout.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from checks_layouts import SIZES, train

from mpitrain import train as trainer
from mpitrain.comm.baton import Ended
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.debug.console.backward import backward
from mpitrain.debug.console.follow import Follow
from mpitrain.debug.console.held import memory
from mpitrain.debug.console.shown import show
from mpitrain.debug.console.so_far import report
from mpitrain.debug.console.tapes import tape
from mpitrain.debug.console.watch import Watch
from mpitrain.debug.stepper import Stepper
from mpitrain.errors import ConsoleError
from mpitrain.events import Event
from mpitrain.routing import Routing

SMALL = replace(SIZES, layers=2, vocab=13)
EXPERTS = replace(SMALL, routing=Routing(4))
WIDTH = 100
FOLLOWED = ("blocks.0.attention.qkv.weight", "norm.bias")
EVERY = 97
"""Events of a rank from stop to stop."""

LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2},
    {"dp": 4, "micros": 2},
    {"tp": 4},
    {"tp": 4, "sp": True},
    {"cp": 2, "dp": 2},
    {"cp": 4, "kind": "ulysses"},
    {"cp": 2, "tp": 2, "sp": True},
    {"dp": 2, "tp": 2, "bucket_bytes": 4096, "micros": 2},
    {"pp": 2, "dp": 2, "micros": 4},
    {"pp": 2, "tp": 2, "micros": 2, "schedule": "gpipe"},
    {"pp": 2, "dp": 2, "micros": 4, "schedule": "zb-h1"},
    {"pp": 2, "micros": 4, "chunks": 1, "slices": (8, 8), "schedule": "terapipe"},
    {"dp": 4, "zero": 1},
    {"dp": 4, "zero": 2, "micros": 2},
    {"dp": 2, "tp": 2, "zero": 3},
    {"dp": 2, "pp": 2, "zero": 3, "micros": 2},
    {"dp": 4, "ep": 4, "sizes": EXPERTS},
    {"dp": 4, "ep": 2, "tp": 1, "sizes": EXPERTS, "micros": 2},
    {"dp": 2, "ep": 2, "tp": 2, "sizes": EXPERTS},
    {"dp": 2, "tp": 2, "recompute": ["blocks.*"]},
    {"dp": 2, "tp": 2, "dtype": "float16", "scaling": "loss"},
    {"dp": 4, "dtype": "bfloat16", "zero": 2},
    {"dp": 2, "tp": 2, "adafactor": True},
    {"dp": 2, "tp": 2, "gist": 16},
    {"pp": 2, "dp": 2, "sizes": replace(SMALL, tied=True), "micros": 2},
    {"dp": 2, "documents": True, "cp": 2},
    {"pp": 2, "dp": 2, "cp": 2, "micros": 2},
    {"pp": 2, "dp": 2, "tp": 2, "micros": 2, "zero": 1},
    *(
        {"dp": 2, "flags": flags}
        for flags in (
            "--reducer local --local-steps 2 --optimizer sgd",
            "--reducer local --local-steps 3 --average-moments",
            "--reducer stale --staleness 1",
            "--reducer powersgd --powersgd-rank 2",
            "--offload optimizer,activations",
            "--zero 3 --offload parameters,optimizer",
            "--gist 8 --microbatches 2",
            "--dtype float16 --loss-scaling blocks",
        )
    ),
    {"pp": 2, "flags": "--schedule pipedream-2bw --microbatches 2"},
    {"pp": 2, "flags": "--schedule pipedream --clip 0"},
    {"pp": 2, "tp": 2, "flags": "--schedule interleaved --microbatches 2 --layers 4 --sequence-parallel"},
]
"""What `checks_layouts.train` takes, or flags of the trainer."""

FLAGS = "--layers 2 --width 16 --heads 2 --seq-len 16 --batch 8 --steps 4 --sample-length 0 --eval-every 0 --seed 3"


def look(watches: Sequence[Watch]) -> list[tuple[str, str]]:
    """All that there is to see, by the words that ask for it."""
    kinds = dict.fromkeys(kind for watch in watches for kind in watch.moments)
    nodes = [node for watch in watches if watch.tape is not None for node in watch.tape.nodes[-3:] if node.outputs]
    slots = dict.fromkeys(f"%{node.outputs[0]}" for node in nodes)
    asked: list[tuple[Callable[..., str], str]] = [(show, "*"), (show, "*.grad"), (show, "*.master")]
    asked += [(show, f"*.{kind}") for kind in kinds]
    asked += [(show, word) for word in ("input", "output", "grad", "input_grad", "batch", *slots)]
    asked += [(tape, str(watch.rank)) for watch in watches]
    asked += [(tape, f"diff {a.rank} {b.rank}") for a, b in pairwise(watches) if _alike(a, b)]
    asked += [(backward, str(watch.rank)) for watch in watches] + [(memory, ""), (report, "")]
    found = []
    for function, words in asked:
        try:
            found.append((f"{function.__name__} {words}", function(watches, words, 0, WIDTH)))
        except ConsoleError as error:
            found.append((f"{function.__name__} {words}", str(error)))
    return found


def _alike(a: Watch, b: Watch) -> bool:
    """Whether two ranks have recorded the same by now: of one stage, at one event of one op."""
    if a.mesh is None or b.mesh is None or a.mesh.coords["pp"] != b.mesh.coords["pp"]:
        return False
    if a.op is None or b.op is None or a.event is None or b.event is None or a.op.moment != b.op.moment:
        return False
    return a.event[:3] == b.event[:3]


def wrong(found: Sequence[tuple[str, str]]) -> list[str]:
    """What is said to be wrong, or is too wide."""
    odd = []
    for words, text in found:
        lines = text.splitlines()
        odd += [f"{words}: {line}" for line in lines if line.startswith("! ")]
        odd += [f"{words}: {len(line)} columns: {line}" for line in lines if len(line) > WIDTH]
    return odd


def run(how: dict[str, Any]) -> tuple[int, list[str]]:
    """How many looks were made, and what was called wrong."""
    axes = [how.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")]
    ranks = int(np.prod(axes))
    watches: dict[int, Watch] = {}
    counts = dict.fromkeys(range(ranks), 0)
    looks = 0
    odd: list[str] = []
    mistakes: list[BaseException] = []
    follows: list[Follow] = []
    said: list[str] = []

    def hear(watch: Watch, event: Event) -> None:
        counts[watch.rank] += 1
        for follow in follows:
            follow.hear(watch, event)

    def goal(view: Any, event: Event) -> bool:
        if looks % 2:
            return counts[view.number] % EVERY == 0
        return event.kind == "op" and event.phase == "end" and counts[view.number] % 23 < 6

    def prompt(why: str) -> None:
        nonlocal looks
        looks += 1
        views = [watches[rank] for rank in sorted(watches)]
        try:
            if why == "stopped":
                odd.extend(f"{why} {looks}: {line}" for line in wrong(look(views)))
            if not follows:
                follows.extend(Follow(name, said.append, views) for name in FOLLOWED)
        except BaseException as error:
            mistakes.append(error)
            stepper.end(1)
            return
        stepper.go(goal if why != "failed" else None)

    def companions(ranks: Any) -> list[Callable[[Event], None]]:
        watch = watches[ranks.rank] = Watch(ranks)
        return [watch, lambda event: hear(watch, event)]

    stepper = Stepper(ranks, prompt, companions)

    def body() -> None:
        with stepper.around():
            if "flags" in how:
                axes = [word for axis in ("pp", "dp", "tp") if axis in how for word in (f"--{axis}", str(how[axis]))]
                trainer.main(["--data", __file__, "--run", folder, *FLAGS.split(), *axes, *how["flags"].split()])
            else:
                train(world(), **{"sizes": SMALL, "steps": 2, "batch": 8, **how})

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        try:
            LocalWorld(ranks, debugger=stepper).run(body)
        except Ended:
            raise mistakes[0] from None
    odd += [f"follow: {line}" for text in said for line in text.splitlines() if line.startswith("! ")]
    if not any("updated" in text for text in said):
        odd.append("follow told of no update")
    odd += [f"states: {watch.trouble}" for watch in watches.values() if watch.trouble]
    return looks, odd


def main() -> int:
    """All layouts; the number of those with an alarm."""
    first = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    bad = 0
    for number, how in list(enumerate(LAYOUTS))[first:]:
        start = time.process_time()
        looks, odd = run(how)
        bad += bool(odd)
        name = re.sub(r"GPTConfig\(.*?\)", "GPT", str(how))
        seconds = time.process_time() - start
        print(f"{number:2d} {'BAD' if odd else 'ok '} {looks:4d} looks {seconds:6.1f} s  {name}", flush=True)
        for line in list(dict.fromkeys(odd))[:6]:
            print(f"      {line}", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main())
