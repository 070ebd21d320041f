"""Recomputation between real MPI ranks: the bits of plain blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_recompute

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", [check.__name__ for check in checks_recompute.CHECKS])
def test_the_same_bits(checks: Callable[..., None], name: str) -> None:
    """C59."""
    checks("checks_recompute", name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [check.__name__ for check in checks_recompute.MORE])
def test_the_same_bits_on_every_layout(checks: Callable[..., None], name: str) -> None:
    checks("checks_recompute", name, 2, "MORE")
