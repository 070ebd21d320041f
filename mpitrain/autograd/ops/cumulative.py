"""Running sums, and products, whose gradients are made of running products.  Both are formed in at least float32."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd.function import Function
from mpitrain.autograd.lazy import rounded, widened
from mpitrain.autograd.ops.reduce import Dims, count, dims_of, spread
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module


class Prod(Function):
    """Product over dims.  The slope of an element is the product of the others, so also zeros have one."""

    @staticmethod
    def forward(x: Array, *, dims: Dims, keepdims: bool) -> tuple[Array, tuple[Any, ...]]:
        return rounded(widened(x).prod(axis=dims, keepdims=keepdims), x.dtype), (x,)

    @staticmethod
    def backward(grad: Array, x: Array, *, wanted: tuple[bool, ...], dims: Dims, keepdims: bool) -> tuple[Any, ...]:
        xp = array_module(x)
        rest = tuple([dim for dim in range(x.ndim) if dim not in dims])
        order = rest + dims
        moved = widened(x).transpose(order)
        rows = moved.reshape(*[x.shape[dim] for dim in rest], count(x.shape, dims))
        dx = xp.ones(rows.shape, rows.dtype)
        dx[..., 1:] = xp.cumprod(rows[..., :-1], axis=-1)  # of those before
        dx[..., :-1] *= xp.cumprod(rows[..., :0:-1], axis=-1)[..., ::-1]  # of those behind
        dx = dx.reshape(moved.shape).transpose([order.index(dim) for dim in range(x.ndim)])
        return (rounded(dx * widened(spread(grad, x.shape, dims)), x.dtype),)


class Cumsum(Function):
    """Sums of the elements up to each place along a dim; backward sums from the end."""

    linear = (0,)

    @staticmethod
    def forward(x: Array, *, dim: int) -> tuple[Array, tuple[Any, ...]]:
        return rounded(_running(widened(x), dim), x.dtype), ()

    @staticmethod
    def backward(grad: Array, *, wanted: tuple[bool, ...], dim: int) -> tuple[Any, ...]:
        back = (slice(None),) * dim + (slice(None, None, -1),)
        return (rounded(_running(widened(grad)[back], dim)[back], grad.dtype),)


def _running(x: Array, dim: int) -> Array:
    """Running sums.  With a dim more: those of one dim alone CuPy adds up in no fixed order (cupy/cupy issue 8350)."""
    return x[None].cumsum(axis=dim + 1)[0]


# ------------------------------------------------------------------------------------------------------- as functions


def prod(x: Tensor, dim: int | Dims | None = None, keepdims: bool = False) -> Tensor:
    """Product over a dim, several, or all; of no elements 1."""
    return Prod.apply(x, dims=dims_of(x, dim, "prod"), keepdims=keepdims)


def cumsum(x: Tensor, dim: int = -1) -> Tensor:
    """The sum of the elements up to each place along `dim`, itself included."""
    (dim,) = dims_of(x, dim, "cumsum")
    return Cumsum.apply(x, dim=dim)
