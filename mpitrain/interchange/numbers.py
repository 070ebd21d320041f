"""The dtypes of weights, and how values come from one into another: to the nearest, and never silently to infinity."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpitrain.errors import CheckpointError

DTYPES: Mapping[str, str] = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Those that weights may have: their names in headers, and here."""
ROWS = 128
"""Rows that are copied at once: of a transposed matrix then whole lines of the cache are written."""


def put(values: np.ndarray, into: np.ndarray, name: str) -> None:
    """Write values into an array of the same shape, in its dtype.

    Raises:
        CheckpointError: a number is too large for it; says which tensor.

    Cost: memory for `ROWS` rows.
    """
    wide_enough = np.can_cast(values.dtype, into.dtype, "safe")
    for start in range(0, len(values), ROWS):
        rows = values[start : start + ROWS]
        if values.dtype != into.dtype:
            with np.errstate(all="ignore"):
                rounded = rows.astype(into.dtype)
            if not wide_enough and (lost := np.isinf(rounded) & np.isfinite(rows)).any():
                largest = float(np.abs(rows[lost].astype(np.float64)).max())
                raise CheckpointError(
                    f"{name} holds {largest:.4g}, which is too large for {into.dtype.name}.\n"
                    "Take a wider one: --dtype float32."
                )
            rows = rounded
        into[start : start + ROWS] = rows
