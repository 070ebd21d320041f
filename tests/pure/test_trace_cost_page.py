"""docs/how-to/trace-a-run.md shows the kept figures of what a trace costs, and they are below the bar."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import trace_page as page

ROUNDS = {"off": {"seconds": [1.0, 1.0], "cpu": [4.0, 4.0]}, "on": {"seconds": [1.01, 1.03], "cpu": [4.0, 4.2]}}


def test_the_committed_page_is_what_the_committed_figures_give():
    for path, text in page.files(json.loads(page.KEPT.read_text())).items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python benchmarks/trace_cost.py --write-docs"


def test_the_committed_figures_are_below_three_percent():
    assert page.reaches(json.loads(page.KEPT.read_text()))


def test_costs_are_means_of_rounds_with_their_errors():
    found = {**ROUNDS, "bytes": 1200.0}
    assert page.costs(found, "seconds") == pytest.approx((0.02, 0.01))
    assert page.costs(found, "cpu") == pytest.approx((0.025, 0.025))
    assert page.reaches({"layouts": {page.DEFAULT: found}})
    slow = {**found, "on": {"seconds": [1.02, 1.05], "cpu": [4.0, 4.2]}}
    assert not page.reaches({"layouts": {page.DEFAULT: slow}})
    about = {"cpu": "A", "cores": 2, "time": "2030-01-02 03:04", "load": 0.1, "undisturbed": True, "commit": "abc"}
    parts = page.parts({"about": about, "pairs": 5, "layouts": {page.DEFAULT: found}})
    assert "| the default run, `dp 8` | 200 ms | +2.0 ± 1.0 % | +2.5 ± 2.5 % | 1.2 kB |" in parts["cost"]
    assert "at real-time priority; commit abc." in parts["about"]
