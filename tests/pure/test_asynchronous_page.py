"""docs/explanation/asynchronous.md shows the kept figures, and they say what the page claims."""

import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import asynchronous
import asynchronous_page as page

from mpitrain.config import parse


def test_the_committed_page_and_plot_are_what_the_committed_figures_give():
    kept = json.loads(page.KEPT.read_text())
    for path, text in page.files(kept).items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python benchmarks/asynchronous.py --write-docs"


def test_every_scheme_ended_above_synchronous_training_with_every_seed():
    kept = json.loads(page.KEPT.read_text())
    assert set(kept["runs"]) == set(asynchronous.RUNS)
    gaps = page.worst_gaps(kept)
    assert len(gaps) == len(page.METHODS) * (len(page.SCHEMES) - 1)
    assert min(gaps.values()) > 0


def test_the_later_gradients_come_and_the_rarer_averages_are_the_worse_it_gets():
    kept = json.loads(page.KEPT.read_text())
    for method in page.METHODS:
        for schemes in (("synchronous", "K=1", "K=3", "K=7"), ("synchronous", "H=4", "H=16", "H=64")):
            means = [sum(page.finals(kept, method, scheme)) / 3 for scheme in schemes]
            assert means == sorted(means), (method, schemes, means)


def test_late_gradients_are_worse_at_the_best_of_their_rates_too():
    kept = json.loads(page.KEPT.read_text())
    for momentum in asynchronous.RATES:
        best = [min(loss for _, loss in page.best_of_rates(kept, momentum, delay)) for delay in asynchronous.LATE]
        assert best == sorted(best)


def test_limits_that_were_found_are_those_of_the_formula():
    kept = json.loads(page.KEPT.read_text())["bowl"]["limits"]
    for momentum, found in kept.items():
        for delay, rate in found:
            assert rate == pytest.approx(page.stability(delay, float(momentum)), rel=0.06)


@pytest.mark.parametrize(("delay", "limit"), [(0, 2.0), (1, 1.0), (2, 0.618), (3, 0.445)])
def test_the_limit_without_momentum(delay, limit):
    """T5.1, from the formula and from the roots."""
    assert page.stability(delay, 0.0) == pytest.approx(limit, abs=5e-4)
    assert page.stability(delay, 1e-12) == pytest.approx(page.stability(delay, 0.0), rel=1e-6)


def test_the_limit_with_momentum():
    assert page.stability(0, 0.9) == pytest.approx(2 * 1.9)
    assert page.stability(1, 0.9) == pytest.approx(1 - 0.9)


def test_a_run_that_broke_is_infinitely_worse():
    runs = {f"adamw, {scheme}, seed {seed}": {"val": 2.0} for scheme in ("synchronous", "K=1") for seed in page.SEEDS}
    runs["adamw, K=1, seed 2"] = {"val": None}
    assert page.finals({"runs": runs}, "adamw", "K=1") == [2.0, math.inf, 2.0]
    assert page.worst_gaps({"runs": runs}) == {"adamw, K=1": 0.0}


@pytest.mark.parametrize("name", asynchronous.RUNS)
def test_each_run_is_one_that_can_be_started(name):
    config = parse(asynchronous.RUNS[name].split())
    assert config.batch * config.seq_len == 512
    assert asynchronous.ranks_of(asynchronous.RUNS[name]) == (4 if "H=" in name or "workers" in name else 1)
