"""The speed harness trains both sides for real, compares like with like, and leaves nothing behind."""

import statistics
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import machine
import throughput
from sides import Task
from training import same_training

TINY = Task(layers=1, width=16, heads=2, seq_len=8, batch=4, ranks=1, dropout=0.0, dtype="float32")


@pytest.fixture(autouse=True)
def children_find_mpitrain(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def test_a_row_is_measured_and_both_sides_end_with_the_same_loss():
    row = throughput.measure(TINY, rounds=3, steps=4, tuned_malloc=True)
    mine, theirs = row["rounds"]["mpitrain"], row["rounds"]["torch"]
    assert len(mine) == len(theirs) == 3
    for a, b in zip(mine, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
        assert a["tokens_per_s"] == pytest.approx(32 / (a["ms_per_step"] / 1e3))
    assert mine[2]["loss"] < mine[0]["loss"]
    assert row["ratio"] == statistics.median(row["ratios"])
    assert row["ratios"][0] == mine[0]["tokens_per_s"] / theirs[0]["tokens_per_s"]
    assert f"{row['ratio']:.3f}" in throughput.line("tiny:1", row)


def test_a_side_that_cannot_start_ends_the_measurement(capfd):
    with pytest.raises(SystemExit, match="torch: a process ended before it was ready"):
        throughput.measure(TINY._replace(heads=3), rounds=1, steps=1, tuned_malloc=False)
    assert "Error" in capfd.readouterr().err


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_trainings_that_differ_are_not_compared(dropout):
    same_training(dropout, {"mpitrain": 5.0001, "torch": 5.0})
    with pytest.raises(SystemExit, match="the losses differ"):
        same_training(dropout, {"mpitrain": 5.3, "torch": 5.0})


def test_both_sides_get_the_same_surroundings():
    tuned, plain = (machine.rank_environment(2, tuned_malloc=tuned) for tuned in (True, False))
    assert {name for name in tuned if name.startswith("MALLOC_")} == machine.TUNED_MALLOC.keys()
    assert not any(name.startswith("MALLOC_") for name in plain)
    assert tuned["OMP_NUM_THREADS"] == tuned["MKL_NUM_THREADS"] == tuned["OPENBLAS_NUM_THREADS"] == "1"


def test_foreign_load_is_what_the_measured_processes_did_not_use():
    load = machine.Load()
    report = load.report(own=1e9)
    assert report["foreign"] == 0
    assert machine.Load().report(own=-1e3)["foreign"] > 1
