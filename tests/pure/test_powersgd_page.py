"""docs/explanation/powersgd.md shows the kept figures, and they say what the page claims."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import powersgd
import powersgd_page as page


def run(val, sent=100, loss=(3.0, 2.5, 2.0)):
    return {"val": val, "sent": sent, "loss": list(loss)}


def test_the_committed_page_and_plot_are_what_the_committed_figures_give():
    kept = json.loads(page.KEPT.read_text())
    for path, text in page.files(kept).items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python benchmarks/powersgd.py --write-docs"


def test_a_fifth_of_the_bytes_cost_less_than_2_percent_of_the_loss_with_adafactor():
    kept = json.loads(page.KEPT.read_text())
    assert set(kept["runs"]) == set(powersgd.RUNS)
    assert set(page.above(kept, "adafactor")) == set(powersgd.SEEDS)
    assert page.mean_above(kept, "adafactor") < page.BOUND
    exact, compressed = (kept["runs"][f"adafactor, {kind}, seed 1"]["sent"] for kind in ("exact", "rank 4"))
    assert exact / compressed > 5


def test_the_gap_is_positive_where_exact_sums_are_better():
    result = {"runs": {"adamw, exact, seed 2": run(2.0), "adamw, rank 4, seed 2": run(2.5, 50)}}
    assert page.above(result, "adamw") == {2: 0.25}
    assert page.above(result, "adafactor") == {}
    assert page.mean_above(result, "adafactor") == 0.0
    assert page.lines(result)[-1] == "adamw, rank 4 above exact: seed 2 +25.00%; mean +25.00%"


def test_losses_are_kept_as_means_of_ten():
    assert powersgd.means([1.0] * 10 + [2.0] * 5 + [4.0] * 5 + [9.0]) == [1.0, 3.0]


@pytest.mark.parametrize("name", powersgd.RUNS)
def test_each_run_is_one_that_can_be_started_and_sends_what_the_formula_says(name):
    flags = powersgd.RUNS[name].split()
    config = powersgd.parse(flags)
    assert (config.reducer == "flat") == ("exact, seed" in name)
    assert (config.steps, config.optimizer) == (300, name.partition(",")[0])
    rank, h, small = config.powersgd_rank, 128, 256 * 128 * 2 + 64 * 128 + 2 * 13 * 128 + 256
    if config.reducer == "flat":
        wanted = 4 * (2 * 12 * h * h + small)
    elif config.powersgd_tables:
        wanted = 4 * (2 * 16 * rank * h + rank * (2 * (256 + h) + 64 + h) + 2 * 13 * h + 2 * h)
    else:
        wanted = 4 * (2 * 16 * rank * h + small)
    assert powersgd.sent(flags) == wanted
