"""docs/explanation/checkpoints.md shows the kept figures, and how they come about."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import checkpoint as benchmark
import checkpoint_page as page
import checkpoint_steps as steps

from mpitrain.checkpoint import SlabRef
from mpitrain.comm.world import world
from mpitrain.errors import CheckpointDamaged

SECONDS = {
    page.PLAIN_WRITE: [1.0, 1.0, 3.0],
    page.SAVE: [2.0, 1.25, 3.0],
    page.SAVE_BACK: [4.0, 2.5, 3.0],
    page.PLAIN_COLD: [0.6, 1.0, 2.0],
    page.PLAIN_WARM: [0.5, 0.5, 0.5],
    page.LOAD_COLD: [1.0, 1.0, 1.0],
    page.LOAD_WARM: [1.0, 1.0, 1.0],
    page.TRUST_COLD: [0.8, 1.0, 0.5],
    page.TRUST_WARM: [0.5, 0.5, 0.5],
}
STEPS = {"begin": [0.4, 0.1, 0.2], "publish": [0.1, 0.1, 0.1], "quiet": [[5.0, 5.0]] * 3, "beside": [[5.0, 6.0]] * 3}
ABOUT = {"cpu": "A", "cores": 2, "time": "2030-01-02 03:04", "versions": {"numpy": "2"}, "load": 0.1, "commit": "abc"}
RESULT = {
    "about": {"disk": ABOUT},
    "disk": {"large": {"bytes": 10**9, "seconds": SECONDS}},
    "steps": {"1": {"bytes": 10**9, "rows": 8, "seq_len": 128, "seconds": STEPS}},
    "shares": {"1": [100], "2": [49, 51]},
}


def test_the_committed_page_is_what_the_committed_figures_give():
    for path, text in page.files(json.loads(page.KEPT.read_text())).items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python benchmarks/checkpoint.py --write-docs"


def test_figures_are_ratios_of_a_round():
    found = RESULT["disk"]["large"]
    assert [page.ratios(found, row) for row in page.SPEEDS] == [[0.5, 0.8, 1.0], [0.6, 1.0, 2.0], [0.5] * 3]
    assert page.stalls(RESULT["steps"]["1"]) == pytest.approx([0.1, 0.04, 0.06])
    assert page.slower(RESULT["steps"]["1"]) == pytest.approx([1.1] * 3)
    parts = page.parts(RESULT)
    assert "| save, of the speed of a plain write with fsync | 80 % | **80 %** (50 to 100) |" in parts["disk"]
    assert "| what `--read-back` adds to a save | | **100 %** (0 to 100) |" in parts["disk"]
    assert "| training stands still, of a step | < 5 % | **6.0 %** (4.0 to 10.0) |" in parts["steps"]
    assert "| 2 | 49, 51 | 100 |" in parts["shares"]
    assert "load average before 0.1" in parts["about"]
    assert "Not measured." not in page.files(RESULT)[page.PAGE]


def test_who_begins_changes_from_round_to_round():
    assert ["".join(pair) for pair in benchmark.turns(1, "abc", "xyz")] == ["by", "cz", "ax"]
    assert ["".join(pair) for pair in benchmark.turns(3, "abc", "xyz")] == ["ax", "by", "cz"]


def test_a_bar_that_is_missed_is_told_by_the_exit_code(tmp_path):
    assert not page.reaches(RESULT)
    fast = {**STEPS, "begin": [0.4, 0.1, 0.1]}  # the median counts
    assert page.reaches({**RESULT, "steps": {"1": {**RESULT["steps"]["1"], "seconds": fast}}})
    for name in (page.SAVE, page.LOAD_COLD):
        slow = {**SECONDS, name: [9.0] * 3}
        assert not page.reaches({"disk": {"large": {"bytes": 1, "seconds": slow}}})
    path = tmp_path / "kept.json"
    path.write_text(json.dumps(RESULT))
    assert benchmark.main(["--show", "--result", str(path)]) == 0


def test_a_round_writes_and_reads_the_same_bytes(tmp_path):
    values = [np.arange(3 << 20, dtype=np.float32), np.arange(7.0)]
    slabs = [SlabRef(f"w/{n}", a.shape, (slice(0, a.size),), a, (0, 1)) for n, a in enumerate(values)]
    memory = [memoryview(a.view(np.uint8)) for a in values]
    files = benchmark.Files(slabs, memory, tmp_path / "run", tmp_path / "plain")
    for number in range(2):
        assert set(benchmark.writing(files, number)) | set(benchmark.reading(files, number)) == set(page.DISK)
    assert files.plain.read_bytes() == b"".join(a.tobytes() for a in values)
    want = [a.copy() for a in values]
    for a in values:
        a[...] = 0
    files.read_plain()
    np.testing.assert_equal(values, want)
    path = benchmark.checkpoint.latest(files.run)
    damaged = path / "rank-00000.h5"
    data = bytearray(damaged.read_bytes())
    data[-40] ^= 1
    damaged.write_bytes(data)
    with benchmark.trusting():
        benchmark.checkpoint.load(path, slabs, world())
    with pytest.raises(CheckpointDamaged):
        benchmark.checkpoint.load(path, slabs, world())


def test_a_training_is_saved_while_it_goes_on(tmp_path):
    trainer = steps.Trainer(benchmark.TINY, rows=2, run=tmp_path / "run")
    found = steps.measured(trainer, rounds=2)
    assert found["bytes"] == 12 * sum(p.size for p in trainer.model.parameters())
    assert [len(found["seconds"][name]) for name in ("quiet", "begin", "beside", "publish")] == [2] * 4
    assert all(took > 0 for took in found["seconds"]["begin"] + found["seconds"]["publish"])
    assert trainer.saving is None
    assert len(page.stalls(found)) == 2
