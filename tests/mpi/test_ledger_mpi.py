"""Predicted bytes are those that real MPI ranks send: tests/checks_ledger.py in one launch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_ledger

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", [check.__name__ for check in checks_ledger.CHECKS])
def test_measured_is_predicted(checks: Callable[[str, str, int], None], name: str) -> None:
    checks("checks_ledger", name, 4)
