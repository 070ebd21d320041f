"""The whole trainer with its model on the device: what it writes, and that a stopped run goes on, on either backend."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain import assemble
from mpitrain.comm.local import LocalWorld
from mpitrain.models.families import build
from mpitrain.train import main

TEXT = "".join(f"{n} bottles of milk on the wall, {n} bottles of milk; take {n % 7} down.\n" for n in range(300))
FLAGS = (
    "--model gpt-tiny --layers 1 --width 16 --heads 2 --seq-len 16 --batch 12 --microbatches 2 --lr 0.01 --dropout 0.1"
    " --clip 0.5 --dtype float64 --deterministic --eval-every 2 --sample-length 12"
).split()


@pytest.fixture
def train(tmp_path, monkeypatch, numpy_kernels):
    """Train in `tmp_path/run`, on ranks that are threads, with the arrays of `xp`."""
    text = tmp_path / "text"
    text.write_text(TEXT)

    def on(xp: Any, run: str, *flags: str, ranks: int = 2) -> None:
        monkeypatch.setattr(assemble, "build", functools.partial(build, xp=xp))
        LocalWorld(ranks).run(main, [*FLAGS, "--data", str(text), "--run", str(tmp_path / run), *flags])

    return on


def metrics(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "tokens_per_s"} for record in records]


def digests(run: Path, step: int) -> list[str]:
    files = sorted((run / "checkpoints" / f"step-{step:08}").glob("*.h5"))
    assert files
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]


@pytest.mark.parametrize("reducer", ["flat", "bucketed"])
def test_a_run_has_the_curve_the_sample_and_the_checkpoint_of_numpy(cupy, train, tmp_path, reducer):
    how = ("--steps", "4", "--save-every", "4", "--reducer", reducer, "--bucket-mib", "0.01")
    train(cupy, "device", *how)
    train(np, "host", *how)
    assert metrics(tmp_path / "device") == metrics(tmp_path / "host")
    texts = [(tmp_path / run / "sample.txt").read_text() for run in ("device", "host")]
    assert texts[0] == texts[1]
    assert digests(tmp_path / "device", 4) == digests(tmp_path / "host", 4)


def test_stopping_and_going_on_gives_the_same_bits(cupy, train, tmp_path):
    train(cupy, "whole", "--steps", "5", "--save-every", "5")
    train(cupy, "parts", "--steps", "5", "--save-every", "5", "--stop-after", "3")
    train(cupy, "parts", "--steps", "5", "--save-every", "5", "--resume", "latest")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert digests(tmp_path / "parts", 5) == digests(tmp_path / "whole", 5)


def test_a_run_goes_on_where_there_is_no_device_and_back(cupy, train, tmp_path):
    train(np, "host", "--steps", "6", "--save-every", "6")
    train(cupy, "parts", "--steps", "6", "--stop-after", "2")
    train(np, "parts", "--steps", "6", "--stop-after", "4", "--resume", "latest")
    train(cupy, "parts", "--steps", "6", "--save-every", "6", "--resume", "latest")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "host")
    assert digests(tmp_path / "parts", 6) == digests(tmp_path / "host", 6)


def test_a_run_with_a_budget_times_some_steps_and_leaves_nothing_of_them(cupy, train, tmp_path):
    train(cupy, "run", "--budget", "1", "--optimizer", "sgd", ranks=1)
    train(np, "host", "--steps", str(len(metrics(tmp_path / "run"))), "--optimizer", "sgd", ranks=1)
    assert metrics(tmp_path / "run")[0] == metrics(tmp_path / "host")[0]
