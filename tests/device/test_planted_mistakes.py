"""Twenty mistakes that NumPy forgives and a device does not: the stand-in refuses each, or gives another result.

    MISTAKES["name"] = the line with the mistake, and the line as it should be

Lines are functions of the stand-in and of x, `HOST` on the device; what they return is compared.  Which other words
CuPy has for a refusal, and what more is refused, is in test_strict_cupy.py; kernels are in test_cuda_emulation.py,
streams in test_strict_streams.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from emulation import EmulationError
from strict_kernel import order_of_threads
from strict_runtime import devices
from strict_stream import asynchronous

HOST = np.arange(12.0).reshape(3, 4)
IDS = np.array([2, 0, 2])
REFUSALS = (TypeError, AttributeError, ValueError, NotImplementedError, IndexError, RuntimeError, EmulationError)

KERNELS = r"""
extern "C" __global__ void plain(const float *x, float *y, long long n) {
    if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x];
}
extern "C" __global__ void unguarded(const float *x, float *y, long long n) { y[threadIdx.x] = x[threadIdx.x % n]; }
extern "C" __global__ void turned(const float *x, float *y) {
    __shared__ float s[32];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = s[31 - threadIdx.x];
}
extern "C" __global__ void turned_at_once(const float *x, float *y) {
    __shared__ float s[32];
    s[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = s[31 - threadIdx.x];
}
"""


def launched(cp: Any, x: Any, name: str, *args: Any) -> Any:
    x = cp.arange(32, dtype=np.float32)
    y = cp.zeros(12 if args else 32, np.float32)
    cp.RawModule(code=KERNELS).get_function(name)((1,), (32,), (x, y, *args))
    return y


def added(cp: Any, x: Any, way: str) -> Any:
    y, ids = cp.zeros(4), cp.asarray(IDS)
    if way == "in place":
        y[ids] += cp.asarray([1.0, 2.0, 3.0])
        return y
    hot = (cp.arange(4)[:, None] == ids).astype(np.float64)
    return hot @ cp.asarray([1.0, 2.0, 3.0])


def last_rows(cp: Any, x: Any, ids: list[int]) -> Any:
    return x[cp.asarray(ids)]


def copied(cp: Any, x: Any, *, waits: bool = True, keeps: bool = True, ties: bool = True) -> Any:
    """x + 1 to page-locked memory, by a stream of its own."""
    other = cp.cuda.Stream(non_blocking=True)
    host = np.frombuffer(cp.cuda.alloc_pinned_memory(96), np.float64, 12).reshape(3, 4)
    y = x + 1
    if ties:
        other.wait_event(cp.cuda.get_current_stream().record())
    y.get(stream=other, out=host, blocking=False)
    if not keeps:
        del y
        cp.cuda.get_current_stream().synchronize()
    if waits:
        other.synchronize()
    return host.copy()


def sent(cp: Any, x: Any, *, waits: bool) -> Any:
    """Numbers from a page-locked buffer that is used twice."""
    buffer = np.frombuffer(cp.cuda.alloc_pinned_memory(96), np.float64, 12).reshape(3, 4)
    parts = []
    for value in (1.0, 2.0):
        buffer[...] = value
        parts.append(cp.empty((3, 4)))
        parts[-1].set(buffer)
        if waits:
            cp.cuda.get_current_stream().synchronize()
    return parts[0] + parts[1]


def on_device_one(cp: Any, x: Any) -> Any:
    with devices(2), cp.cuda.Device(1):
        return cp.ones(4)


def over_devices(cp: Any, x: Any, *, moves: bool) -> Any:
    y = on_device_one(cp, x)
    with devices(2):
        return x + (cp.asarray(y.get()) if moves else y)


MISTAKES: dict[str, tuple[Any, Any]] = {
    "an implicit conversion to a host array": (lambda cp, x: np.asarray(x) + 1, lambda cp, x: x.get() + 1),
    "a function of NumPy's": (lambda cp, x: np.exp(x), lambda cp, x: cp.exp(x)),
    "host and device in one sum": (lambda cp, x: x + HOST, lambda cp, x: x + cp.asarray(HOST)),
    "a host array stored into a device": (
        lambda cp, x: x.__setitem__(0, HOST[1]) or x,
        lambda cp, x: x.__setitem__(0, cp.asarray(HOST[1])) or x,
    ),
    "a device array stored into the host's": (
        lambda cp, x: np.zeros((3, 4)).__setitem__(..., x),
        lambda cp, x: x.get(out=np.zeros((3, 4))),
    ),
    "ids of the host": (lambda cp, x: x[IDS], lambda cp, x: x[cp.asarray(IDS)]),
    "a function that CuPy lacks": (lambda cp, x: cp.block([[x], [x]]), lambda cp, x: cp.concatenate([x, x])),
    "an argument that CuPy's function lacks": (
        lambda cp, x: cp.sum(x, where=x > 3),
        lambda cp, x: cp.sum(cp.where(x > 3, x, 0)),
    ),
    "a method of a ufunc that CuPy lacks": (lambda cp, x: cp.maximum.reduce(x, 0), lambda cp, x: x.max(0)),
    "an attribute that CuPy lacks": (lambda cp, x: x.flags.writeable, lambda cp, x: x.flags.c_contiguous),
    "a loop of the host over elements": (
        lambda cp, x: sum(float(x[i, j]) for i in range(3) for j in range(4)),
        lambda cp, x: float(x.sum()),
    ),
    "memory that nobody wrote": (lambda cp, x: cp.empty(3) * 0, lambda cp, x: cp.zeros(3) * 0),
    "ids that come twice, written in place": (
        lambda cp, x: added(cp, x, "in place"),
        lambda cp, x: added(cp, x, "by a product"),
    ),
    "ids beyond the end": (lambda cp, x: last_rows(cp, x, [2, 3]), lambda cp, x: last_rows(cp, x, [2, 2])),
    "an int where a kernel takes long long": (
        lambda cp, x: launched(cp, x, "plain", np.int32(12)),
        lambda cp, x: launched(cp, x, "plain", np.int64(12)),
    ),
    "a kernel that writes beyond its array": (
        lambda cp, x: launched(cp, x, "unguarded", np.int64(12)),
        lambda cp, x: launched(cp, x, "plain", np.int64(12)),
    ),
    "a kernel without its barrier": (
        lambda cp, x: launched(cp, x, "turned_at_once"),
        lambda cp, x: launched(cp, x, "turned"),
    ),
    "a copy that nobody waits for": (lambda cp, x: copied(cp, x, waits=False), lambda cp, x: copied(cp, x)),
    "a stream that is not tied": (lambda cp, x: copied(cp, x, ties=False), lambda cp, x: copied(cp, x)),
    "a buffer used again before its copy": (
        lambda cp, x: sent(cp, x, waits=False),
        lambda cp, x: sent(cp, x, waits=True),
    ),
    "memory that is freed while a copy reads it": (
        lambda cp, x: copied(cp, x, keeps=False),
        lambda cp, x: copied(cp, x),
    ),
    "an array of another device": (
        lambda cp, x: over_devices(cp, x, moves=False),
        lambda cp, x: over_devices(cp, x, moves=True),
    ),
}


LATE = ["a copy that nobody waits for", "a stream that is not tied", "a buffer used again before its copy"]
LATE += ["memory that is freed while a copy reads it"]  # these show where a device runs late, and only there


@pytest.mark.parametrize(
    ("name", "late"), [(name, late) for name in MISTAKES for late in (False, True)[name in LATE :]]
)
def test_a_planted_mistake_is_refused_or_shows(cupy: Any, name: str, late: bool) -> None:
    wrong, right = MISTAKES[name]
    with asynchronous() if late else nullcontext(), order_of_threads("both"):
        expected = seen(right(cupy, cupy.asarray(HOST)))
        assert np.isfinite(expected).all()
        try:
            found = seen(wrong(cupy, cupy.asarray(HOST)))
        except REFUSALS:
            return
        assert not np.array_equal(found, expected)


def seen(value: Any) -> Any:
    return value.get() if hasattr(value, "get") else np.asarray(value)


def test_there_are_twenty() -> None:
    assert len(MISTAKES) >= 20
