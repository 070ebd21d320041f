"""Every case of every CUDA kernel on a GPU, against the reference in float64.

The cases stand in tests/kernel_cases_*.py; without a GPU tests/device/test_cuda_kernels.py runs all but the largest.
"""

from __future__ import annotations

from typing import Any

import pytest
from kernel_case import Case, measure
from kernel_cases import CASES

from mpitrain import kernels


def _all() -> list[Any]:
    return [pytest.param(case, dtype, id=f"{name}-{dtype}") for name, case in CASES.items() for dtype in case.dtypes]


@pytest.mark.parametrize(("case", "dtype"), _all())
def test_a_kernel_gives_what_the_reference_gives_in_float64(xp: Any, case: Case, dtype: str) -> None:
    found = measure(case, kernels, xp, dtype)
    assert found.ok, found.problems
