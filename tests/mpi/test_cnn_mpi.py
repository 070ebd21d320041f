"""Convolutional networks and batch norms over real MPI ranks are those of one rank: the checks in one launch each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_batch_norm
import checks_cnn

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", [check.__name__ for check in checks_cnn.CHECKS])
def test_a_convolutional_network(checks: Callable[[str, str, int], None], name: str) -> None:
    checks("checks_cnn", name, 4)


@pytest.mark.parametrize("name", [check.__name__ for check in checks_batch_norm.CHECKS])
def test_batch_norm(checks: Callable[[str, str, int], None], name: str) -> None:
    checks("checks_batch_norm", name, 4)
