"""Experts between real MPI ranks are the same training run as one rank: tests/checks_experts.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_experts

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", [check.__name__ for check in checks_experts.CHECKS])
def test_experts_on_four_ranks(checks: Callable[[str, str, int], None], name: str) -> None:
    checks("checks_experts", name, 4)


@pytest.mark.parametrize("name", [check.__name__ for check in checks_experts.EIGHT])
def test_experts_on_eight_ranks(checks: Callable[..., None], name: str) -> None:
    checks("checks_experts", name, 8, which="EIGHT")
