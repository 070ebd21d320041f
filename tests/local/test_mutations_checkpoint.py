"""Saving and going on do what they must, and bugs of checkpoints are found: each by the oracle that it names.

An oracle is a pair of layouts (resume_layouts.py), a stop (resume_points.py), or a look at what a file holds.  What it
compares with is made before a bug is put on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the mutations are
from kept_state import SHORT, Watch
from mutations_checkpoint import OF_CHECKPOINTS, OfCheckpoint
from resume_damaged import after_damage
from resume_layouts import Matrix
from resume_points import STEPS, Runs

from mpitrain.comm.local import LocalWorld
from mpitrain.errors import UserError
from mpitrain.train import main

Oracle = Callable[[Path], Callable[[], list[str]]]
"""(folder) -> what looks, once everything that it compares with is there; what it finds wrong."""


def pair(model: str, dtype: str, saves: str, loads: str) -> Oracle:
    def prepare(folder: Path) -> Callable[[], list[str]]:
        matrix = Matrix(folder, model, dtype)
        return lambda: matrix.pair(saves, loads)

    return prepare


def there_and_back(model: str, dtype: str, one: str, other: str) -> Oracle:
    def prepare(folder: Path) -> Callable[[], list[str]]:
        matrix = Matrix(folder, model, dtype)
        return lambda: matrix.pair(one, other) + matrix.pair(other, one)

    return prepare


def stop(feature: str, step: int) -> Oracle:
    def prepare(folder: Path) -> Callable[[], list[str]]:
        runs = Runs(folder, feature)
        runs.whole(step if runs.feature.drains else STEPS)
        return lambda: runs.stop(step)

    return prepare


def background(feature: str, step: int) -> Oracle:
    return lambda folder: functools.partial(Runs(folder, feature).background, step)


def workers(folder: Path) -> Callable[[], list[str]]:
    """Two workers have learned apart: their weights are averaged, and without them the first one's moments go on."""
    text = folder / "text"
    text.write_text(SHORT)
    words = "--model gpt-tiny --layers 1 --width 16 --seq-len 8 --batch 12 --lr 0.01 --steps 8 --deterministic".split()
    words += ["--eval-every", "0", "--sample-length", "0", "--data", str(text)]
    with Watch(only=[4]) as watch:
        local = ["--reducer", "local", "--local-steps", "4", "--save-every", "4"]
        LocalWorld(2).run(main, [*words, *local, "--run", str(folder / "whole")])
    kept = watch.states[4].tensors

    def look() -> list[str]:
        with Watch(only=[]):
            LocalWorld(2).run(main, [*words, *local, "--run", str(folder / "run"), "--stop-after", "4"])
        with Watch(only=[4]) as alone:
            flat = ["--reducer", "flat", "--save-every", "0", "--resume", "latest"]
            LocalWorld(1).run(main, [*words, *flat, "--run", str(folder / "run")])
        found = alone.states[4].tensors
        wrong = [n for n in found if n.startswith("weight/") and not np.array_equal(found[n], kept[n])]
        for kind in ("first_moment", "second_moment"):
            names = [name for name in found if name.startswith(f"{kind}/")]
            wrong += [name for name in names if not np.array_equal(found[name], kept[f"worker_{name}"][0])]
        return wrong

    return look


ORACLES: dict[str, Oracle] = {
    "one rank to dp3": pair("dense", "float64", "one rank", "dp3"),
    "dp3 to one rank": pair("dense", "float64", "dp3", "one rank"),
    "dp3 to one rank and back": there_and_back("dense", "float64", "dp3", "one rank"),
    "one rank to dp3 ZeRO 3": pair("dense", "float64", "one rank", "dp3, ZeRO 3"),
    "tp3 to one rank": pair("dense", "float64", "tp3, words that do not divide", "one rank"),
    "pp2 to one rank": pair("dense", "float64", "pp2", "one rank"),
    "one rank to pp2": pair("dense", "float64", "one rank", "pp2"),
    "experts to ep2": pair("experts", "float64", "one rank", "ep2"),
    "float16 to one rank": pair("dense", "float32", "dp3, float16", "one rank"),
    "stop of float16": stop("float16, skipped steps", 16),
    "stop of dropout": stop("dropout", 4),
    "stop in the third epoch": stop("dropout", 17),
    "stop of branches": stop("scales of branches", 5),
    "stop of PowerSGD": stop("PowerSGD", 6),
    "stop of stale": stop("stale", 9),
    "stop of workers": stop("local", 4),
    "stop of offload": stop("offload", 3),
    "background": background("dropout", 4),
    "workers to one rank": workers,
    "damaged, stale workers": lambda folder: functools.partial(after_damage, folder, "stale workers"),
    "damaged, local": lambda folder: functools.partial(after_damage, folder, "local"),
}


@pytest.mark.slow
@pytest.mark.parametrize("oracle", ORACLES)
def test_a_run_is_saved_and_goes_on_as_it_must(tmp_path: Path, oracle: str) -> None:
    assert ORACLES[oracle](tmp_path)() == []


@pytest.mark.slow
@pytest.mark.parametrize("mutation", OF_CHECKPOINTS, ids=lambda mutation: mutation.name)
def test_a_known_bug_of_checkpoints_is_found(tmp_path: Path, mutation: OfCheckpoint) -> None:
    look = ORACLES[mutation.oracle](tmp_path)
    try:
        with mutation.patch():
            wrong = look()
    except (UserError, AssertionError, ValueError, IndexError) as error:
        wrong = [str(error)]
    assert wrong, "nothing was found"


def test_every_oracle_has_a_bug_to_find() -> None:
    assert {mutation.oracle for mutation in OF_CHECKPOINTS} == set(ORACLES)
    assert len({mutation.name for mutation in OF_CHECKPOINTS}) == len(OF_CHECKPOINTS) >= 30
