"""Products of matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain import kernels
from mpitrain.autograd.function import Function, unbroadcast
from mpitrain.autograd.lazy import Product, rounded, summed
from mpitrain.autograd.needs import NEAR
from mpitrain.autograd.ops.operands import check_operands
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, wide
from mpitrain.errors import ShapeError


class Matmul(Function):
    """a @ b with NumPy's rules: the last two dims are matrices, those before broadcast, vectors stand for matrices.

    With a `dtype` the product is not rounded to that of a and b.
    """

    linear = (0,)
    bilinear = True
    needs = (NEAR, NEAR)

    @staticmethod
    def forward(a: Array, b: Array, *, dtype: Any = None) -> tuple[Array, tuple[Any, ...]]:
        if a.ndim == 0 or b.ndim == 0 or a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
            raise ShapeError(f"matmul: shapes {a.shape} and {b.shape} do not go together")
        return kernels.matmul(a, b, dtype=dtype), (a, b)

    @staticmethod
    def backward(grad: Array, a: Array, b: Array, *, wanted: tuple[bool, ...], dtype: Any = None) -> tuple[Any, ...]:
        if wanted[0] and wanted[1]:
            grad = kernels.factor(grad)
        if a.ndim == b.ndim == 2:
            da: Any = kernels.matmul(grad, b.T, dtype=a.dtype) if wanted[0] else None
            db: Any = Product(a.T, grad, b.dtype) if wanted[1] else None
        else:
            # A vector is a matrix of one row (left) or one column (right), and grad has lost that dim.
            a_matrix = a[None, :] if a.ndim == 1 else a
            b_matrix = b[:, None] if b.ndim == 1 else b
            if b.ndim == 1:
                grad = grad[..., None]
            if a.ndim == 1:
                grad = grad[..., None, :]
            da = _product(grad, b_matrix.swapaxes(-1, -2), a_matrix, a) if wanted[0] else None
            db = _product(a_matrix.swapaxes(-1, -2), grad, b_matrix, b) if wanted[1] else None
        return da, db


def _product(left: Array, right: Array, matrix: Array, x: Array) -> Any:
    """left @ right, summed down to `matrix`, which is x."""
    grad = kernels.matmul(left, right, dtype=wide(x.dtype))
    if grad.shape == matrix.shape:
        return rounded(grad.reshape(x.shape), x.dtype)
    return summed(unbroadcast(grad, matrix.shape).reshape(x.shape), x.dtype)


def matmul(a: Any, b: Any, dtype: Any = None) -> Tensor:
    """a @ b.

    Args:
        a: (..., n, k), or (k,).
        b: (..., k, m), or (k,); the dims before the last two broadcast.
        dtype: of the product; None: that of a and b.  float32 of halves is the product as it was formed.

    Returns:
        (..., n, m), without n or m where a vector stood.

    Raises:
        ShapeError: the shapes do not go together, one is float16 and one bfloat16, or one is no array.
    """
    check_operands("matmul", a, b)
    return Matmul.apply(a, b) if dtype is None else Matmul.apply(a, b, dtype=np.dtype(dtype))
