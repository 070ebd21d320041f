"""A run that stops and goes on in the same layout is the run that did not: some stops here, all by resume_points.py.

And whatever training changes in a run is either saved or without meaning for what comes: it is made useless before a
checkpoint is read, and the run must not notice.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the table is
from kept_state import metrics
from resume_points import FEATURES, STEPS, Runs, is_refused, stops

FEW = {"float16, skipped steps": 16, "PowerSGD": 5, "stale": 6}
"""A stop of those that remember most, in the default run."""


@pytest.mark.parametrize(("name", "step"), FEW.items(), ids=str)
def test_a_run_that_stops_is_the_same_run(tmp_path, name, step):
    """T29.4, and nothing is needed of what the first start had in memory."""
    assert Runs(tmp_path, name).stop(step) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_a_run_may_stop_anywhere(tmp_path, name):
    """After its first step, at the end of an epoch, before its last step; all 19 are what the command looks at."""
    runs = Runs(tmp_path, name)
    some = [step for step in (1, 8, 13, 18, 19) if step in stops(name)]
    assert {step: wrong for step in some if (wrong := runs.stop(step))} == {}


def test_where_workers_have_parted_there_is_no_stop(tmp_path):
    assert is_refused(tmp_path, "local", 3)


@pytest.mark.slow
def test_a_run_of_float16_skips_steps_before_and_after_stops(tmp_path):
    runs = Runs(tmp_path, "float16, skipped steps")
    runs.whole(STEPS)
    skipped = [line["step"] for line in metrics(tmp_path / f"whole-{STEPS}") if line["skipped"]]
    assert 4 <= len(skipped) <= 16
    assert skipped[0] < 5 < 15 < skipped[-1]
