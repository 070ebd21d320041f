"""What offload costs: the time of a step with state, saved values and parameters elsewhere, fetched ahead or not.

    python benchmarks/offload.py                      about three minutes on two idle cores
    python benchmarks/offload.py --show               measure nothing, print what is kept
    python benchmarks/offload.py --write-docs         figures and pictures of docs/explanation/offload.md

One rank; trainings with each setting live at once and take turns, and a round gives the ratio of each to the one with
everything here.  The pictures are of two real steps, with a store that is slowed down to what a device's bus may be.
What is measured is kept in benchmarks/results/offload.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import mpitrain  # noqa: F401 - before NumPy, as a training script that follows the documents has it (mpitrain/blas.py)

# isort: split
import machine
import numpy as np
import offload_page as page

from mpitrain.backend import Array
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World, world
from mpitrain.data.tokens import Batch
from mpitrain.debug.timeline import Stopwatch
from mpitrain.events import listen
from mpitrain.memory.home import Home
from mpitrain.memory.io_thread import IoThread
from mpitrain.memory.media import HostMemory
from mpitrain.memory.offload import Offload, region_of
from mpitrain.memory.store import MemoryStore, open_store
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import AdamW
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete
from mpitrain.pipeline.picture import svg
from mpitrain.pipeline.simulate import Timeline

RESULT = machine.RESULTS / "offload.json"
SIZES = GPTConfig(vocab=256, layers=4, width=256, heads=4, seq_len=128)
ROWS, MICROS, SLOT = 16, 4, 2**26
STEPS = 2  # of a turn
SHARE = 0.5  # of the time of a forward pass, which the copy of what it saves takes in the pictures
LOOKS = 5  # steps, of which the fastest is drawn


@contextmanager
def training(what: str, place: str, prefetch: int, schedule: str = "1f1b") -> Iterator[tuple[Executor, World]]:
    """A training of one rank with some of "oap" (optimizer, activations, parameters) at a place."""
    mesh = Mesh(world())
    with tempfile.TemporaryDirectory() as folder:
        where = "host" if place == "host" else f"hdf5:{folder}"
        home = Home(
            lambda regions: open_store(where, regions, like=np.empty(0)),
            kinds=AdamW.kinds if "o" in what else (),
            others=[region_of(MICROS, SLOT)] if "a" in what else (),
        )
        parameters = {"zero": 3, "home": home, "prefetch": prefetch} if "p" in what else {}
        model = GPT(SIZES, mesh, seed=1, **parameters)
        if what and not parameters:
            home.take_in(model.flats)
        state = {"keep": home.keep, "ahead": prefetch} if "o" in what else {}
        optimizer = AdamW(model.shares(), lr=1e-3, window=2**18, **state)
        policy = None
        if "a" in what:
            policy = Offload(home.store, slots=MICROS, slot_bytes=SLOT, group=2**21, distance=prefetch)
        rows = complete(schedule, ranks=1, microbatches=MICROS, offload=prefetch if "a" in what else None)
        yield Executor(model, optimizer, mesh, rows, policy=policy), mesh.world
        home.close()


def step(executor: Executor, number: int) -> float:
    """Seconds of one."""
    random = np.random.default_rng(number)
    tokens = random.integers(0, SIZES.vocab, (ROWS, SIZES.seq_len + 1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], np.arange(ROWS), np.arange(SIZES.seq_len), number)
    began = time.perf_counter()
    executor.step(batch)
    return time.perf_counter() - began


def times(rounds: int) -> dict[str, list[float]]:
    """By name the seconds of a step in each round, the best of a turn."""
    with ExitStack() as stack:
        settings = {page.HERE: ("", "host", 1)}
        for place in page.PLACES:
            for what in page.WHAT:
                for prefetch in (0, 1):
                    settings[page.name(what, place, prefetch)] = (what, place, prefetch)
        executors = {name: stack.enter_context(training(*how))[0] for name, how in settings.items()}
        for executor in executors.values():
            step(executor, 0)
            step(executor, 1)
        found: dict[str, list[float]] = {name: [] for name in executors}
        for turn in range(rounds):
            for name, executor in executors.items():
                found[name].append(min(step(executor, 2 + turn * STEPS + n) for n in range(STEPS)))
        return found


class Slowed(HostMemory):
    """Memory that is reached at so many bytes a second, as a disk or a bus that is not much faster than the rank."""

    rate = float("inf")

    def read(self, region: str, offset: int, into: Array) -> None:
        time.sleep(into.nbytes / self.rate)
        super().read(region, offset, into)

    def write(self, region: str, offset: int, data: Array) -> None:
        time.sleep(data.nbytes / self.rate)
        super().write(region, offset, data)


def pictures() -> list[str]:
    """Two real steps of four micro-batches, fetched when needed and one ahead, from a store of a chosen speed.

    What a pass saves takes as long to move as SHARE of its forward.
    """
    mesh, drawn = Mesh(world()), []
    with training("", "host", 1, "gpipe") as (executor, _):
        forward = _measured(executor, mesh.world).seconds["F"] / MICROS
    for prefetch in (0, 1):
        regions = [region_of(MICROS, SLOT)]
        medium, io = Slowed(regions), IoThread()
        store = MemoryStore(regions, medium, io, np.empty(0))
        policy = Offload(store, slots=MICROS, slot_bytes=SLOT, group=2**22, distance=prefetch)
        rows = complete("gpipe", ranks=1, microbatches=MICROS, offload=prefetch)
        model = GPT(SIZES, mesh, seed=1)
        executor = Executor(model, AdamW(model.parameters()), mesh, rows, policy=policy)
        step(executor, 0)
        medium.rate = store.moved.written / (MICROS * SHARE * forward)
        found = _measured(executor, mesh.world)
        title = "fetched when it is needed" if prefetch == 0 else "fetched one ahead"
        drawn.append(svg(found.timeline, f"Saved values elsewhere, {title}: a step as it was, in ms"))
        store.close()
    return drawn


class Look(NamedTuple):
    """A step: what its actions took, and its timeline."""

    seconds: dict[str, float]
    timeline: Timeline


def _measured(executor: Executor, ranks: World) -> Look:
    """The fastest of some steps."""
    watch = Stopwatch(keep=LOOKS + 1)
    step(executor, 0)
    with listen(watch):
        for number in range(LOOKS + 1):  # the last one tells what was moved for the one before
            step(executor, number)
    found = [watch.gather(ranks, number) for number in range(LOOKS)]
    best = min(found, key=lambda measured: measured.makespan)
    seconds = {"F": sum(s.stop - s.start for s in best.spans[0] if s.action.kind == "F") / 1e3}
    return Look(seconds, best.timeline)


def main() -> int:
    """Measure, keep, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="of times (default 9)")
    parser.add_argument("--result", type=Path, default=RESULT, help=f"where figures are kept (default {RESULT})")
    parser.add_argument("--show", action="store_true", help="print what is kept and measure nothing")
    parser.add_argument("--write-docs", action="store_true", help="write the page's figures and pictures")
    options = parser.parse_args()
    if not (options.show or options.write_docs):
        about = machine.describe()
        print(machine.headline(about), flush=True)
        found = {"about": about, "seconds": times(options.rounds), "pictures": pictures()}
        options.result.parent.mkdir(parents=True, exist_ok=True)
        options.result.write_text(json.dumps(found, indent=1))
    result = json.loads((options.result if options.result.exists() else page.KEPT).read_text())
    print("\n".join(page.lines(result)))
    for path in page.write(result) if options.write_docs else ():
        print(f"written {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
