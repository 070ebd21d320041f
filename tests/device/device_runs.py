"""A run of the trainer by its command line, on the CPU and on the stand-in for a GPU, and what the two left behind."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from mpitrain.comm.local import LocalWorld
from mpitrain.train import main

LINE = "{0} bottles of milk on the wall, {0} bottles of milk; take {1} down.\n"
SETTINGS = (
    "--model gpt-tiny --layers 2 --width 16 --heads 2 --seq-len 16 --batch 8 --microbatches 2 --dtype float64 --lr 0.01"
    " --clip 0.5 --deterministic --eval-every 2 --sample-length 6 --steps 2 --save-every 2"
)
"""Of every run, unless its own flags say otherwise."""
OF_ONE_RUN = ("tokens_per_s", "device_memory_bytes", "memory_peak_bytes")


class Runs:
    """Runs in one folder, on the same text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "text").mkdir()
        for number in range(6):  # of several lengths, for --pack
            lines = (LINE.format(n, n % 7) for n in range(50 * number, 50 * number + 20 * (number + 1)))
            (folder / "text" / f"{number}.txt").write_text("".join(lines))

    def train(self, device: str, flags: str, ranks: int, run: str | None = None) -> Path:
        """Train on ranks that are threads; flags win over those of `SETTINGS`."""
        path = self.folder / (run or device)
        words = f"{SETTINGS} {flags} --device {device}".replace("STORE", str(self.folder / f"store-{device}"))
        LocalWorld(ranks).run(
            main, _last_of_each([*words.split(), "--data", str(self.folder / "text"), "--run", str(path)])
        )
        return path

    def both(self, flags: str, ranks: int) -> tuple[Path, Path]:
        """The run on the stand-in, and the one on the CPU."""
        return self.train("cuda", flags, ranks), self.train("cpu", flags, ranks)


def _last_of_each(words: list[str]) -> list[str]:
    """A command line that gives each option once: the last value counts.  A budget is in the place of steps."""
    given: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            given.pop(word, None)
            given[word] = [word]
            last = word
        else:
            given[last].append(word)
    if "--budget" in given:
        del given["--steps"]
    return [word for option in given.values() for word in option]


def metrics(run: Path) -> list[dict[str, Any]]:
    """What each step measured, without what differs between two runs of the same."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in OF_ONE_RUN} for record in records]


def digests(run: Path) -> list[str]:
    """Sums of the files of the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step-*"))
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(newest.glob("*.h5"))]


def assert_same_bits(mine: Path, theirs: Path) -> None:
    """Curve, sample and checkpoint of two runs."""
    assert metrics(mine) == metrics(theirs)
    assert (mine / "sample.txt").read_text() == (theirs / "sample.txt").read_text()
    assert digests(mine) == digests(theirs) != []


def assert_same_curve(mine: Path, theirs: Path, bound: float) -> None:
    """Losses and norms of two runs whose kernels round elsewhere."""
    for here, there in zip(metrics(mine), metrics(theirs), strict=True):
        assert here.keys() == there.keys()
        for name in here.keys() & {"loss", "grad_norm", "val_loss"}:
            assert here[name] == pytest.approx(there[name], rel=bound), name
