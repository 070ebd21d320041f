"""Half precisions: which there are, and halves as the numbers that they stand for."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpitrain.backend import is_half

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
EPS = {np.dtype(np.float16): 2.0**-10, BFLOAT16: 2.0**-7}
"""Distance of 1 from the next larger number."""
SMALLEST = {np.dtype(np.float16): 2.0**-24, BFLOAT16: 2.0**-133}
"""The smallest number above 0."""
HALVES = pytest.mark.parametrize("half", EPS, ids=str)


def values(x: Any, dtype: Any = np.float32) -> Any:
    """An array of halves in another dtype; anything else as it is."""
    return x.astype(dtype) if hasattr(x, "dtype") and (is_half(x.dtype) or x.dtype.kind == "f") else x


def assert_rounded(y: np.ndarray, exact: np.ndarray, error: Any = 0.0) -> None:
    """That y is a rounding of numbers which are `exact` but for an absolute `error`: half of the last digit of each."""
    assert y.shape == exact.shape
    assert is_half(y.dtype)
    allowed = np.abs(exact) * (EPS[y.dtype] / 2) * 1.001 + SMALLEST[y.dtype] + error * (1 + EPS[y.dtype])
    off = ~(np.abs(y.astype(np.float64) - exact) <= allowed)
    assert not off.any(), f"{y[off].reshape(-1)[:3]} for {exact[off].reshape(-1)[:3]}"
