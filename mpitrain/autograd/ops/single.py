"""Formulas on halves: worked out in float32, and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.autograd.lazy import rounded, widened
from mpitrain.backend import is_half
from mpitrain.errors import ShapeError


def in_single(formula: Callable[..., Any], *operands: Any) -> Any:
    """formula(*operands); of halves, that of the same numbers in float32, rounded to what the operands promote to.

    Args:
        formula: takes as many arrays (or numbers) and returns an array.

    Raises:
        ShapeError: float16 among bfloat16.
    """
    dtype = common_half(*operands)
    return formula(*operands) if dtype is None else rounded(formula(*map(widened, operands)), dtype)


def common_half(*operands: Any) -> Any:
    """The dtype to which operands promote of which some are halves; None: none is.

    A number takes the dtype of the arrays that it meets.

    Raises:
        ShapeError: float16 among bfloat16: neither holds the other's numbers.
    """
    dtypes = [x.dtype for x in operands if hasattr(x, "dtype")]
    halves = [dtype for dtype in dtypes if dtype.itemsize == 2 and is_half(dtype)]
    if not halves:
        return None
    if any(dtype != halves[0] for dtype in halves):
        raise ShapeError("float16 and bfloat16 do not go together: cast one of them (x.astype), or both to float32")
    return np.result_type(*dtypes)
