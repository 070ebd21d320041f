"""Products of matrices by cuBLAS, written straight to where they are wanted.

cuBLAS has columns where NumPy has rows, so it is asked for the transposed product, b.T @ a.T, of memory as it lies.  A
transposed factor is a flag, a part of a matrix a longer way from row to row, and dims before the last two are a stride
from matrix to matrix, 0 where one matrix stands for many: none of these is copied.

    out (.., n, m) = a (.., n, k) @ b (.., k, m)      dtypes of a and b, and of out
    float16 and float16, or bfloat16 and bfloat16     the same, or float32; added up in float32, rounded once
    a half and float32, which `few` tells            float32, in TF32
    float32 and float32                               float32, in TF32 where CUPY_TF32=1, as CuPy has it
    float64 and float64                               float64

Each call goes to the current stream.  The same call gives the same bits, on one kind of device and release of cuBLAS.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import Array, array_module, is_half

LOOPS = 16
"""Calls that one product may take before factors whose dims do not merge are rather copied."""

# cudaDataType, and cublasMath_t: sums of parts of a product stay in float32 where the product is a half.
_FLOAT, _DOUBLE, _HALF, _BRAIN = 0, 1, 2, 14
_SUMS_STAY_WIDE = 16


class _Matrices(NamedTuple):
    """How the last two dims of an array lie."""

    turned: bool  # columns one behind the other, not rows
    step: int  # elements from one of them to the next


class _Dim(NamedTuple):
    """A dim before the last two."""

    length: int
    steps: tuple[int, int, int]  # bytes from a matrix to the next, of a, b and out; 0: it is the same one


def multiply(a: Array, b: Array, out: Array, add: bool = False, few: bool = False) -> None:
    """out = a @ b.

    Args:
        a, b: (.., n, k) and (.., k, m), of one dtype.
        out: (.., n, m), which the dims of a and b before the last two broadcast to; see `takes`.
        add: to what is there.
        few: of factors in float32 ten bits after the first are enough.
    """
    if not out.size:
        return
    if not a.shape[-1]:
        if not add:
            out.fill(0)
        return
    of_out = _lie(out)
    assert of_out is not None, "cuBLAS cannot write here"
    if of_out.turned:
        a, b, out = b.swapaxes(-1, -2), a.swapaxes(-1, -2), out.swapaxes(-1, -2)
        of_out = _Matrices(False, of_out.step)
    (a, of_a), (b, of_b) = _readable(a), _readable(b)
    dims = _merged(a, b, out)
    if len(dims) > 1 and math.prod(dim.length for dim in dims[:-1]) > LOOPS:
        (a, of_a), (b, of_b) = _copied(a), _copied(b)
        dims = _merged(a, b, out)
    _run((a, b, out), (of_a, of_b, of_out), dims, add, few)


def takes(out: Array) -> bool:
    """Whether a product can be written here: rows or columns have no gaps, and no two elements one place."""
    if _lie(out) is None:
        return False
    if out.ndim == 2:
        return True
    room = out.itemsize
    for step, length in sorted(zip(out.strides, out.shape, strict=True)):
        if length != 1:
            if step < room:
                return False
            room = step * length
    return True


def _run(
    arrays: tuple[Array, Array, Array],
    lie: tuple[_Matrices, _Matrices, _Matrices],
    dims: list[_Dim],
    add: bool,
    few: bool,
) -> None:
    """One call for each place in all dims but the last."""
    (a, b, out), (of_a, of_b, of_out) = arrays, lie
    (rows, depth), columns = a.shape[-2:], b.shape[-1]
    last = dims[-1] if dims else _ONE
    step_a, step_b, step_out = last.steps[0] // a.itemsize, last.steps[1] // b.itemsize, last.steps[2] // out.itemsize
    count = last.length
    if count > 1 and not step_b and not of_a.turned:
        # One b for all: where the rows of all a, and those of all that comes out, follow each other, one product.
        far, far_out = (step_a, step_out) if rows == 1 else (of_a.step, of_out.step)
        if step_a == rows * far >= depth and step_out == rows * far_out >= columns:
            of_a, of_out = _Matrices(False, far), _Matrices(False, far_out)
            rows, count = rows * count, 1
    cublas, handle, compute, one, nought = _ready(a.dtype, few)
    kind, kind_out, start, way = _kind(a.dtype), _kind(out.dtype), one if add else nought, cublas.CUBLAS_GEMM_DEFAULT
    turned = int(of_b.turned), int(of_a.turned)  # b comes first: see above
    for at_a, at_b, at_out in _places(dims[:-1]) if len(dims) > 1 else _FIRST:
        p, q, r = a.data.ptr + at_a, b.data.ptr + at_b, out.data.ptr + at_out
        # fmt: off
        if count == 1:
            cublas.gemmEx(
                handle, *turned, columns, rows, depth, one, q, kind, of_b.step, p, kind, of_a.step,
                start, r, kind_out, of_out.step, compute, way,
            )
        else:
            cublas.gemmStridedBatchedEx(
                handle, *turned, columns, rows, depth, one, q, kind, of_b.step, step_b, p, kind, of_a.step, step_a,
                start, r, kind_out, of_out.step, step_out, count, compute, way,
            )
        # fmt: on


def _places(dims: list[_Dim]) -> Iterator[tuple[int, int, int]]:
    """Bytes from the first matrices of a, b and out to those of each place in the dims."""
    for place in product(*(range(dim.length) for dim in dims)):
        steps = [sum(i * dim.steps[of] for i, dim in zip(place, dims, strict=True)) for of in range(3)]
        yield steps[0], steps[1], steps[2]


def _lie(x: Array) -> _Matrices | None:
    """How the matrices of x lie; None: neither rows nor columns are without gaps."""
    (rows, columns), (far, near), size = x.shape[-2:], x.strides[-2:], x.itemsize
    if (columns == 1 or near == size) and (rows == 1 or far >= size * columns):
        return _Matrices(False, far // size if rows > 1 else columns)
    if (rows == 1 or far == size) and (columns == 1 or near >= size * rows):
        return _Matrices(True, near // size if columns > 1 else rows)
    return None


def _readable(x: Array) -> tuple[Array, _Matrices]:
    """x, or a copy where cuBLAS cannot read it as it lies; and how it lies."""
    lie = _lie(x)
    return _copied(x) if lie is None or (x.ndim > 2 and min(x.strides) < 0) else (x, lie)


def _copied(x: Array) -> tuple[Array, _Matrices]:
    """x without gaps."""
    x = array_module(x).ascontiguousarray(x)
    return x, _Matrices(False, x.shape[-1])


def _merged(a: Array, b: Array, out: Array) -> list[_Dim]:
    """The dims before the last two, as few as they can be walked in."""
    dims: list[_Dim] = []
    shape = out.shape[:-2]
    for at, count in enumerate(shape):
        if count == 1:
            continue
        dim = _Dim(count, (_step(a, at - len(shape)), _step(b, at - len(shape)), out.strides[at]))
        if dims and dims[-1].steps == tuple(count * step for step in dim.steps):
            dim = _Dim(dims.pop().length * count, dim.steps)
        dims.append(dim)
    return dims


def _step(x: Array, at: int) -> int:
    """Bytes from a matrix of x to the next along a dim, counted from the end of those before the last two."""
    at += x.ndim - 2
    return int(x.strides[at]) if at >= 0 and x.shape[at] > 1 else 0


@functools.cache
def _kind(dtype: Any) -> int:
    if is_half(dtype):
        return _HALF if dtype.kind == "f" else _BRAIN
    return _FLOAT if dtype == np.float32 else _DOUBLE


def _ready(dtype: Any, few: bool) -> tuple[Any, int, int, int, int]:
    """cuBLAS, its handle for the current device, what a product is computed in, and where 1 and 0 stand in that."""
    import cupy

    cublas, handle = cupy.cuda.cublas, cupy.cuda.get_cublas_handle()
    cublas.setMathMode(handle, _SUMS_STAY_WIDE)  # the handle is CuPy's, and whoever uses it may change this
    if dtype == np.float64:
        return cublas, handle, cublas.CUBLAS_COMPUTE_64F, *_DOUBLES_AT
    fast = dtype == np.float32 and (few or os.environ.get("CUPY_TF32", "0") not in ("", "0"))
    return cublas, handle, cublas.CUBLAS_COMPUTE_32F_FAST_TF32 if fast else cublas.CUBLAS_COMPUTE_32F, *_FLOATS_AT


_ONE = _Dim(1, (0, 0, 0))
_FIRST = ((0, 0, 0),)
_FLOATS, _DOUBLES = np.array([1, 0], np.float32), np.array([1, 0], np.float64)  # read by cuBLAS as long as it runs
_FLOATS_AT = _FLOATS.ctypes.data, _FLOATS.ctypes.data + _FLOATS.itemsize
_DOUBLES_AT = _DOUBLES.ctypes.data, _DOUBLES.ctypes.data + _DOUBLES.itemsize
