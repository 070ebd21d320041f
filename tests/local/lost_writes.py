"""Let the power fail at every moment of a save, with whatever was not synced lost or in disorder, and look what loads.

    PYTHONPATH=.:tests python tests/local/lost_writes.py                    every scene, 12 random states at each moment
    PYTHONPATH=.:tests python tests/local/lost_writes.py --scene over --states 100

The operations of a real training's saves are recorded once, with their data; for each moment, the states are made in
which a disk may then be found (tests/crash/disk_states.py), and judged as tests/local/kill_points.py judges: a complete
checkpoint loads, an old one or the new one, never a mix, and after the last operation the new one.  Some of the states
go on to the end, which also sweeps what was left over.

Exit code: 0 if nothing is lost or damaged.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from crash.child import in_child
from crash.disk_states import FATES, Disk, Fate, Operation, found_below, recorded
from crash.training import SCENES, Reference, Scene, kept_later_steps


def operations_of(reference: Reference, scene: Scene, run: Path) -> tuple[Disk, list[Operation]]:
    """Train a scene in `run`; the disk as it was before, and all that was done to it.

    Raises:
        AssertionError: something was written past the door, so that the record is not all there is.
    """
    flags = reference.prepare(scene, run)
    before, replayed = Disk(run), Disk(run)
    with recorded() as operations, kept_later_steps():
        reference.train(run, *flags)
    for operation in operations:
        replayed.do(operation)
    shown, found = (
        {path: data for path, data in of.items() if path.startswith("checkpoints")}
        for of in (replayed.shows(), found_below(run))
    )
    assert shown == found, sorted(path for path in shown.keys() | found.keys() if shown.get(path) != found.get(path))
    return before, operations


def fates(random_states: int, seed: int) -> Iterator[tuple[str, Fate]]:
    """What may become of what was not synced: everything alike, then each by chance."""
    yield from FATES.items()
    for number in range(random_states):
        yield f"chance {seed}.{number}", Fate(True, True, number % 2 == 0, random.Random(f"{seed}.{number}"))


class Finder:
    """Judges all states of one scene.

    Attributes:
        states: how many were judged.
        went_on: how many of them went on to the end.
        lost, damaged: what must not be.
    """

    def __init__(self, reference: Reference, scene: Scene) -> None:
        self.reference, self.scene = reference, scene
        self.states = self.went_on = 0
        self.lost: list[str] = []
        self.damaged: list[str] = []

    def run(self, random_states: int, go_on_every: int, last: int | None = None) -> None:
        """Record the scene, and judge what may be found after each of its operations.

        Args:
            random_states: how many states at each moment, besides those of `FATES`.
            go_on_every: each so many-th state goes on to the end; 0: none.
            last: only after so many operations at the end; None: after all.
        """
        with tempfile.TemporaryDirectory(dir=self.reference.folder) as folder:
            run = Path(folder) / "run"
            disk, operations = operations_of(self.reference, self.scene, run)
            shutil.rmtree(run)
            first = 0 if last is None else len(operations) - last
            for moment in range(len(operations) + 1):
                for name, fate in fates(random_states, moment) if moment >= first else ():
                    promised = self.scene.stop if moment == len(operations) else None
                    last = operations[moment - 1][:2] if moment else "the start"
                    self._judge(disk, run, fate, f"{self.scene.name}: {name}, after {last}", promised, go_on_every)
                if moment < len(operations):
                    disk.do(operations[moment])

    def _judge(self, disk: Disk, run: Path, fate: Fate, where: str, promised: int | None, go_on_every: int) -> None:
        disk.lay_out(run, fate)
        verdict = self.reference.judge(run, self.scene, promised)
        self.states += 1
        if verdict.lost:
            self.lost.append(f"{where}: {verdict.lost}")
        self.damaged += [f"{where}: {text}" for text in verdict.damaged]
        if go_on_every and self.states % go_on_every == 0:
            self.went_on += 1
            ended = in_child(lambda: self.reference.go_on(run, self.scene))
            if ended.code != 0:
                self.lost.append(f"{where}: it did not go on as it should: {ended.last_words}")
        shutil.rmtree(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scene", default="", help="only those whose name holds this")
    parser.add_argument(
        "--states", type=int, default=12, help="random states at each moment, besides five that are not"
    )
    parser.add_argument("--go-on", type=int, default=50, help="each so many-th state goes on to the end")
    options = parser.parse_args()
    states = troubles = 0
    print(f"{'scene':36}{'states':>8}{'lost':>6}{'damaged':>9}{'went on':>9}{'time':>10}")
    with tempfile.TemporaryDirectory() as folder:
        reference = Reference(Path(folder))
        for scene in (scene for scene in SCENES.values() if options.scene in scene.name):
            began, finder = time.monotonic(), Finder(reference, scene)
            finder.run(options.states, options.go_on)
            seconds = time.monotonic() - began
            print(
                f"{scene.name:36}{finder.states:8}{len(finder.lost):6}{len(finder.damaged):9}{finder.went_on:9}"
                f"{seconds:8.0f} s",
                flush=True,
            )
            for trouble in (finder.lost + finder.damaged)[:10]:
                print(f"    {trouble}", flush=True)
            states, troubles = states + finder.states, troubles + len(finder.lost) + len(finder.damaged)
    print(f"\n{states} states, {troubles} troubles")
    sys.exit(troubles > 0)


if __name__ == "__main__":
    main()
