"""docs/explanation/zero.md shows the kept figures, and what was measured is what the formulas say."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import zero
import zero_page as page

from mpitrain.assemble import sizes_of
from mpitrain.config import parse
from mpitrain.plan.memory import gathered, model_state
from mpitrain.plan.traffic import Step, traffic

KEPT = json.loads(page.KEPT.read_text())
SIZES = sizes_of(parse([]), zero.VOCAB)


def test_the_committed_page_and_picture_are_what_the_committed_figures_give():
    for path, text in page.files(KEPT).items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python benchmarks/zero.py --write-docs"


@pytest.mark.parametrize("stage", page.STAGES)
def test_state_that_was_measured_is_that_of_the_formula_to_the_byte(stage):
    for ranks in page.RANKS:
        steps = [Step(SIZES, zero.BATCH, dp=ranks, dp_rank=rank, zero=stage) for rank in range(ranks)]
        assert page.state(KEPT, ranks, stage) == max(sum(model_state(step)) for step in steps)
        assert KEPT["bytes"][page.name(ranks, stage)]["gathered"] == (gathered(steps[0]) if ranks > 1 else 0)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", page.STAGES)
def test_bytes_that_were_sent_are_those_of_the_formula(stage, microbatches):
    step = Step(SIZES, zero.BATCH, microbatches, dp=page.SENT_ON, zero=stage)
    found = KEPT["bytes"][page.name(page.SENT_ON, stage, microbatches)]["sent"]
    assert found == traffic(step).total()


def test_times_are_ratios_of_a_round():
    rounds = {"zero 0": [10.0, 20.0, 40.0], "zero 1": [11.0, 20.0, 80.0]}
    result = {"times": {"S": {"rounds": {n: [{"ms_per_step": ms} for ms in each] for n, each in rounds.items()}}}}
    assert page.ratios(result, "S") == {"zero 1": [1.1, 1.0, 2.0]}
    assert "| S | 20.0 ms | **1.10** (1.00 to 2.00) |" in page.parts(result)["time"]
    assert page.lines(result) == ["S: zero 1 1.100 of zero 0"]


def test_a_small_measurement_of_bytes():
    found = zero.bytes_of(2, 3, 2)
    assert set(found["state"]) == {"weights", "gradients", "optimizer state"}
    assert sum(found["state"].values()) == page.state(KEPT, 2, 3)
    assert 0 < found["gathered"] <= 4 * SIZES.num_parameters
    assert found["whole"] > 0
