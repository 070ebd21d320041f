"""Frozen weights between real MPI ranks: one rank's run, with stages that only go forward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are

pytestmark = pytest.mark.mpi


def test_on_four_ranks(checks: Callable[..., None]) -> None:
    checks("checks_freezing", "at_the_ends_of_a_pipeline", 4)
