"""Arrays of devices between real MPI ranks, by the stand-in for CuPy: staged, and as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_device_messages_mpi

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", [check.__name__ for check in checks_device_messages_mpi.CHECKS])
def test_two_ranks(checks: Callable[..., None], name: str) -> None:
    checks("checks_device_messages_mpi", name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [check.__name__ for check in checks_device_messages_mpi.ALL])
def test_three_ranks(checks: Callable[..., None], name: str) -> None:
    checks("checks_device_messages_mpi", name, 3, which="ALL")


@pytest.mark.slow
@pytest.mark.parametrize("name", [check.__name__ for check in checks_device_messages_mpi.LAYOUTS])
def test_data_and_tensor_parallel(checks: Callable[..., None], name: str) -> None:
    checks("checks_device_messages_mpi", name, 4, which="LAYOUTS")
