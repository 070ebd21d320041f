"""Messages to experts that travel beside computation, over real MPI ranks: tests/checks_overlap.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_overlap

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", [check.__name__ for check in checks_overlap.CHECKS])
def test_two_ranks(checks: Callable[..., None], name: str) -> None:
    checks("checks_overlap", name, 2)


@pytest.mark.parametrize("name", [check.__name__ for check in checks_overlap.FOUR])
def test_four_ranks(checks: Callable[..., None], name: str) -> None:
    checks("checks_overlap", name, 4, "FOUR")
