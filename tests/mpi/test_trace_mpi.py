"""Ranks of MPI write their traces; a disk that is full on one of them ends that rank's trace, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi_launch import Run

from mpitrain.debug.trace.files import read

pytestmark = pytest.mark.mpi

TINY = "--layers 2 --width 16 --heads 2 --seq-len 16 --batch 8 --steps 5 --sample-length 0".split()


def test_a_trace_of_real_ranks_and_a_full_disk_on_one(mpirun: Callable[..., Run], tmp_path: Path) -> None:
    words = ["--run", str(tmp_path / "run"), *TINY, "--tp", "2", "--trace", "--faults"]
    fault = "io rank=1 at=disk:write n=2 errno=ENOSPC"
    script = str(Path(__file__).parents[2] / "examples" / "train_gpt.py")
    done = mpirun(2, sys.executable, script, *words, fault, timeout=60)
    assert done.code == 0, done.output
    assert done.output.count("the trace ends after step 5") == 1
    assert "No space left on device; training goes on without." in done.output
    assert "step 5/5" in done.output
    first, second = read(tmp_path / "run").ranks
    assert [step["step"] for step in first.steps] == [1, 2, 3, 4, 5]
    assert first.axes["tp"] == (0, 1)
    assert len(first.of_kind("op")) > 100
    assert (first.clock, first.facts["layout"]["tp"]) == (second.clock, 2)
    assert len(second.spans) == 0  # its first file has a head
