"""docs/explanation/gist.md shows the kept figures, and they say what the page claims."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gist
import gist_page as page


@pytest.fixture(scope="module")
def kept():
    return json.loads(page.KEPT.read_text())


def test_the_committed_page_and_picture_are_what_the_committed_figures_give(kept):
    for path, text in page.files(kept).items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python benchmarks/gist.py --write-docs"


def test_with_16_bits_1_8_times_less_waits_and_accuracy_is_within_0_3_points(kept):
    assert page.holds(kept)
    assert page.factor(kept, "digits", "16 bits") > page.factor(kept, "digits", "lossless") >= 1.8
    assert len(kept["digits"]["none"]["accuracy"]) == gist.SEEDS


def test_lossless_learns_the_same_and_no_kind_changes_the_first_loss(kept):
    for model in ("digits", "gpt"):
        assert kept[model]["lossless"] == kept[model]["none"]
        assert all(of["first"] == kept[model]["none"]["first"] for of in kept[model].values())


def test_a_promise_that_does_not_hold_is_told():
    def result(accuracy, nbytes):
        of = {"none": {"accuracy": [0.98, 0.99]}, "16 bits": {"accuracy": [accuracy, accuracy]}}
        return {"digits": of, "bytes": {"digits": {"none": {"relu before a pool": 100}, "16 bits": {"add": nbytes}}}}

    assert page.holds(result(0.983, 50))
    assert not page.holds(result(0.981, 50))
    assert not page.holds(result(0.983, 60))
    assert page.grouped({"relu before a pool": 5, "add": 2, "gelu_tanh": 1})["all else"] == 3


def test_the_tape_is_counted_to_the_byte():
    import numpy as np

    from mpitrain.autograd import Tape, Tensor, ops
    from mpitrain.memory.gist import Gist

    x = Tensor(np.ones((2, 8, 8, 4), np.float32), requires_grad=True)
    for policy, maxima in ((None, 128), (Gist(), 32)):
        with Tape(policy) as tape:
            ops.max_pool2d(ops.relu(x)).reshape(2, 64).tanh()
        found = gist.by_keeper(tape)
        assert sum(found.values()) == tape.nbytes
        assert found["maxima of pools"] == maxima
        assert set(found) == {"relu before a pool", "maxima of pools", "tanh"}
