"""`cupy.cuda.cublas` on the stand-in: the products that the library asks for, refused where cuBLAS refuses them.

Matrices lie as cuBLAS has them, columns one behind the other, at addresses.  What a call reads and writes is looked up
element by element: it must lie in arrays of the device, and no element may be written twice.  Where nothing is added
(beta 0), what is in C is not read, be it NaN.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

import ml_dtypes
import numpy as np
from strict_memory import memory_at
from strict_runtime import get_cublas_handle
from strict_stream import get_current_stream, launched, timeline

_FLOAT, _DOUBLE, _HALF, _BRAIN = 0, 1, 2, 14
_DTYPES = {_FLOAT: np.float32, _DOUBLE: np.float64, _HALF: np.float16, _BRAIN: ml_dtypes.bfloat16}


class CUBLASError(RuntimeError):
    """The status that cuBLAS gives back."""


class Cublas:
    """The module; `calls` are the last products: the name, and all that was handed over."""

    CUBLASError = CUBLASError
    CUBLAS_GEMM_DEFAULT = -1
    CUBLAS_COMPUTE_32F = 68
    CUBLAS_COMPUTE_64F = 70
    CUBLAS_COMPUTE_32F_FAST_TF32 = 77

    def __init__(self) -> None:
        self.mode = 0  # of the handle
        self.calls: deque[tuple[str, tuple[int, ...]]] = deque(maxlen=64)

    def setMathMode(self, handle: int, mode: int) -> None:
        _check(handle == get_cublas_handle(), "NOT_INITIALIZED")
        _check(mode & ~16 in (0, 1, 2, 3), "INVALID_VALUE")
        self.mode = mode

    def gemmEx(
        self,
        handle: int,
        transa: int,
        transb: int,
        m: int,
        n: int,
        k: int,
        alpha: int,
        A: int,
        Atype: int,
        lda: int,
        B: int,
        Btype: int,
        ldb: int,
        beta: int,
        C: int,
        Ctype: int,
        ldc: int,
        computeType: int,
        algo: int,
    ) -> None:
        self._note("gemmEx", locals())
        of_a, of_b, of_c = (A, Atype, lda, 0), (B, Btype, ldb, 0), (C, Ctype, ldc, 0)
        self._gemm((transa, transb), (m, n, k), alpha, of_a, of_b, beta, of_c, 1, computeType)

    def gemmStridedBatchedEx(
        self,
        handle: int,
        transa: int,
        transb: int,
        m: int,
        n: int,
        k: int,
        alpha: int,
        A: int,
        Atype: int,
        lda: int,
        strideA: int,
        B: int,
        Btype: int,
        ldb: int,
        strideB: int,
        beta: int,
        C: int,
        Ctype: int,
        ldc: int,
        strideC: int,
        batchCount: int,
        computeType: int,
        algo: int,
    ) -> None:
        self._note("gemmStridedBatchedEx", locals())
        of_a, of_b, of_c = (A, Atype, lda, strideA), (B, Btype, ldb, strideB), (C, Ctype, ldc, strideC)
        self._gemm((transa, transb), (m, n, k), alpha, of_a, of_b, beta, of_c, batchCount, computeType)

    def _note(self, name: str, given: dict[str, Any]) -> None:
        numbers = {key: value for key, value in given.items() if key != "self"}
        for key, value in numbers.items():
            if not isinstance(value, (int, np.integer)):
                raise TypeError(f"{name}: {key} is a {type(value)}, not an integer")
        _check(numbers["handle"] == get_cublas_handle(), "NOT_INITIALIZED")
        self.calls.append((name, tuple(int(value) for value in numbers.values())))
        launched(name)

    def _gemm(
        self,
        turned: tuple[int, int],
        sizes: tuple[int, int, int],
        alpha: int,
        of_a: tuple[int, int, int, int],
        of_b: tuple[int, int, int, int],
        beta: int,
        of_c: tuple[int, int, int, int],
        count: int,
        compute: int,
    ) -> None:
        m, n, k = sizes
        _check(min(m, n, k, count) >= 0 and max(m, n, k) < 2**31 and set(turned) <= {0, 1}, "INVALID_VALUE")
        pairs = {
            self.CUBLAS_COMPUTE_32F: {
                (_FLOAT, _FLOAT),
                (_HALF, _HALF),
                (_HALF, _FLOAT),
                (_BRAIN, _BRAIN),
                (_BRAIN, _FLOAT),
            },
            self.CUBLAS_COMPUTE_32F_FAST_TF32: {(_FLOAT, _FLOAT)},
            self.CUBLAS_COMPUTE_64F: {(_DOUBLE, _DOUBLE)},
        }
        _check(of_a[1] == of_b[1] and (of_a[1], of_c[1]) in pairs.get(compute, ()), "NOT_SUPPORTED")
        a = self._matrices(of_a, (m, k), bool(turned[0]), count)
        b = self._matrices(of_b, (k, n), bool(turned[1]), count)
        scalar = ctypes.c_double if compute == self.CUBLAS_COMPUTE_64F else ctypes.c_float
        share, rest = (scalar.from_address(int(where)).value for where in (alpha, beta))
        wide = np.float64 if compute == self.CUBLAS_COMPUTE_64F else np.float32
        values, places = self._matrices(of_c, (m, n), False, count)
        if np.unique(places).size != places.size:
            raise CUBLASError("two elements of C are in one place")

        def run() -> None:
            with np.errstate(all="ignore"):
                x, y = a[0][a[1]].astype(wide), b[0][b[1]].astype(wide)
                if compute == self.CUBLAS_COMPUTE_32F_FAST_TF32:
                    x, y = _tensor_float(x), _tensor_float(y)
                product = wide(share) * np.matmul(x, y)
                if rest:
                    product += wide(rest) * values[places].astype(wide)
                values[places] = product.astype(values.dtype)

        timeline.put(get_current_stream(), run)

    def _matrices(
        self, of: tuple[int, int, int, int], shape: tuple[int, int], turned: bool, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The elements around, and where among them those of (count, rows, columns) are."""
        address, kind, step, stride = of
        rows, columns = shape[::-1] if turned else shape
        _check(step >= max(1, rows) and stride >= 0, "INVALID_VALUE")  # of strides below 0 nothing is promised
        dtype = np.dtype(_DTYPES[kind])
        _check(address % dtype.itemsize == 0, "EXECUTION_FAILED")
        places = (
            np.arange(count)[:, None, None] * stride + np.arange(columns)[:, None] * step + np.arange(rows)
        )  # (count, columns, rows)
        if not turned:
            places = places.swapaxes(1, 2)
        if not places.size:
            return np.empty(0, dtype), places
        low, high = int(places.min()), int(places.max())
        raw = memory_at(address + low * dtype.itemsize, (high - low + 1) * dtype.itemsize)
        return raw.view(dtype), places - low


def _tensor_float(x: np.ndarray) -> np.ndarray:
    """Rounded to the 10 bits of fraction that TF32 has."""
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def _check(is_right: bool, status: str) -> None:
    if not is_right:
        raise CUBLASError(f"CUBLAS_STATUS_{status}")
