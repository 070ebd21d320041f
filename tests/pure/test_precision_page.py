"""docs/explanation/mixed-precision.md shows the kept figures, read from exponents as float16 rounds."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import precision
import precision_page as page
import underflow

from mpitrain.events import Event


def seen(values, name="gelu.backward", function=None):
    """What the listener found in one gradient of an op."""
    gradients = underflow.Gradients([])
    info = {"grad": values, "function": function, "path": "blocks.3.mlp"}
    gradients(Event("op", "begin", name, info))
    return gradients.found()


def test_the_committed_page_and_plot_are_what_the_committed_figures_give():
    kept = json.loads(page.KEPT.read_text())
    for path, text in page.files(kept).items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python benchmarks/precision.py --write-docs"


def test_the_kept_runs_in_halves_end_within_1_percent_of_float32():
    kept = json.loads(page.KEPT.read_text())
    assert set(kept["runs"]) == set(precision.RUNS)
    for name in page.PROMISED:
        assert kept["runs"][name]["steps"] == precision.STEPS
        assert abs(page.ratio(kept, name) - 1) < 0.01, name


@pytest.mark.parametrize("scale", [0, 16])
def test_what_is_lost_is_what_float16_makes_zero(scale):
    values = np.exp2(np.random.default_rng(0).uniform(-50, -5, 4000)).astype(np.float32)
    values[::7] = 0
    look = seen(values)
    halves = (values.astype(np.float64) * 2.0**scale).astype(np.float16)
    other = values != 0
    assert page.nonzero(look, "activations") == other.sum()
    assert page.lost(look, "activations", scale) == pytest.approx((halves[other] == 0).mean())
    subnormal = (halves != 0) & (values * np.float32(2.0**scale) < 2.0**-14)
    assert page.blurred(look, "activations", scale) == pytest.approx(subnormal[other].mean())


def test_zeros_are_counted_by_op_and_dtype_and_collectives_do_not_count():
    halves = np.array([0, 1, 0, 2**-24, 0], np.float16)
    look = seen((halves, None))
    assert look["ops"] == {"gelu blocks.*.mlp float16": [5, 3]}
    exact = {"ops": {"gelu blocks.*.mlp float32": [4, 1], "linear head float32": [4, 4]}}
    found = {"runs": {"float16": {"1": look}, "float32": {"1": exact}}}
    assert (page.zeros(found, "float16", "1"), page.zeros(found, "float32", "1")) == (0.6, 0.25)
    assert not seen(halves, "copy.backward", underflow.ARROWS[0])["ops"]


def test_a_run_is_told_by_its_last_loss_and_the_steps_at_which_its_scale_changed():
    records = [
        {"step": step, "loss": 3.0, "loss_scale": scale, "skipped": skipped}
        for step, scale, skipped in ((1, 8.0, 0), (2, 8.0, 1), (3, 4.0, 0))
    ]
    records[-1]["val_loss"] = 2.5
    found = precision.of_records(records)
    assert (found["val_loss"], found["skipped"], found["scales"]) == (2.5, [2], [[1, 8.0], [3, 4.0]])
    ever_new = [{**record, "loss_scale": n} for n, record in enumerate(records * 9)]
    assert (len(precision.of_records(ever_new)["scales"]), precision.of_records(ever_new)["scales"][-1]) == (
        12,
        [3, 26],
    )


def test_the_plot_is_whole_xml_with_what_is_lost_in_words():
    look = seen(np.array([2.0**-30, 2.0**-10, 2.0**-10, 0], np.float32))
    drawn = page.picture({"runs": {"float32": {"1": look}}})
    words = "".join(ElementTree.fromstring(drawn).itertext())
    assert "step 1: 33.3 % lost" in words
    assert "0 in float16" in words
