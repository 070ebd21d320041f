"""Operations on two operands, element by element, with NumPy's broadcasting.

The gradient of an operand that was broadcast is summed back to its shape, that of one that was promoted is cast back to
its dtype.  A number, Python's or NumPy's, takes the dtype of the tensor that it meets.  Halves are worked out in
float32, and sums of their gradients stay there (`Total`) for whoever keeps them so.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from mpitrain.autograd.function import Function, plain, unbroadcast
from mpitrain.autograd.lazy import rounded, summed, widened
from mpitrain.autograd.needs import NEAR
from mpitrain.autograd.ops.operands import check_operands
from mpitrain.autograd.ops.single import common_half, in_single
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, is_half, wide
from mpitrain.errors import ShapeError, UserError

Kind = tuple[tuple[int, ...], Any]


def _kind(x: Any) -> Kind | None:
    """What the gradient of an operand must look like: (shape, dtype); None for a number."""
    return (x.shape, x.dtype) if hasattr(x, "shape") else None


def _fit(grad: Array, kind: Kind | None) -> Any:
    """The gradient summed and cast down to the operand that was broadcast or promoted."""
    if kind is None or (grad.shape == kind[0] and grad.dtype == kind[1]):
        return grad
    shape, dtype = kind
    if grad.shape == shape:
        return rounded(grad, dtype)
    return summed(unbroadcast(grad, shape, wide(grad.dtype)), dtype)


def _like(grad: Array, x: Array) -> Any:
    """The same for an operand that is at hand."""
    return _fit(grad, (x.shape, x.dtype))


class Add(Function):
    """a + b."""

    linear = (0, 1)

    @staticmethod
    def forward(a: Array, b: Array) -> tuple[Array, tuple[Any, ...]]:
        return in_single(operator.add, a, b), (_kind(a), _kind(b))

    @staticmethod
    def backward(grad: Array, a: Kind | None, b: Kind | None, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        return _fit(grad, a) if wanted[0] else None, _fit(grad, b) if wanted[1] else None


class Sub(Function):
    """a - b."""

    linear = (0, 1)

    @staticmethod
    def forward(a: Array, b: Array) -> tuple[Array, tuple[Any, ...]]:
        return in_single(operator.sub, a, b), (_kind(a), _kind(b))

    @staticmethod
    def backward(grad: Array, a: Kind | None, b: Kind | None, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        return _fit(grad, a) if wanted[0] else None, _fit(-grad, b) if wanted[1] else None


class Mul(Function):
    """a * b, for two arrays; saves both."""

    linear = (0,)
    bilinear = True
    needs = (NEAR, NEAR)

    @staticmethod
    def forward(a: Array, b: Array) -> tuple[Array, tuple[Any, ...]]:
        return in_single(operator.mul, a, b), (a, b)

    @staticmethod
    def backward(grad: Array, a: Array, b: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        grad = widened(grad)
        da = _like(grad * widened(b), a) if wanted[0] else None
        return da, _like(grad * widened(a), b) if wanted[1] else None


class Scale(Function):
    """x times a number; saves nothing."""

    linear = (0,)

    @staticmethod
    def forward(x: Array, *, factor: float) -> tuple[Array, tuple[Any, ...]]:
        return in_single(operator.mul, x, factor), ()

    @staticmethod
    def backward(grad: Array, *, wanted: tuple[bool, ...], factor: float) -> tuple[Any, ...]:
        return (in_single(operator.mul, grad, factor),)


class Div(Function):
    """a / b; saves b and the quotient, or only b where that is a number."""

    linear = (0,)

    @staticmethod
    def forward(a: Array, b: Any) -> tuple[Array, tuple[Any, ...]]:
        y = in_single(operator.truediv, a, b)
        return y, (b, y if hasattr(b, "shape") else None, _kind(a))

    @staticmethod
    def backward(grad: Array, b: Any, y: Array | None, a: Kind | None, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        da = widened(grad) / widened(b)
        return _fit(da, a) if wanted[0] else None, _like(-da * widened(y), b) if wanted[1] else None


class Pow(Function):
    """x to the power of a number."""

    @staticmethod
    def forward(x: Array, *, exponent: float) -> tuple[Array, tuple[Any, ...]]:
        return in_single(operator.pow, x, exponent), (x,)

    @staticmethod
    def backward(grad: Array, x: Array, *, wanted: tuple[bool, ...], exponent: float) -> tuple[Any, ...]:
        if exponent == 0:  # 0 * x**-1 would be NaN at 0
            return (array_module(x).zeros_like(x),)
        if exponent == 2:
            return (in_single(lambda grad, x: grad * (x * 2), grad, x),)
        return (in_single(lambda grad, x: grad * (exponent * x ** (exponent - 1)), grad, x),)


class Power(Function):
    """a to the power of b, elementwise; the slope in b is 0 where a is 0."""

    @staticmethod
    def forward(a: Array, b: Array) -> tuple[Array, tuple[Any, ...]]:
        y = in_single(operator.pow, a, b)
        return y, (a, b, y)

    @staticmethod
    def backward(grad: Array, a: Any, b: Any, y: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        xp = array_module(grad)
        da = db = None
        grad, base, exponent = widened(grad), widened(a), widened(b)
        if wanted[0]:
            less = xp.where(exponent == 0, 0, exponent - 1)  # the slope of a**0 is 0, also at a = 0
            da = _like(grad * (exponent * base**less), a)
        if wanted[1]:
            if hasattr(a, "shape"):
                log = xp.log(xp.where(base == 0, 1, base))
            else:  # a number stays on the host, and promotes nothing
                log = math.log(a or 1) if a >= 0 else math.nan
            db = _like(grad * (widened(y) * log), b)
        return da, db


class Maximum(Function):
    """The larger of two; where they are equal each gets half of the gradient."""

    @staticmethod
    def forward(a: Array, b: Array) -> tuple[Array, tuple[Any, ...]]:
        return in_single(array_module(a, b).maximum, a, b), (a, b)

    @staticmethod
    def backward(grad: Array, a: Any, b: Any, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        return _share(grad, a, b, a > b, wanted)


class Minimum(Function):
    """The smaller of two; where they are equal each gets half of the gradient."""

    @staticmethod
    def forward(a: Array, b: Array) -> tuple[Array, tuple[Any, ...]]:
        return in_single(array_module(a, b).minimum, a, b), (a, b)

    @staticmethod
    def backward(grad: Array, a: Any, b: Any, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        return _share(grad, a, b, a < b, wanted)


def _share(grad: Array, a: Any, b: Any, wins: Array, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
    tie = a == b
    grad = widened(grad)
    half = grad * 0.5
    da = _like(grad * wins + half * tie, a) if wanted[0] else None
    db = _like(grad * ~(wins | tie) + half * tie, b) if wanted[1] else None
    return da, db


class Where(Function):
    """a where the condition holds, else b."""

    linear = (1, 2)

    @staticmethod
    def forward(condition: Array, a: Any, b: Any) -> tuple[Array, tuple[Any, ...]]:
        common_half(a, b)
        y = array_module(condition, a, b).where(condition, _number_as(a, b), _number_as(b, a))
        return y, (condition, _kind(a), _kind(b))

    @staticmethod
    def backward(
        grad: Array, condition: Array, a: Kind | None, b: Kind | None, *, wanted: tuple[bool, ...]
    ) -> tuple[Any, ...]:
        # A choice, not a product with the condition: an infinite gradient must not leak as NaN to the other side.
        where = array_module(grad).where
        nothing = grad.dtype.type(0)
        da = _fit(where(condition, grad, nothing), a) if wanted[1] else None
        db = _fit(where(condition, nothing, grad), b) if wanted[2] else None
        return None, da, db


def _number_as(x: Any, other: Any) -> Any:
    """A Python number in the other operand's dtype, so that it does not promote it."""
    dtype = getattr(other, "dtype", None)
    if hasattr(x, "dtype") or dtype is None:
        return x
    return rounded(np.float64(x), dtype) if is_half(dtype) else dtype.type(x)


# ------------------------------------------------------------------------------------------------------- as functions


def _apply(function: type[Function], *operands: Any) -> Tensor:
    operands = tuple(map(plain, operands))
    check_operands(function.title(), *operands)
    try:
        return function.apply(*operands)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        shapes = " and ".join([str(getattr(x, "shape", x)) for x in operands])
        raise ShapeError(f"{function.title()}: shapes {shapes} do not broadcast") from None


def add(a: Any, b: Any) -> Tensor:
    """a + b."""
    return _apply(Add, a, b)


def sub(a: Any, b: Any) -> Tensor:
    """a - b."""
    return _apply(Sub, a, b)


def mul(a: Any, b: Any) -> Tensor:
    """a * b."""
    a, b = plain(a), plain(b)
    if isinstance(b, (int, float)):
        return Scale.apply(a, factor=float(b))
    if isinstance(a, (int, float)):
        return Scale.apply(b, factor=float(a))
    return _apply(Mul, a, b)


def div(a: Any, b: Any) -> Tensor:
    """a / b."""
    return _apply(Div, a, b)


def pow(x: Any, exponent: Any) -> Tensor:
    """x ** exponent, for a number or, elementwise, a tensor."""
    exponent = plain(exponent)
    if isinstance(exponent, (int, float)):
        return Pow.apply(x, exponent=exponent)
    return _apply(Power, x, exponent)


def maximum(a: Any, b: Any) -> Tensor:
    """The larger of two; equal ones share the gradient."""
    return _apply(Maximum, a, b)


def minimum(a: Any, b: Any) -> Tensor:
    """The smaller of two; equal ones share the gradient."""
    return _apply(Minimum, a, b)


def where(condition: Array, a: Any, b: Any) -> Tensor:
    """a where the bool array `condition` is True, else b."""
    return _apply(Where, condition, a, b)
