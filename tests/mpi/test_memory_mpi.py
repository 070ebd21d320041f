"""What the memory ledger adds up is what is alive in a process, on real MPI ranks: tests/checks_memory.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_memory

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", [check.__name__ for check in checks_memory.CHECKS])
def test_the_sum_is_what_is_alive(checks: Callable[[str, str, int], None], name: str) -> None:
    checks("checks_memory", name, 2)
