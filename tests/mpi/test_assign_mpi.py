"""Places of rows that are cut over real MPI ranks: tests/checks_assign.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_assign

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", [check.__name__ for check in checks_assign.CHECKS])
def test_assign(checks: Callable[[str, str, int], None], name: str) -> None:
    checks("checks_assign", name, 4)
