"""Late gradients and workers that learn apart, on real MPI ranks: tests/checks_asynchronous.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_asynchronous

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", [check.__name__ for check in checks_asynchronous.CHECKS])
def test_asynchronous(checks: Callable[[str, str, int], None], name: str) -> None:
    checks("checks_asynchronous", name, 4)
