"""Products of matrices."""

from __future__ import annotations

from typing import Any

from mpitrain import kernels
from mpitrain.autograd.function import Function, unbroadcast
from mpitrain.autograd.lazy import Product
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError


class Matmul(Function):
    """a @ b with NumPy's rules: the last two dims are matrices, those before broadcast, vectors stand for matrices."""

    linear = (0,)
    bilinear = True

    @staticmethod
    def forward(a: Array, b: Array) -> tuple[Array, tuple[Any, ...]]:
        if a.ndim == 0 or b.ndim == 0 or a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
            raise ShapeError(f"matmul: shapes {a.shape} and {b.shape} do not go together")
        return kernels.matmul(a, b), (a, b)

    @staticmethod
    def backward(grad: Array, a: Array, b: Array, *, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        if a.ndim == b.ndim == 2:
            da: Any = kernels.matmul(grad, b.T) if wanted[0] else None
            db: Any = Product(a.T, grad, b.dtype) if wanted[1] else None
        else:
            # A vector is a matrix of one row (left) or one column (right), and grad has lost that dim.
            a_matrix = a[None, :] if a.ndim == 1 else a
            b_matrix = b[:, None] if b.ndim == 1 else b
            if b.ndim == 1:
                grad = grad[..., None]
            if a.ndim == 1:
                grad = grad[..., None, :]
            da = _down(kernels.matmul(grad, b_matrix.swapaxes(-1, -2)), a_matrix, a) if wanted[0] else None
            db = _down(kernels.matmul(a_matrix.swapaxes(-1, -2), grad), b_matrix, b) if wanted[1] else None
        if da is not None and da.dtype != a.dtype:
            da = da.astype(a.dtype)
        return da, db


def _down(grad: Array, matrix: Array, x: Array) -> Array:
    return unbroadcast(grad, matrix.shape).reshape(x.shape).astype(x.dtype, copy=False)


def matmul(a: Any, b: Any) -> Tensor:
    """a @ b.

    Args:
        a: (..., n, k), or (k,).
        b: (..., k, m), or (k,); the dims before the last two broadcast.

    Returns:
        (..., n, m), without n or m where a vector stood.

    Raises:
        ShapeError: the shapes do not go together.
    """
    return Matmul.apply(a, b)
