"""Operations that look at one element of one tensor at a time.  Halves are worked out in float32, and rounded once."""

from __future__ import annotations

import math
import operator
from typing import Any

from mpitrain import kernels
from mpitrain.autograd.function import Function, plain
from mpitrain.autograd.needs import NEAR, SIGN
from mpitrain.autograd.ops.single import in_single
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module


class Neg(Function):
    """-x."""

    linear = (0,)

    @staticmethod
    def forward(x: Array) -> tuple[Array, tuple[Any, ...]]:
        return -x, ()

    @staticmethod
    def backward(grad: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        return (-grad,)


class Exp(Function):
    """e to the x; saves its value."""

    needs = (NEAR,)

    @staticmethod
    def forward(x: Array) -> tuple[Array, tuple[Any, ...]]:
        y = in_single(array_module(x).exp, x)
        return y, (y,)

    @staticmethod
    def backward(grad: Array, y: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        return (in_single(operator.mul, grad, y),)


class Log(Function):
    """Natural logarithm."""

    @staticmethod
    def forward(x: Array) -> tuple[Array, tuple[Any, ...]]:
        return in_single(array_module(x).log, x), (x,)

    @staticmethod
    def backward(grad: Array, x: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        return (in_single(operator.truediv, grad, x),)


class Sqrt(Function):
    """Square root; saves its value."""

    @staticmethod
    def forward(x: Array) -> tuple[Array, tuple[Any, ...]]:
        y = in_single(array_module(x).sqrt, x)
        return y, (y,)

    @staticmethod
    def backward(grad: Array, y: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        return (in_single(lambda grad, y: grad / (y * 2), grad, y),)


class Tanh(Function):
    """Hyperbolic tangent; saves its value."""

    needs = (NEAR,)

    @staticmethod
    def forward(x: Array) -> tuple[Array, tuple[Any, ...]]:
        y = in_single(array_module(x).tanh, x)
        return y, (y,)

    @staticmethod
    def backward(grad: Array, y: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        return (in_single(lambda grad, y: grad * (1 - y * y), grad, y),)


class Sigmoid(Function):
    """1 / (1 + exp(-x)), without overflow and with all digits of small values; saves its value."""

    needs = (NEAR,)

    @staticmethod
    def forward(x: Array) -> tuple[Array, tuple[Any, ...]]:
        y = in_single(_sigmoid, x)
        return y, (y,)

    @staticmethod
    def backward(grad: Array, y: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        return (in_single(lambda grad, y: grad * (y * (1 - y)), grad, y),)


def _sigmoid(x: Array) -> Array:
    xp = array_module(x)
    e = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1, e) / (e + 1)


class Silu(Function):
    """x times its sigmoid (also known as swish); saves x."""

    needs = (NEAR,)

    @staticmethod
    def forward(x: Array) -> tuple[Array, tuple[Any, ...]]:
        return in_single(lambda x: x * _sigmoid(x), x), (x,)

    @staticmethod
    def backward(grad: Array, x: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        def slope(grad: Array, x: Array) -> Array:
            s = _sigmoid(x)
            return grad * (s * (1 + x * (1 - s)))

        return (in_single(slope, grad, x),)


class Softplus(Function):
    """log(1 + exp(x)), without overflow and with all digits of small values; saves x."""

    needs = (NEAR,)

    @staticmethod
    def forward(x: Array) -> tuple[Array, tuple[Any, ...]]:
        xp = array_module(x)
        return in_single(lambda x: xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x))), x), (x,)

    @staticmethod
    def backward(grad: Array, x: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        return (in_single(lambda grad, x: grad * _sigmoid(x), grad, x),)


class Relu(Function):
    """The positive part; saves its value, of which backward asks the sign."""

    needs = (SIGN,)

    @staticmethod
    def forward(x: Array) -> tuple[Array, tuple[Any, ...]]:
        y = array_module(x).maximum(x, x.dtype.type(0))  # a number of its own dtype: CuPy has bfloat16 beside no other
        return y, (y,)

    @staticmethod
    def backward(grad: Array, y: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        return (grad * (y > y.dtype.type(0)),)


class Abs(Function):
    """Absolute value; its slope at 0 is 0."""

    @staticmethod
    def forward(x: Array) -> tuple[Array, tuple[Any, ...]]:
        return array_module(x).abs(x), (x,)

    @staticmethod
    def backward(grad: Array, x: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        return (grad * array_module(x).sign(x),)


class Clip(Function):
    """x kept between two numbers; the gradient passes where x lies between them or on them."""

    @staticmethod
    def forward(x: Array, *, low: float | None, high: float | None) -> tuple[Array, tuple[Any, ...]]:
        xp = array_module(x)
        y = x
        inside = xp.ones(x.shape, bool)
        if low is not None:
            y = in_single(xp.maximum, y, low)
            inside &= x >= low
        if high is not None:
            y = in_single(xp.minimum, y, high)
            inside &= x <= high
        return y, (inside,)

    @staticmethod
    def backward(
        grad: Array, inside: Array, *, wanted: tuple[bool, ...], low: float | None, high: float | None
    ) -> tuple[Any, ...]:
        return (grad * inside,)


class Sin(Function):
    """Sine, of radians."""

    @staticmethod
    def forward(x: Array) -> tuple[Array, tuple[Any, ...]]:
        return in_single(array_module(x).sin, x), (x,)

    @staticmethod
    def backward(grad: Array, x: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        return (in_single(lambda grad, x: grad * array_module(x).cos(x), grad, x),)


class Cos(Function):
    """Cosine, of radians."""

    @staticmethod
    def forward(x: Array) -> tuple[Array, tuple[Any, ...]]:
        return in_single(array_module(x).cos, x), (x,)

    @staticmethod
    def backward(grad: Array, x: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        return (in_single(lambda grad, x: grad * -array_module(x).sin(x), grad, x),)


class Erf(Function):
    """The error function."""

    @staticmethod
    def forward(x: Array) -> tuple[Array, tuple[Any, ...]]:
        return kernels.erf(x), (x,)

    @staticmethod
    def backward(grad: Array, x: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        exp, scale = array_module(x).exp, 2.0 / math.sqrt(math.pi)
        return (in_single(lambda grad, x: grad * (exp(-(x * x)) * scale), grad, x),)


# ------------------------------------------------------------------------------------------------------- as functions


def neg(x: Tensor) -> Tensor:
    """-x."""
    return Neg.apply(x)


def exp(x: Tensor) -> Tensor:
    """e ** x."""
    return Exp.apply(x)


def log(x: Tensor) -> Tensor:
    """Natural logarithm."""
    return Log.apply(x)


def sqrt(x: Tensor) -> Tensor:
    """Square root."""
    return Sqrt.apply(x)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return Tanh.apply(x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return Sigmoid.apply(x)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return Silu.apply(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), a smooth relu."""
    return Softplus.apply(x)


def relu(x: Tensor) -> Tensor:
    """max(x, 0); its slope at 0 is 0."""
    return Relu.apply(x)


def abs(x: Tensor) -> Tensor:
    """Absolute value; its slope at 0 is 0."""
    return Abs.apply(x)


def clip(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """x, but at least `low` and at most `high`."""
    return Clip.apply(x, low=plain(low), high=plain(high))


def sin(x: Tensor) -> Tensor:
    """Sine, of radians."""
    return Sin.apply(x)


def cos(x: Tensor) -> Tensor:
    """Cosine, of radians."""
    return Cos.apply(x)


def erf(x: Tensor) -> Tensor:
    """The error function."""
    return Erf.apply(x)
