"""PowerSGD between real MPI ranks: tests/checks_powersgd.py, in one launch a number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_powersgd

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", [check.__name__ for check in checks_powersgd.CHECKS])
def test_powersgd(checks: Callable[[str, str, int], None], name: str) -> None:
    checks("checks_powersgd", name, 4)
