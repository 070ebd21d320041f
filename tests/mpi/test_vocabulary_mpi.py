"""A vocabulary cut over real MPI ranks: tests/checks_vocabulary.py, in one launch a number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_vocabulary

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [check.__name__ for check in checks_vocabulary.CHECKS])
def test_vocabulary(checks: Callable[[str, str, int], None], name: str, ranks: int) -> None:
    checks("checks_vocabulary", name, ranks)
