"""docs/explanation/mixture-of-experts.md shows the kept figures, and they say what the page claims."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import experts
import experts_page as page


def record(step, load, dropped, **more):
    layer = {"load": load, "dropped": dropped, "held_back": 0, "entropy": 1.0}
    return {"step": step, "loss": 2.0, "balance_loss": 1.5, "routing": {"blocks.0.mlp": layer}, **more}


def run(*losses, **more):
    return {"val": [[100 * (i + 1), loss] for i, loss in enumerate(losses)], "parameters": 9, "routing": [], **more}


def test_the_committed_page_and_plots_are_what_the_committed_figures_give():
    kept = json.loads(page.KEPT.read_text())
    for path, text in page.files(kept).items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python benchmarks/experts.py --write-docs"


def test_eight_experts_ended_below_their_dense_twin_with_every_seed():
    kept = json.loads(page.KEPT.read_text())
    assert set(kept["runs"]) == set(experts.RUNS)
    found = page.gaps(kept)
    assert set(found) == set(experts.SEEDS)
    assert min(found.values()) > 0


def test_twins_do_the_same_operations_for_a_token_but_for_the_routers():
    kept = json.loads(page.KEPT.read_text())["runs"]
    dense, switch = kept["dense, seed 1"], kept["switch, seed 1"]
    layers, width, routers = 2, 64, 8
    assert switch["flops"] == dense["flops"] + 6 * layers * width * routers
    biases = layers * (4 * width + width)  # which experts do not have
    assert switch["active"] == dense["parameters"] + layers * width * routers - biases


def test_the_gap_is_positive_where_the_mixture_is_better():
    result = {"runs": {"dense, seed 2": run(3.0, 2.0), "switch, seed 2": run(3.5, 1.75), "dense, seed 3": run(1.0)}}
    assert page.gaps(result) == {2: 0.25}
    assert page.gaps(result, ", gpt-mini") == {}
    assert "seed 2 +0.2500" in page.lines(result)[-1]


def test_records_are_summed_up_in_windows():
    records = [record(1, [6, 2], 4), record(2, [4, 4], 0), record(3, [8, 0], 2, val_loss=1.25)]
    found = experts.of_records(records, window=2)
    assert (found["steps"], found["val"], found["loss"]) == (3, [[3, 1.25]], 2.0)
    first, last = found["routing"]
    assert (first["step"], first["dropped"], first["busiest"], first["least"]) == (2, 0.25, 1.25, 0.75)
    assert (last["step"], last["dropped"], last["busiest"], last["balance"]) == (3, 0.25, 2.0, 1.5)


def test_a_run_without_a_balance_loss_is_summed_up_too():
    records = [{name: value for name, value in record(1, [6, 2], 4).items() if name != "balance_loss"}]
    (only,) = experts.of_records(records)["routing"]
    assert only["balance"] == 0.0


def test_a_run_without_experts_has_no_routing():
    assert experts.of_records([{"step": 1, "loss": 1.0}])["routing"] == []


@pytest.mark.parametrize("name", experts.RUNS)
def test_each_run_is_one_that_can_be_started(name):
    config = experts.parse(experts.RUNS[name].split())
    assert (config.routing is None) == name.startswith("dense")
    assert config.batch * config.seq_len == 1024
