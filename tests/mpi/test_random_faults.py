"""Trainings that are hit by random faults end as if nothing had happened; all of them: random_faults.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import random_faults
from mpi_launch import environment

SCRIPT = str(Path(__file__).with_name("random_faults.py"))


def run(*words: str) -> str:
    """Its output; in a process of its own, since it forks."""
    command = [sys.executable, SCRIPT, *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_pipeline_with_three_faults_ends_with_the_same_bits() -> None:
    said = run("--seeds", "5", "--steps", "10")
    assert "1 passed, 0 failed; 3 of 3 faults struck, 4 starts" in said


def test_every_feature_every_number_of_faults_and_mpi_are_among_the_200() -> None:
    parts = [random_faults.part_of(seed) for seed in range(200)]
    assert {part.feature for part in parts} == set(random_faults.FEATURES)
    assert {part.num_faults for part in parts} == {1, 2, 3}
    assert sum(part.is_mpi for part in parts) == 20
    hows = {fault.how for part in parts for fault in random_faults.faults.plan(part.text, part.ranks)}
    assert hows == set(random_faults.WORDS.split(","))


@pytest.mark.slow
def test_every_feature_ends_with_the_same_bits() -> None:
    assert "13 passed, 0 failed" in run("--seeds", "10-22")


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("seed", [29, 39])
def test_processes_that_are_hit_start_again_and_end_with_the_same_bits(seed: int) -> None:
    assert "1 passed, 0 failed" in run("--seeds", str(seed))
