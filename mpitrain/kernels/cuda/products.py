"""Products of matrices: halves as they are, by cuBLAS, which adds their products up in float32."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import Array, array_module, is_half, wide
from mpitrain.errors import ShapeError
from mpitrain.kernels import reference
from mpitrain.kernels.cuda import cublas
from mpitrain.kernels.reference.halves import narrow
from mpitrain.kernels.reference.products import product_dtype, shifted

_PRECISIONS = (np.dtype(np.float32), np.dtype(np.float64))
BRAIN_FLOATS = 80
"""The compute capability, times ten, from which a device multiplies bfloat16."""


class _Plan(NamedTuple):
    """Dtypes of a product."""

    operand: Any  # in which factors are multiplied; None: the reference does it
    made: Any  # in which cuBLAS gives the product
    result: Any


def matmul(a: Array, b: Array, out: Array | None = None, dtype: Any = None, add: bool = False) -> Array:
    """As the reference; `out` shares memory with neither factor.  Whole numbers go to the reference.

    Where one factor is a half and the other float32, which are the gradients of logits, that one counts with ten bits
    after the first: as many as float16 has, and tensor cores multiply them (TF32, from sm_80 on).

    Cost: about 10 us of the host, measured without a device, the call of cuBLAS itself left out.
    """
    few = a.dtype != b.dtype and (is_half(a.dtype) or is_half(b.dtype))
    wanted = dtype if out is None else out.dtype
    operand, made, result = _plan(product_dtype(a, b), wanted, _device_multiplies_all())
    if operand is None or not a.ndim or not b.ndim:
        return reference.matmul(a, b, out, dtype, add)
    a, b = (x if x.dtype == operand else x.astype(operand) for x in (a, b))
    left, right, shape = _as_matrices(a, b)
    if out is not None:
        if out.shape != shape:
            raise ShapeError(f"matmul: {a.shape} @ {b.shape} is {shape}, and out {out.shape}")
        if result == made and cublas.takes(_spread(out, a, b)):
            cublas.multiply(left, right, _spread(out, a, b), add, few)
            return out
    product = array_module(a).empty(shape, made)
    cublas.multiply(left, right, _spread(product, a, b), few=few)
    if out is None:
        return product if made == result else narrow(product, result) if is_half(result) else product.astype(result)
    if add:
        out += product
        return out
    return narrow(product, result, out)


@functools.lru_cache(maxsize=256)
def _plan(common: Any, wanted: Any, every_half: bool) -> _Plan:
    """How to multiply factors of this dtype where `wanted` is to come out, or the same."""
    compute = wide(common)
    result = common if wanted is None else np.dtype(wanted)
    if compute not in _PRECISIONS:
        return _Plan(None, None, result)
    is_multiplied = is_half(common) and (every_half or common.kind == "f")
    operand = common if is_multiplied else compute
    return _Plan(operand, result if result in (operand, compute) else compute, result)


def linear(x: Array, w: Array, bias: Array, dtype: Any = None) -> Array:
    """As the reference: the bias is where the product is then added to it, so that a half is rounded once."""
    dtype = product_dtype(x, w) if dtype is None else np.dtype(dtype)
    if dtype not in (bias.dtype, wide(bias.dtype)):  # it would be rounded by itself
        return shifted(matmul(x, w, dtype=wide(dtype)), bias, dtype)
    y = array_module(x).empty((*x.shape[:-1], w.shape[1]), dtype)
    y[...] = bias
    return matmul(x, w, out=y, add=True)


def factor(x: Array) -> Array:
    """As the reference says, but halves as they are: cuBLAS multiplies those fastest."""
    return x


def _as_matrices(a: Array, b: Array) -> tuple[Array, Array, tuple[int, ...]]:
    """a as a row and b as a column where they are vectors; and the shape of the product.

    Raises:
        ShapeError: the shapes do not go together.
    """
    left, right = a[None, :] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b
    before: tuple[int, ...] = ()
    try:
        if left.ndim > 2 or right.ndim > 2:
            before = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        fits = left.shape[-1] == right.shape[-2]
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(f"matmul: shapes {a.shape} and {b.shape} do not go together")
    rows = () if a.ndim == 1 else left.shape[-2:-1]
    columns = () if b.ndim == 1 else right.shape[-1:]
    return left, right, (*before, *rows, *columns)


def _spread(y: Array, a: Array, b: Array) -> Array:
    """A product with the dims, of length 1, that it has not because a or b is a vector."""
    if b.ndim == 1:
        y = y[..., None]
    return y[..., None, :] if a.ndim == 1 else y


def _device_multiplies_all() -> bool:
    """Whether the current device multiplies bfloat16 as it is; float16 all do for which there are kernels."""
    import cupy

    return _capability(cupy, cupy.cuda.runtime.getDevice()) >= BRAIN_FLOATS


@functools.cache
def _capability(cupy: Any, device: int) -> int:
    return int(cupy.cuda.Device(device).compute_capability)
