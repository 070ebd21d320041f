"""Kill a training at every point of its saves, and look whether a complete checkpoint is left.

    PYTHONPATH=.:tests python tests/local/kill_points.py                every point of every scene, 500 random moments
    PYTHONPATH=.:tests python tests/local/kill_points.py --scene background --random 0
    PYTHONPATH=.:tests python tests/local/kill_points.py --every 10     each tenth point

The trainer itself runs, in a forked child (tests/crash/training.py): two stages, two data parallel ranks, ZeRO-1.  A
point is the beginning of a disk operation or of a message of one rank, from the update before the first save to the
end.  At each, SIGKILL.  Then: every checkpoint that is shown loads; it is one of the undisturbed run, bit for bit,
never a mix of two steps; and there is one not older than those that were there before.  Some of the runs go on to the
end, where they must have come to the same weights, with nothing left over on the disk.

Exit code: 0 if nothing is lost, damaged or left over.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from crash.child import Ended, in_child
from crash.points import Points, Strike, kill, on_rank
from crash.training import RANKS, SCENES, STEPS, Reference, Scene, kept_later_steps

MANY_SAVES = Scene("random moments", (1, 2), "latest", STEPS, ("--keep", "2"))
IN_BACKGROUND = Scene("random moments, in the background", (1, 2), "latest", STEPS, ("--keep", "2", "--async-save"))


@dataclass
class Tally:
    """What was found at a number of points.

    Attributes:
        killed: trainings that were killed; the others ended before the point was reached.
        ended: that were not.
        went_on: that were let go on to the end.
        newest: step of the newest checkpoint that loads -> how often.
        lost, damaged, wrong: what must not be: no complete checkpoint, one that is shown and is none, another end.
    """

    killed: int = 0
    ended: int = 0
    went_on: int = 0
    newest: dict[int | None, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def troubles(self) -> list[str]:
        """All that must not be."""
        return self.lost + self.damaged + self.wrong


def points_of(reference: Reference, scene: Scene) -> list[list[tuple[str, str]]]:
    """Of each rank, the points that a training passes which nobody disturbs."""
    listeners = [Points() for _ in range(RANKS)]
    with _run(reference) as run, kept_later_steps():
        flags = reference.prepare(scene, run)
        reference.train(run, *flags, listener=lambda world: listeners[world.rank])
        verdict = reference.judge(run, scene, scene.stop)
        assert verdict.lost == "", verdict
        assert verdict.damaged == [], verdict
    return [listener.passed for listener in listeners]


def kill_at(reference: Reference, scene: Scene, rank: int, number: int, tally: Tally, go_on: bool) -> None:
    """Kill a training at one point, and judge what is left."""
    strike = Strike(number, kill)
    with _run(reference) as run, kept_later_steps():
        flags = reference.prepare(scene, run)
        ended = in_child(lambda: reference.train(run, *flags, listener=on_rank(rank, strike)))
        _judge(reference, scene, run, ended, f"{scene.name}: rank {rank}, point {number}", tally, go_on)


def kill_after(reference: Reference, scene: Scene, seconds: float, tally: Tally, go_on: bool) -> None:
    """Kill a training after some time, and judge what is left."""
    with _run(reference) as run:
        flags = reference.prepare(scene, run)
        ended = in_child(lambda: reference.train(run, *flags), seconds)
        _judge(reference, scene, run, ended, f"{scene.name}: after {seconds:.6f} s", tally, go_on)


def _judge(reference: Reference, scene: Scene, run: Path, ended: Ended, where: str, tally: Tally, go_on: bool) -> None:
    tally.killed += ended.killed
    tally.ended += ended.code == 0
    if not ended.killed and ended.code != 0:
        tally.wrong.append(f"{where}: exit code {ended.code}: {ended.last_words}")
    verdict = reference.judge(run, scene, scene.stop if ended.code == 0 else None)
    tally.newest[verdict.step] = tally.newest.get(verdict.step, 0) + 1
    if verdict.lost:
        tally.lost.append(f"{where}: {verdict.lost}")
    tally.damaged += [f"{where}: {text}" for text in verdict.damaged]
    if go_on:
        tally.went_on += 1
        ended = in_child(lambda: reference.go_on(run, scene))
        if ended.code != 0:
            tally.wrong.append(f"{where}: it did not go on as it should: {ended.last_words}")


@contextlib.contextmanager
def _run(reference: Reference) -> Iterator[Path]:
    """A folder of a run, which is gone afterwards."""
    run = Path(tempfile.mkdtemp(prefix="run-", dir=reference.folder)) / "run"
    try:
        yield run
    finally:
        shutil.rmtree(run.parent, ignore_errors=True)


def seconds_of(reference: Reference, scene: Scene) -> float:
    """How long a training takes that nobody disturbs."""
    with _run(reference) as run:
        flags = reference.prepare(scene, run)
        return in_child(lambda: reference.train(run, *flags)).seconds


def tell(name: str, count: int, tally: Tally, seconds: float) -> None:
    newest = ", ".join(f"{step}: {times}" for step, times in sorted(tally.newest.items(), key=str))
    print(
        f"{name:36}{count:8}{tally.killed:8}{len(tally.lost):6}{len(tally.damaged):9}{tally.went_on:9}{len(tally.wrong):7}"
        f"{seconds:8.0f} s  {newest}",
        flush=True,
    )
    for trouble in tally.troubles[:10]:
        print(f"    {trouble}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scene", default="", help="only those whose name holds this")
    parser.add_argument("--every", type=int, default=1, help="each so many-th point of a rank")
    parser.add_argument("--random", type=int, default=500, help="kills at random moments")
    parser.add_argument("--go-on", type=int, default=4, help="each so many-th run goes on to the end")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    options = parser.parse_args()
    troubles = kills = 0
    with tempfile.TemporaryDirectory() as folder:
        reference = Reference(Path(folder))
        heads = f"{'scene':36}{'points':>8}{'killed':>8}{'lost':>6}{'damaged':>9}{'went on':>9}{'wrong':>7}{'time':>10}"
        print(f"{heads}  newest step: how often")
        for scene in (scene for scene in SCENES.values() if options.scene in scene.name):
            began, tally = time.monotonic(), Tally()
            all_ = [(rank, n) for rank, of in enumerate(points_of(reference, scene)) for n in range(1, len(of) + 1)]
            for index, (rank, number) in enumerate(all_[:: options.every]):
                kill_at(reference, scene, rank, number, tally, index % options.go_on == 0)
            tell(scene.name, len(all_), tally, time.monotonic() - began)
            troubles, kills = troubles + len(tally.troubles), kills + tally.killed
        random_moments = random.Random(options.seed)
        for scene, count in ((MANY_SAVES, options.random // 2), (IN_BACKGROUND, options.random - options.random // 2)):
            if count:
                began, tally, lasts = time.monotonic(), Tally(), seconds_of(reference, scene)
                while tally.killed < count:  # others ended before
                    go_on = tally.killed % options.go_on == 0
                    kill_after(reference, scene, random_moments.uniform(0, lasts), tally, go_on)
                tell(scene.name, count, tally, time.monotonic() - began)
                troubles, kills = troubles + len(tally.troubles), kills + tally.killed
    print(f"\n{kills} kills, {troubles} troubles")
    sys.exit(troubles > 0)


if __name__ == "__main__":
    main()
