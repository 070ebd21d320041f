"""Questions about values.  The answers are plain arrays of bools or places: no gradient flows through them.

    ops.where(x < 0, 0.01 * x, x)                    a condition
    x[x > 0]                                         a mask
    ops.gather_along(x, ops.argmax(x, 1, keepdims=True), 1)

`x == y` is not among them: tensors are keys of dicts (`tape.grads[x]`), so it asks whether x and y are the same tensor.
Whether their numbers are equal is asked by `ops.equal(x, y)`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.autograd.function import plain
from mpitrain.autograd.lazy import rounded, widened
from mpitrain.autograd.ops.operands import check_operands
from mpitrain.autograd.ops.reduce import dims_of, some
from mpitrain.autograd.ops.single import common_half
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module
from mpitrain.errors import ShapeError


def _ask(name: str, how: Callable[[Any, Any], Any], a: Any, b: Any) -> Array:
    values = [x.data if isinstance(x, Tensor) else plain(x) for x in (a, b)]
    check_operands(name, *values)
    half = common_half(*values)
    if half is not None:  # a number takes the dtype of the tensor that it meets, here too
        values = [widened(x) if hasattr(x, "dtype") else float(rounded(np.float64(x), half)) for x in values]
    try:
        return how(*values)
    except ValueError:
        shapes = " and ".join([str(getattr(x, "shape", x)) for x in values])
        raise ShapeError(f"{name}: shapes {shapes} do not broadcast") from None


def equal(a: Any, b: Any) -> Array:
    """Where a and b are the same number, as an array of bools.  (`a == b` asks whether they are one tensor.)"""
    return _ask("equal", operator.eq, a, b)


def not_equal(a: Any, b: Any) -> Array:
    """Where a and b are different numbers, as an array of bools."""
    return _ask("not_equal", operator.ne, a, b)


def less(a: Any, b: Any) -> Array:
    """a < b, as an array of bools."""
    return _ask("less", operator.lt, a, b)


def less_equal(a: Any, b: Any) -> Array:
    """a <= b, as an array of bools."""
    return _ask("less_equal", operator.le, a, b)


def greater(a: Any, b: Any) -> Array:
    """a > b, as an array of bools."""
    return _ask("greater", operator.gt, a, b)


def greater_equal(a: Any, b: Any) -> Array:
    """a >= b, as an array of bools."""
    return _ask("greater_equal", operator.ge, a, b)


def argmax(x: Any, dim: int | None = None, keepdims: bool = False) -> Array:
    """The place of the largest element along a dim, the first where several are as large.

    Args:
        x: a tensor or an array.
        dim: None: the place in the flattened x.
        keepdims: leave a dim of length 1.

    Returns:
        Integers.

    Raises:
        ShapeError: there are no elements.
    """
    return _place("argmax", x, dim, keepdims)


def argmin(x: Any, dim: int | None = None, keepdims: bool = False) -> Array:
    """The place of the smallest element along a dim, the first where several are as small; see `argmax`."""
    return _place("argmin", x, dim, keepdims)


def _place(name: str, x: Any, dim: int | None, keepdims: bool) -> Array:
    dims = some(x, dims_of(x, dim, name), name)
    values = widened(x.data if isinstance(x, Tensor) else x)
    places = getattr(array_module(values), name)(values, axis=None if dim is None else dims[0])
    if not keepdims:
        return places
    return places.reshape(tuple([1 if i in dims else n for i, n in enumerate(values.shape)]))
