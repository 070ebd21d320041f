"""ZeRO between real MPI ranks: one rank's run, with the bits that stages have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_zero

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", [check.__name__ for check in checks_zero.CHECKS])
def test_on_four_ranks(checks: Callable[..., None], name: str) -> None:
    """T23.1, C54."""
    checks("checks_zero", name, 4)
