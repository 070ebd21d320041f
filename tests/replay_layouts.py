"""Record a training on every layout with every feature, and run its ranks again alone: the same bits, every time.

    PYTHONPATH=.:tests python tests/replay_layouts.py                       all features on all layouts
    PYTHONPATH=.:tests python tests/replay_layouts.py --only 'ZeRO'         features whose names begin so
    PYTHONPATH=.:tests python tests/replay_layouts.py --layouts dp2 pp2tp2
    PYTHONPATH=.:tests python tests/replay_layouts.py --seconds 600         as many as that allows
    PYTHONPATH=.:tests python tests/replay_layouts.py --first 100           go on after the first 100 of these

Each pair is recorded whole, and with a range of its steps alone.  Of a recording the last rank, and one that is drawn,
are run again.  The replay compares all that they send and, after each step, sums of all that they hold;
here the tensors themselves are compared with those of the recorded run, taken from the parts that train, and for a
whole recording every line of the metrics.  Features are those of resume_points.py without their layouts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import random
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kept_state import SHORT, Watch, metrics
from resume_points import FEATURES

from mpitrain.comm.local import LocalWorld
from mpitrain.errors import ConfigError, MeshError, ScheduleError, ShapeError, UserError
from mpitrain.optim.scaler import BlockScaler
from mpitrain.pipeline.executor import Executor
from mpitrain.recording.reading import RankReader
from mpitrain.replay.run import replay, trainer, without
from mpitrain.train import main

STEPS, RANGE = 8, (4, 6)
COMMON = (
    "--model gpt-tiny --layers 2 --width 16 --heads 4 --seq-len 8 --batch 24 --lr 0.003 --sample-length 0 "
    f"--eval-every 3 --steps {STEPS} --check-replicas 2"
).split()
AXES = ("--pp", "--dp", "--cp", "--tp", "--ep")
LAYOUTS = {
    "dp2": "--dp 2",
    "dp3": "--dp 3",
    "tp2": "--tp 2",
    "cp2": "--cp 2",
    "pp2": "--pp 2",
    "dp2ep2": "--dp 2 --ep 2",
    "dp4": "--dp 4",
    "dp2tp2": "--dp 2 --tp 2",
    "dp2cp2": "--dp 2 --cp 2",
    "pp2dp2": "--pp 2 --dp 2",
    "pp2tp2": "--pp 2 --tp 2",
    "pp2cp2": "--pp 2 --cp 2",
    "tp4": "--tp 4",
    "dp4ep2": "--dp 4 --ep 2",
    "dp3tp2": "--dp 3 --tp 2",
    "pp2dp2tp2": "--pp 2 --dp 2 --tp 2",
    "dp2cp2tp2": "--dp 2 --cp 2 --tp 2",
}


def pairs() -> Iterator[tuple[str, str]]:
    """Feature and layout."""
    for feature, layout in itertools.product(FEATURES, LAYOUTS):
        if "ep" not in layout or "--experts" in FEATURES[feature].flags:
            yield feature, layout


class Refused(Exception):
    """A feature that does not go together with a layout; by the library's own word."""


def flags_of(feature: str, layout: str, folder: Path) -> tuple[int, list[str]]:
    """Number of ranks and the command line."""
    own = without(FEATURES[feature].flags.replace("{disk}", str(folder / "disk")).split(), AXES)
    axes = LAYOUTS[layout].split()
    sizes = dict(zip(axes[::2], map(int, axes[1::2]), strict=True))
    ranks = 1
    for axis, size in sizes.items():
        ranks *= size if axis != "--ep" else 1
    cut = sizes.get("--pp", 1) > 1 and "--microbatches" not in own and "pipedream" not in own
    few = ["--microbatches", "2"] if cut else []
    return ranks, [*COMMON, *own, *few, *axes, "--data", str(folder / "text")]


def trained(feature: str, ranks: int, words: Sequence[str], only: Sequence[int]) -> Watch:
    """Run the trainer on ranks that are threads."""
    with watched(feature, only) as watch, contextlib.redirect_stdout(io.StringIO()):
        LocalWorld(ranks, timeout=60).run(main, [*words])
    return watch


@contextlib.contextmanager
def watched(feature: str, only: Sequence[int], parts: bool = False) -> Iterator[Watch]:
    """Whatever trains in the block; its scales begin as the feature wants them."""
    scale = FEATURES[feature].scale

    def built(executor: Executor) -> None:
        if scale:
            assert isinstance(executor.scaler, BlockScaler)
            executor.scaler.scales[:] = [scale] * len(executor.scaler.scales)

    with Watch(only=only, before=built, parts=parts) as watch:
        yield watch


def again(feature: str, folder: Path, rank: int, recorded: Watch, last: int, place: Path) -> int:
    """Run a rank again, and compare what it holds at the end; how many messages it sent.

    Raises:
        AssertionError, UserError: something differs.
    """
    reader = RankReader(folder, rank)
    with watched(feature, (last,), parts=True) as watch, contextlib.redirect_stdout(io.StringIO()):
        outcome = replay(reader, trainer(reader, place), place)
    assert outcome.steps, "no step was made again"
    if last in recorded.states and last in watch.states:
        assert watch.states[last].check_against(recorded.states[last].tensors), "nothing to compare"
        assert watch.states[last].numbers == recorded.states[last].numbers, "counts differ"
    return outcome.compared


def judge(feature: str, layout: str, draw: random.Random) -> tuple[int, int]:
    """Replays of a pair that were the same, and messages that were compared.

    Raises:
        Refused: the two do not go together.
    """
    replays = compared = 0
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").write_text(SHORT)
        ranks, words = flags_of(feature, layout, folder)
        for kind, more in (("whole", []), ("range", ["--record-steps", "{}:{}".format(*RANGE)])):
            place = folder / kind
            run = ["--run", str(folder / f"run-{kind}"), "--record", str(place), *more]
            try:
                recorded = trained(feature, ranks, [*words, *run], (STEPS, RANGE[1]))
            except (ConfigError, MeshError, ScheduleError, ShapeError) as error:
                raise Refused(str(error).splitlines()[0]) from None
            last = STEPS if kind == "whole" else RANGE[1]
            for rank in sorted({ranks - 1, draw.randrange(ranks)}):
                writes = folder / f"again-{kind}-{rank}"
                writes.mkdir()
                compared += again(feature, place, rank, recorded, last, writes)
                replays += 1
                lines = folder / f"run-{kind}" / "metrics.jsonl"
                if kind == "whole" and (writes / "run" / "metrics.jsonl").exists():
                    assert metrics(writes / "run") == metrics(lines.parent), "metrics differ"
    return replays, compared


def _command() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", default=[], help="features whose names begin so")
    parser.add_argument("--layouts", nargs="*", default=[], choices=LAYOUTS)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="leave the first N pairs out")
    asked: Any = parser.parse_args()
    wanted = [
        (feature, layout)
        for feature, layout in pairs()
        if feature.startswith(tuple(asked.only) or "") and (not asked.layouts or layout in asked.layouts)
    ]
    random.Random(0).shuffle(wanted)
    wanted = wanted[asked.first :]
    began, good, bad, refused, replays, compared = time.perf_counter(), 0, 0, 0, 0, 0
    for feature, layout in wanted:
        if time.perf_counter() - began > asked.seconds:
            break
        try:
            more = judge(feature, layout, random.Random(zlib.crc32(f"{feature} {layout}".encode())))
        except Refused as error:
            refused += 1
            print(f"{feature} on {layout}: refused: {error}", flush=True)
            continue
        except (UserError, AssertionError) as error:
            bad += 1
            print(f"{feature} on {layout}: {type(error).__name__}: {error}", flush=True)
            continue
        good, replays, compared = good + 1, replays + more[0], compared + more[1]
    print(
        f"{good} of {good + bad} pairs of features and layouts the same, bit by bit: {replays} ranks run again,"
        f" {compared:,} messages compared; {refused} refused, {len(wanted) - good - bad - refused} not tried (--first"
        f" {asked.first + good + bad + refused});"
        f" {time.perf_counter() - began:.0f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    sys.exit(_command())
