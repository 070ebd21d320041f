"""Every message of the library between real MPI ranks: the checks of the door, in one launch a number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_comm
import checks_slices

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [check.__name__ for check in checks_comm.CHECKS])
def test_messages(checks: Callable[[str, str, int], None], name: str, ranks: int) -> None:
    checks("checks_comm", name, ranks)


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", [check.__name__ for check in checks_slices.CHECKS])
def test_slices(checks: Callable[[str, str, int], None], name: str, ranks: int) -> None:
    checks("checks_slices", name, ranks)
