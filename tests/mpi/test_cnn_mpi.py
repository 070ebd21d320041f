"""A convolutional network over real MPI ranks is that of one rank: tests/checks_cnn.py in one launch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_cnn

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", [check.__name__ for check in checks_cnn.CHECKS])
def test_a_convolutional_network(checks: Callable[[str, str, int], None], name: str) -> None:
    checks("checks_cnn", name, 4)
