"""Mistakes of the table in tests/mismatches.py between processes: told within ten seconds, and as it must be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mismatches

pytestmark = pytest.mark.mpi
QUICK = {"two_axes_crossed", "send_that_nobody_receives"}  # others are those of test_checked_mpi.py


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in mismatches.CASES]
)
def test_a_mistake_is_told_with_both_places_and_the_path(name: str) -> None:
    """C73."""
    case = mismatches.CASES[name]
    said = mismatches.on_processes(case, mismatches.TURNS)
    missing = [what for what, has in mismatches.verdict(case, said).items() if not has]
    assert not missing, f"{missing}\n{said.text}"
