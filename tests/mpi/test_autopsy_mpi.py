"""Values that are not finite are named between real MPI ranks as between threads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_autopsy

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", [check.__name__ for check in checks_autopsy.CHECKS])
def test_places_are_named(checks: Callable[..., None], name: str) -> None:
    """RELIABILITY 15."""
    checks("checks_autopsy", name, 4)
