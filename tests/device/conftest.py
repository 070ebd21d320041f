"""`cupy`: the stand-in, where the library looks for it.  `numpy_kernels`: the host computes as the stand-in does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpitrain import kernels

sys.path.insert(0, str(Path(__file__).parent))  # where the stand-in is
from strict_cupy import installed


@pytest.fixture
def cupy() -> Iterator[Any]:
    with installed() as module:
        yield module


@pytest.fixture
def numpy_kernels() -> None:
    """Device arrays always take NumPy's formulas; with this the host's do, too, and the two agree to the last bit."""
    kernels.select("numpy")
