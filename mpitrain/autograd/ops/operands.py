"""What may stand beside a tensor in arithmetic and comparisons: another one, an array, a number."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd.tensor import Tensor
from mpitrain.errors import ShapeError


def check_operands(op: str, *operands: Any) -> None:
    """Refuse operands that no op takes: words, None, complex numbers.

    Args:
        op: its name, for the error.
        operands: tensors, arrays, numbers, or lists of numbers.

    Raises:
        ShapeError: one is something else.
    """
    for x in operands:
        if isinstance(x, (Tensor, int, float)):
            continue
        dtype = getattr(x, "dtype", None)
        kind = None if dtype is None else dtype.kind
        if kind in ("c", "U", "S", "O", "M", "m") or (kind is None and not isinstance(x, (list, tuple))):
            what = "None" if x is None else f"a {type(x).__name__}" if kind is None else f"an array of {dtype}"
            raise ShapeError(f"{op}: {what} is no operand; it is a tensor, an array or a number, and real")
