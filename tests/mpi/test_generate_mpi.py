"""Texts that real MPI ranks write: tests/checks_generate.py, in one launch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_generate

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", [check.__name__ for check in checks_generate.CHECKS])
def test_generate(checks: Callable[[str, str, int], None], name: str) -> None:
    checks("checks_generate", name, 4)
