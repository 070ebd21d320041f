"""`cupy`: the stand-in, where the library looks for it; NumPy's formulas serve its arrays.

`cuda_kernels`: the same, and CUDA kernels serve them: their source runs on the host.
`numpy_kernels`: the host computes by NumPy's formulas, too.
"""

from __future__ import annotations

import shutil
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
        try:
            yield module
        finally:
            kernels.serve(None)


@pytest.fixture
def numpy_kernels() -> None:
    """The host takes NumPy's formulas, as device arrays do without `cuda_kernels`: both agree to the last bit."""
    kernels.select("numpy")


@pytest.fixture
def cuda_kernels(cupy: Any) -> Any:
    if shutil.which("g++") is None:
        pytest.skip("CUDA source is run by g++, which is not here")
    kernels.serve(cupy)
    return cupy
