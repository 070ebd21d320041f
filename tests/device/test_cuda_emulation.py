"""The emulation of CUDA on the host computes what a device would, and catches what a kernel must not do."""

from __future__ import annotations

import shutil
import time

import emulation
import numpy as np
import pytest
from emulation import EmulationError
from strict_kernel import order_of_threads
from strict_stream import launches

CODE = r"""
#define KERNEL extern "C" __global__ void
#define FULL 0xffffffffu

KERNEL twice(const float *x, float *y, long long n) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
        y[i] = 2 * x[i];
}
KERNEL block_sums(const float *x, float *y) {
    __shared__ float s[64];
    s[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
    __syncthreads();
    for (int far = 32; far; far >>= 1) {
        if (threadIdx.x < far) s[threadIdx.x] += s[threadIdx.x + far];
        __syncthreads();
    }
    if (threadIdx.x == 0) y[blockIdx.x] = s[0];
}
KERNEL lanes(const float *x, float *y) {
    const int i = threadIdx.x;
    float sum = x[i];
    for (int far = 16; far; far >>= 1) sum += __shfl_xor_sync(FULL, sum, far);
    y[i] = sum;
    y[64 + i] = __shfl_down_sync(FULL, x[i], 4, 8);
    y[128 + i] = __shfl_up_sync(FULL, x[i], 1);
    y[192 + i] = __shfl_sync(FULL, x[i], 5);
    y[256 + i] = (float)__popc(__ballot_sync(FULL, i % 3 == 0));
    __syncwarp();
    y[320 + i] = __syncthreads_count(i % 2);
    y[384 + i] = __any_sync(FULL, i == 40) + 2 * __all_sync(FULL, i < 32);
}
KERNEL places(int *y) {
    y[((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * 12 +
      (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x] =
        100 * (blockIdx.x + 2 * blockIdx.y + 4 * blockIdx.z) + threadIdx.x + 2 * threadIdx.y + 6 * threadIdx.z;
}
KERNEL reversed(const double *x, double *y, long long n) {
    MT_DYNAMIC_SHARED(double, s);
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = s[n - 1 - threadIdx.x];
}

/* ---- mistakes */

KERNEL no_barrier_after_write(const float *x, float *y) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = s[63 - threadIdx.x];
}
KERNEL no_barrier_before_write(const float *x, float *y) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    const float other = s[63 - threadIdx.x];
    s[threadIdx.x] = 2 * other;
    __syncthreads();
    y[threadIdx.x] = other + s[threadIdx.x];
}
KERNEL no_syncwarp(const float *x, float *y) {
    __shared__ float s[32];
    s[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = s[threadIdx.x ^ 1];
}
KERNEL unwritten_shared(const float *x, float *y) {
    __shared__ float s[64];
    if (threadIdx.x) s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x / 2];
}
KERNEL blocks_race(float *y) { y[0] = blockIdx.x; }
KERNEL writes_past(float *y, long long n) { y[n] = 1; }
KERNEL reads_past(const float *x, float *y, long long n) { y[0] = x[n]; }
KERNEL leaves_declared(float *y, long long n) {
    __shared__ float s[8];
    s[n] = 1;
    y[0] = s[0];
}
KERNEL leaves_dynamic(float *y, long long n) {
    MT_DYNAMIC_SHARED(float, s);
    s[n] = 1;
    y[0] = s[0];
}
KERNEL not_aligned(const float *x, float *y) { y[0] = (*(const float4 *)(x + 1)).x; }
KERNEL not_all_threads(float *y) {
    if (threadIdx.x < 40) __syncthreads();
    else __syncthreads();
    y[0] = 1;
}
KERNEL not_all_lanes(float *y) {
    float v = 1;
    if (threadIdx.x < 5) v = __shfl_xor_sync(FULL, v, 1);
    y[threadIdx.x] = v;
}
KERNEL lanes_at_two_places(float *y) {
    float v = 1;
    if (threadIdx.x < 5) v = __shfl_xor_sync(FULL, v, 1);
    else v = __shfl_down_sync(FULL, v, 1);
    y[threadIdx.x] = v;
}
KERNEL part_of_a_warp(float *y) { y[threadIdx.x] = __shfl_xor_sync(0xffu, 1.0f, 1); }
KERNEL by_zero(int *y, int n) { y[0] = 7 / n; }
KERNEL gives_up(float *y) { __trap(); }
KERNEL deep(float *y, int n) {
    volatile float local[20000];
    local[n] = 1;
    y[0] = local[n];
}
extern "C" __global__ void __launch_bounds__(4 * 256, 1) plenty(float *y) { y[threadIdx.x] = 1; }
extern "C" __global__ __launch_bounds__(512) void fewer(float *y) { y[threadIdx.x] = 1; }
"""


pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="CUDA source is run by g++, which is not here")


@pytest.fixture
def kernels(cupy):
    return cupy.RawModule(code=CODE).get_function


def floats(cupy, n, dtype=np.float32):
    return cupy.asarray(np.random.default_rng(n).standard_normal(n).astype(dtype))


@pytest.mark.parametrize("order", ["up", "down", "both"])
def test_what_kernels_compute(cupy, kernels, order):
    with order_of_threads(order):
        x, y = floats(cupy, 1000), cupy.zeros(1000, np.float32)
        kernels("twice")((3,), (96,), (x, y, np.int64(1000)))
        np.testing.assert_array_equal(y.get(), 2 * x.get())
        sums = cupy.empty(5, np.float32)
        kernels("block_sums")((5,), (64,), (x, sums))
        np.testing.assert_allclose(sums.get(), x.get()[:320].reshape(5, 64).sum(1), rtol=1e-5, atol=1e-5)
        x, y = floats(cupy, 7, np.float64), cupy.empty(7)
        kernels("reversed")((1,), (7,), (x, y, np.int64(7)), shared_mem=56)
        np.testing.assert_array_equal(y.get(), x.get()[::-1])
        places = cupy.empty(8 * 12, np.int32)
        kernels("places")((2, 2, 2), (2, 3, 2), (places,))
        np.testing.assert_array_equal(places.get().reshape(8, 12), 100 * np.arange(8)[:, None] + np.arange(12))


def test_what_lanes_exchange(cupy, kernels):
    x, y = floats(cupy, 64), cupy.empty(448, np.float32)
    with order_of_threads("both"):
        kernels("lanes")((1,), (64,), (x, y))
    x, y = x.get(), y.get().reshape(7, 64)
    i = np.arange(64)
    np.testing.assert_allclose(y[0], x.reshape(2, 32).sum(1).repeat(32), rtol=1e-5)
    np.testing.assert_array_equal(y[1], x[np.where(i % 8 < 4, i + 4, i)])
    np.testing.assert_array_equal(y[2], x[np.where(i % 32, i - 1, i)])
    np.testing.assert_array_equal(y[3], x[np.where(i < 32, 5, 37)])
    np.testing.assert_array_equal(y[4], np.where(i < 32, 11, 11))
    np.testing.assert_array_equal(y[5], 32)
    np.testing.assert_array_equal(y[6], np.where(i < 32, 2, 1))


def test_lanes_that_are_not_there(cupy, kernels):
    """A block need not fill its last warp; what a lane that is not there would give is nobody's."""
    x, y = floats(cupy, 448), cupy.zeros(448, np.float32)
    kernels("lanes")((1,), (40,), (x, y))
    assert np.isnan(y.get()[32:40]).all()
    assert np.isfinite(y.get()[:32]).all()


@pytest.mark.parametrize("name", ["no_barrier_after_write", "no_barrier_before_write", "unwritten_shared"])
def test_missing_barriers_show(cupy, kernels, name):
    x, y = floats(cupy, 64), cupy.zeros(64, np.float32)
    with order_of_threads("both"), pytest.raises(EmulationError, match="depends on the order of threads"):
        kernels(name)((1,), (64,), (x, y))
    assert not y.get().any()  # nothing was written


def test_a_missing_syncwarp_shows(cupy, kernels):
    x, y = floats(cupy, 32), cupy.zeros(32, np.float32)
    with order_of_threads("both"), pytest.raises(EmulationError, match="depends on the order of threads"):
        kernels("no_syncwarp")((1,), (32,), (x, y))
    kernels("no_syncwarp")((1,), (32,), (x, y))  # one order alone: unwritten memory shows by itself
    assert np.isnan(y.get()).sum() == 16


def test_blocks_that_race_show(cupy, kernels):
    y = cupy.zeros(1, np.float32)
    with order_of_threads("both"), pytest.raises(EmulationError, match="depends on the order of threads"):
        kernels("blocks_race")((3,), (1,), (y,))


@pytest.mark.parametrize("length", [1, 8, 9, 1000, 1024])
def test_memory_beyond_an_array_is_out_of_bounds(cupy, kernels, length):
    whole = cupy.zeros(length + 64, np.float32)
    array = whole[:length]  # what lies behind is another's
    for n in (length, length + 31, -1):
        with pytest.raises(EmulationError, match="out of bounds"):
            kernels("writes_past")((1,), (1,), (array, np.int64(n)))
    assert not whole.get().any()
    y = cupy.zeros(1, np.float32)
    with pytest.raises(EmulationError, match=r"out of bounds: .* after the end of an array"):
        kernels("reads_past")((1,), (1,), (array, y, np.int64(length + 8)))
    kernels("reads_past")((1,), (1,), (array, y, np.int64(length - 1)))
    assert float(y[0]) == 0
    if length % 8:  # the array ends a few bytes before the page: what is read there is NaN
        kernels("reads_past")((1,), (1,), (array, y, np.int64(length)))
        assert np.isnan(float(y[0]))


def test_arrays_that_overlap_are_one_memory(cupy, kernels):
    x = cupy.asarray(np.arange(64, dtype=np.float32))
    kernels("twice")((1,), (8,), (x[:8], x[4:12], np.int64(4)))
    assert x.get()[:12].tolist() == [0, 1, 2, 3, 0, 2, 4, 6, 8, 9, 10, 11]
    x[0] = 1
    kernels("twice")((1,), (1,), (x[:5], x[1:6], np.int64(5)))  # one thread reads what it has written
    assert x.get()[:7].tolist() == [1, 2, 4, 8, 16, 32, 4]
    x = cupy.asarray(np.arange(64, dtype=np.float32))
    y = cupy.zeros((4, 8), np.float32)
    kernels("twice")((1,), (8,), (x[:8], y[::2, ::4], np.int64(8)))  # elements between are within the bounds
    assert y.get().reshape(-1)[:8].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]


MISTAKES = {
    "leaves_declared": ((8,), "beyond a declared array"),
    "leaves_dynamic": ((8,), "after the end of the dynamic shared memory"),
    "not_all_threads": ((), r"wait at different __syncthreads"),
    "not_all_lanes": ((), "threads that have ended"),
    "lanes_at_two_places": ((), "different warp operations"),
    "part_of_a_warp": ((), "a mask that is not full"),
    "gives_up": ((), r"__trap\(\)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(cupy, kernels, name):
    args, words = MISTAKES[name]
    y = cupy.zeros(64, np.float32)
    with pytest.raises(EmulationError, match=words):
        kernels(name)((1,), (64,), (y, *map(np.int64, args)), shared_mem=32)
    assert not y.get().any()
    kernels("twice")((1,), (64,), (y, y, np.int64(64)))  # the next one runs


def test_faults_are_caught(cupy, kernels):
    x, y = floats(cupy, 64), cupy.zeros(1, np.float32)
    with pytest.raises(EmulationError, match="not aligned"):
        kernels("not_aligned")((1,), (1,), (x, y))
    kernels("not_aligned")((1,), (1,), (x[3:], y))
    assert float(y[0]) == float(x[4])
    with pytest.raises(EmulationError, match="by zero"):
        kernels("by_zero")((1,), (1,), (cupy.zeros(1, np.int32), np.int32(0)))
    kernels("deep")((1,), (64,), (y, np.int32(19_999)))  # 80 KB of locals are at home on a fiber
    with pytest.raises(EmulationError, match="beyond a declared array"):
        kernels("deep")((1,), (1,), (y, np.int32(20_000)))


def test_arguments_must_be_what_the_kernel_declares(cupy, kernels):
    x, y = floats(cupy, 8), cupy.zeros(8, np.float32)
    twice, n = kernels("twice"), np.int64(8)
    for wrong in (
        (x, y, np.int32(8)),
        (x, y, 8.0),
        (x, y, None),
        (x, None, n),
        (None, y, n),
        (x.astype(np.float64), y, n),
        (x.astype(np.int32), y, n),
        (x.get(), y, n),
        (x, y, x),
        (x, y),
        (x, y, n, n),
    ):
        with pytest.raises(TypeError):
            twice((1,), (8,), wrong)
    with pytest.raises(EmulationError, match="memory that is nobody's"):
        twice((1,), (8,), (x, np.uint64(0), n))  # a null pointer
    with pytest.raises(TypeError, match="a tuple"):
        twice(1, (8,), (x, y, n))
    twice((0,), (8,), (x, y, 8))  # as CuPy does: one block, and a whole number is an int64
    np.testing.assert_array_equal(y.get(), 2 * x.get())


def test_limits_of_a_launch(cupy, kernels):
    y = cupy.zeros(1024, np.float32)
    kernel = kernels("plenty")
    for grid, block, shared in (
        ((1,), (1025,), 0),
        ((1,), (1, 1, 65), 0),
        ((1, 65_536), (1,), 0),
        ((1,), (1,), 49_153),
    ):
        with pytest.raises(EmulationError, match="CUDA_ERROR_INVALID_VALUE"):
            kernel(grid, block, (y,), shared_mem=shared)
    for name, threads in (("fewer", 512), ("twice", 256)):
        args = (y, y, np.int64(0)) if name == "twice" else (y,)
        kernels(name)((1,), (threads,), args)
        with pytest.raises(EmulationError, match="OUT_OF_RESOURCES"):
            kernels(name)((1,), (threads + 1,), args)
    kernel.max_dynamic_shared_size_bytes = 100_000
    kernel((1,), (1024,), (y,), shared_mem=100_000)
    assert y.get().all()
    with pytest.raises(EmulationError, match="CUDA_ERROR_INVALID_VALUE"):
        kernel.max_dynamic_shared_size_bytes = 240_000


def test_what_does_not_compile(cupy):
    with pytest.raises(EmulationError, match="nothing_like_it"):
        cupy.RawModule(code='extern "C" __global__ void f(float *y) { y[0] = nothing_like_it; }').get_function("f")
    floating = 'extern "C" __global__ void f(float *y) { atomicAdd(y, 1.0f); }'  # its sum depends on who comes first
    with pytest.raises(EmulationError, match="atomicAdd"):
        cupy.RawModule(code=floating).get_function("f")
    with pytest.raises(EmulationError, match="no kernel g"):
        cupy.RawKernel(CODE, "g").compile()
    with pytest.raises(ValueError, match="unrecognized option"):
        cupy.RawModule(code=CODE, options=("--fast",))
    with pytest.raises(TypeError):
        cupy.RawModule(CODE)


def test_launches_are_counted(cupy, kernels):
    x, y = floats(cupy, 64), cupy.zeros(64, np.float32)
    with launches() as counted:
        kernels("twice")((1,), (64,), (x, y, np.int64(64)))
        _ = (x + y).sum()[None].reshape(1, 1)
        cupy.empty(3)
        x[2:4] = 1
        cupy.matmul(x[None], y[:, None])
    assert counted == {"twice": 1, "add": 1, "sum": 1, "setitem": 1, "matmul": 1}


def test_kernels_that_take_long_are_compiled_once_more(cupy, monkeypatch):
    code = CODE.partition("KERNEL block_sums")[0] + f"// {time.time_ns()}"  # that nobody has compiled
    loaded, own = [], emulation.Module._load

    def load(module, path):
        loaded.append(path)
        own(module, path)

    monkeypatch.setattr(emulation, "PATIENCE", 0.0)
    monkeypatch.setattr(emulation.Module, "_load", load)
    x, y = floats(cupy, 64), cupy.zeros(64, np.float32)
    kernel = cupy.RawModule(code=code).get_function("twice")
    for _ in range(3):
        kernel((1,), (64,), (x, y, np.int64(64)))
        np.testing.assert_array_equal(y.get(), 2 * x.get())
    emulation.Module(code, ())  # whoever comes later takes the better one at once
    assert loaded[0] != loaded[1] == loaded[2]
    assert len(loaded) == 3
    for path in set(loaded):
        path.unlink()
