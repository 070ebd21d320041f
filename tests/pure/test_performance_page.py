"""docs/performance.md is what the kept figures say, and figures are read from measurements as the table promises."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import growth
import page
import plots
from measurements import MEASUREMENTS, flops_per_token
from rows import ROWS, Row, exponent, spread

from mpitrain.models.gpt import GPTConfig

BY_NAME = {row.name: row for row in ROWS}


def runs(*speeds):
    return [
        {"tokens_per_s": speed, "cpu_ms_per_step": 1e3 / speed, "faults_per_step": 3, "foreign": 0.02, "steal": 0.01}
        for speed in speeds
    ]


SAMPLE_S = {
    "rounds": {"mpitrain": runs(110, 130, 120), "torch": runs(100, 100, 100), "numpy": runs(90, 95, 91)},
    "peaks": [900.0, 1000.0],
    "flops_per_token": 5,
    "vector_bits": 256,
    "kernels": {"mpitrain": "x86-64-v3", "torch": "torch", "numpy": "numpy"},
}
ABOUT = {
    "cpu": "a core",
    "cores": 2,
    "system": "Linux",
    "python": "3.12",
    "versions": {"numpy": "2.4", "torch": None},
    "blas": "some",
    "kernels": "x86-64-v3",
    "commit": "abc",
    "command": "python benchmarks/table.py",
    "time": "2026-01-01 00:00:00 +0000",
}


def result(**measurements):
    kept = {"about": ABOUT, "rounds": 3, "seconds": 1.0, "loadavg": 0.1}
    return {"measurements": {name: {**kept, "data": data} for name, data in measurements.items()}}


def test_the_committed_page_and_figures_are_what_the_committed_result_gives():
    kept = json.loads(page.KEPT.read_text())
    for path, text in page.files(kept).items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python benchmarks/table.py --write-docs"


def test_each_row_has_a_measurement_and_each_measurement_its_method():
    assert {row.measurement for row in ROWS} == set(MEASUREMENTS)
    assert len(BY_NAME) == len(ROWS)
    assert list(page.sections(page.HERE / "methods.md")) == list(MEASUREMENTS)
    assert set(page.sections(page.HERE / "findings.md")) <= set(BY_NAME)


def test_a_ratio_is_the_median_over_the_rounds_and_its_range():
    figure = BY_NAME["tokens-S"].figure(SAMPLE_S)
    assert (figure.value, figure.low, figure.high) == pytest.approx((1.2, 1.1, 1.3))
    assert (figure.mine, figure.peer) == ("120 tokens/s", "100 tokens/s")


def test_a_share_of_the_peak_is_that_of_the_fastest_peak():
    figure = BY_NAME["peak-share-S"].figure(SAMPLE_S)
    assert (figure.value, figure.peer) == (pytest.approx(120 * 5 / 1000), "50.0 %")


def test_the_numpy_row_says_when_there_is_nothing_else_than_numpy():
    alone = {**SAMPLE_S, "kernels": {"mpitrain": "numpy", "numpy": "numpy"}}
    assert "no compiled kernels" in BY_NAME["numpy-S"].figure(alone).note
    assert "no compiled kernels" not in BY_NAME["numpy-S"].figure(SAMPLE_S).note


@pytest.mark.parametrize(
    ("more", "values"), [(True, {1.3: "ambition", 1.25: "ambition", 1.2: "bar", 1.1: "no"}), (False, {1.3: "no"})]
)
def test_a_verdict_knows_which_way_is_better(more, values):
    row = Row("x", "x", "S", spread, 1.12, 1.25, more)
    assert {value: row.verdict(value) for value in values} == values


def test_the_page_says_what_falls_short_and_what_was_not_measured():
    text = page.page(result(S=SAMPLE_S))
    assert "| tokens/s, S, 1 rank, 1 thread, dropout 0 | 120 tokens/s | 100 tokens/s | **1.20** | 1.10-1.30 |" in text
    assert "- share of one core's FMA peak, S: **60.0 %**, where at least 75.0 % is asked for." in text
    assert "| AdamW, ns per parameter, against PyTorch fused | - | - | not measured |" in text
    assert "3 rounds, 1 s, 2026-01-01 00:00:00 +0000" in text
    assert "at most 3 % of the cores taken by others" in text
    assert "a core, 2 cores; Linux; Python 3.12; numpy 2.4; BLAS some; kernels x86-64-v3; commit abc." in text


def test_a_table_measured_on_two_commits_names_both():
    mixed = result(S=SAMPLE_S, M={**SAMPLE_S})
    mixed["measurements"]["M"]["about"] = {**ABOUT, "commit": "def"}
    text = page.page(mixed)
    assert "commit abc (measured: S)." in text
    assert "commit def (measured: M)." in text


def test_the_exponent_is_that_of_the_upper_half():
    sizes = (1, 2, 4, 8, 16)
    assert growth.exponent(sizes, [9, 9, *(3 * size**1.5 for size in sizes[2:])]) == pytest.approx(1.5)


def test_the_worst_part_of_a_sweep_counts():
    parts = {"step": {"exponent": 0.9}, "start": {"exponent": 1.4}}
    figure = exponent("ranks")({"sweeps": {"ranks": parts}})
    assert (figure.value, figure.low, BY_NAME["cost-ranks"].verdict(figure.value)) == (1.4, 0.9, "no")


def test_flops_are_six_a_weight_and_half_of_full_attention():
    config = GPTConfig(layers=2, width=8, heads=2, seq_len=4, vocab=16)
    assert flops_per_token(config) == 6 * (2 * 12 * 64 + 16 * 8) + 2 * 6 * 4 * 8


def test_a_plot_is_whole_xml_with_a_point_for_each_value():
    from xml.etree import ElementTree

    lines = [plots.Line("a < b", [(1, 2.0), (10, 30.0)]), plots.Line("c", [(1, 5.0)], 1, dashed=True)]
    drawing = plots.panels("title", [plots.Panel("p", lines, "x", "y", linear=True)])
    root = ElementTree.fromstring(drawing)
    assert len(root.findall(".//{*}circle")) == 3
    assert "a < b" in "".join(root.itertext())
    bars = ElementTree.fromstring(plots.bars("t", "c", [plots.Bar("x", 2.0, "2", 0), plots.Bar("y", 1.0, "1", 1)]))
    widths = [float(bar.attrib["width"]) for bar in bars.findall("{*}rect[@rx='2']")]
    assert widths[0] == 2 * widths[1]


def test_a_pipeline_is_compared_with_the_faster_replicas_round_by_round():
    def side(*ms):
        return [{"ms_per_step": one, "in_messages": 0.1} for one in ms]

    rounds = {
        "dp 2": side(100, 110, 120),
        "dp 2, 4 micro-batches": side(90, 100, 95),
        "1f1b, m 8": side(99, 115, 114),
        "interleaved, m 8": side(99, 95, 99),
        "zb-h1, m 8": side(90, 101, 99),
        "1f1b, m 16": side(100, 100, 100),
    }
    figure = BY_NAME["pp"].figure({"rounds": rounds})
    assert (figure.value, figure.low, figure.high) == pytest.approx((1.15, 1.1, 1.2))
    assert figure.note.startswith("dp 2, 4 micro-batches: 95 ms a step; 1f1b, m 8; interleaved, m 8 1.042; zb-h1")
    better = BY_NAME["pp-better"].figure({"rounds": rounds})
    assert better.value == pytest.approx(99 / 95)
    assert "; zb-h1, m 8; " in better.note or "; interleaved, m 8; " in better.note
    assert BY_NAME["pp-16"].figure({"rounds": rounds}).value == pytest.approx(0.95)


def test_a_bubble_is_judged_by_the_schedule_that_is_farthest_from_its_formula():
    def steps(measured, formula):
        return [{"measured": one, "formula": formula, "simulated": formula} for one in measured]

    data = {"schedules": {"1f1b": steps((0.12, 0.13, 0.11), 0.11), "zb-h1": steps((0.06, 0.2, 0.07), 0.05)}}
    figure = BY_NAME["bubble"].figure(data)
    assert (figure.value, figure.low) == pytest.approx((0.02, 0.01))
    assert "zb-h1 7.0 % (formula 5.0, simulated 5.0)" in figure.note
    assert BY_NAME["bubble-zb"].figure(data).value == pytest.approx(0.07 / 0.11)


def looked(peak, forward, again, backward, **owners):
    flops = {"forward": forward, "again": again, "backward": backward}
    return {"owners": owners, "peak": peak, "flops": flops}


def ways():
    """A step that keeps everything, one that makes blocks again, and one in halves with next to no state."""
    ms = {"float32, none, adamw": (100, 110, 120), "float32, full, adamw": (120, 143, 150)}
    ms["float32, selective, adamw"] = (101, 111, 121)
    ms["float16, full, adafactor"] = (130, 130, 140)
    rounds = {name: [{"ms_per_step": one, "cpu_ms_per_step": one} for one in of] for name, of in ms.items()}
    looks = {
        "float32, none, adamw": looked(8_000_000, 100, 0, 200, weights=1_000_000, activations=6_500_000),
        "float32, selective, adamw": looked(7_000_000, 100, 5, 200, weights=1_000_000, activations=5_500_000),
        "float32, full, adamw": looked(4_000_000, 100, 90, 200, weights=1_000_000, activations=500_000),
        "float16, full, adafactor": looked(2_000_000, 100, 90, 200, weights=500_000, masters=1_000_000),
    }
    return {"rounds": rounds, "looks": looks}


def test_recompute_is_told_by_time_operations_and_bytes():
    figure = BY_NAME["recompute-full"].figure(ways())
    assert (figure.value, figure.low, figure.high) == pytest.approx((1.25, 1.2, 1.3))
    assert "operations 1.300, bytes alive at the peak 0.50" in figure.note
    flops = BY_NAME["recompute-flops"]
    assert flops.figure(ways()).value == pytest.approx(390 / 305)
    assert [flops.verdict(value) for value in (4 / 3, 1.34)] == ["bar", "no"]
    assert "one more forward would be 1.328; of none 1.300" in flops.figure(ways()).note
    leanest = BY_NAME["memory-saved"].figure(ways())
    assert (leanest.value, leanest.mine) == (0.25, "2.0 MB")


def test_bytes_by_owner_stand_in_a_table_and_add_up():
    text = "\n".join(page._memory_table(ways()))
    assert "| float32, none, adamw | 1.0 |  |  |  | 6.5 |  | 0.5 | 8.0 | 110 | 1.000 |" in text
    assert "| float16, full, adafactor | 0.5 | 1.0 |  |  |  |  | 0.5 | 2.0 | 130 | 1.300 |" in text


def test_halves_are_compared_with_float32_round_by_round():
    data = {"rounds": {"float32": runs(100, 100, 120), "float16": runs(80, 90, 90)}, "kernels": "x86-64-v3"}
    row = BY_NAME["float16-S"]
    assert row.figure(data).value == pytest.approx(0.8)
    assert row.verdict(0.75) == "bar"
    assert "no compiled kernels" in row.figure({**data, "kernels": "numpy"}).note
