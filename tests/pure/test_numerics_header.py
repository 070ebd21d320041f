"""numerics.h by itself: C++ reads it, as a compiler for GPUs does, and its functions are right one number at a time."""

import ctypes
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cuda_compilers import nvrtc

from mpitrain import kernels
from mpitrain.rng import fold32, lowbias32, splitmix64

HEADER = Path(__file__).resolve().parents[2] / "mpitrain" / "kernels" / "csrc" / "numerics.h"
HIGHER = {np.float32: np.float64, np.float64: np.longdouble}
PRECISIONS = pytest.mark.parametrize("dtype", HIGHER)
DEFINES = {np.float32: ["-DREAL=float", "-DREAL_IS_FLOAT=1"], np.float64: ["-DREAL=double", "-DREAL_IS_FLOAT=0"]}

# Every function of the header on the elements i of arrays; LOOP and KERNEL differ between a CPU and a GPU.
BODY = """
#include "numerics.h"
EXPORT void reals(const REAL *x, REAL *out, int n) {
    LOOP(n) {
        REAL density, slope;
        out[i] = mt_exp(x[i]);
        out[n + i] = mt_normal(x[i], &density);
        out[2 * n + i] = density;
        out[3 * n + i] = mt_gelu_tanh(x[i], &slope);
        out[4 * n + i] = slope;
        out[5 * n + i] = mt_gelu_erf(x[i], &slope);
        out[6 * n + i] = slope;
        out[7 * n + i] = mt_from_bits(mt_to_bits(x[i]));
        out[8 * n + i] = mt_sigmoid(x[i]);
        out[9 * n + i] = mt_erf(x[i]);
        out[10 * n + i] = mt_erf_near(x[i], &slope) / slope;
        out[11 * n + i] = mt_erf_far(x[i], &slope) / slope;
    }
}
EXPORT void words(const mt_row *row, mt_word *out, int n) {
    LOOP(n) {
        out[i] = mt_fold(row[i]);
        out[n + i] = mt_mix32((mt_word)row[i]);
        out[2 * n + i] = mt_column((mt_word)row[i]);
        out[3 * n + i] = (mt_word)(mt_splitmix64(row[i]) >> 32);
        out[4 * n + i] = (mt_word)mt_splitmix64(row[i]);
    }
}
EXPORT void noise(const mt_row *row, REAL *out, int n) {
    LOOP(n) out[i] = mt_near_one((mt_word)row[i], REAL_C(0.25));
}
EXPORT void update(const REAL *c, REAL *p, const REAL *g, REAL *m, REAL *v, int n) {
    const mt_adamw_numbers numbers = {c[0], c[1], c[2], c[3], c[4], c[5], c[6]};
    LOOP(n) MT_ADAMW(p[i], g[i], m[i], v[i], numbers);
}
"""
CPU = """
#include <cmath>
#define MT_SQRT std::sqrt
#define EXPORT extern "C"
#define LOOP(n) for (int i = 0; i < n; i++)
"""
GPU = """
#define MT_SQRT sqrt
#define EXPORT extern "C" __global__
#define LOOP(n) for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
"""


def test_every_function_of_the_header_is_tried_here():
    text = HEADER.read_text()
    functions = set(re.findall(r"^(?:MT_INLINE \w+|#define) ((?:mt|MT)_\w+)\(", text, re.M))
    assert len(functions) >= 10
    assert {name for name in functions if f"{name}(" not in BODY} == set()
    assert "#include" not in text
    assert text.isascii()


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """dtype -> the header compiled as C++, with every warning an error."""
    program = shutil.which("g++")
    if program is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("header")
    made = {}
    for dtype, defines in DEFINES.items():
        source, target = folder / f"{dtype.__name__}.cc", folder / f"{dtype.__name__}.so"
        source.write_text(CPU + BODY)
        strict = ["-std=c++11", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror", "-I", str(HEADER.parent)]
        command = [program, *strict, *defines, "-O2", "-shared", "-fPIC", str(source), "-o", str(target)]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        made[dtype] = ctypes.CDLL(str(target))
    return made


def pointers(*arrays):
    return [ctypes.c_void_p(a.ctypes.data) for a in arrays]


def reals(library, x):
    out = np.empty((12, x.size), x.dtype)
    library.reals(*pointers(x, out), x.size)
    names = "exp,normal,density,tanh,tanh slope,gelu,gelu slope,same,sigmoid,erf,near,far"
    return dict(zip(names.split(","), out, strict=True))


@PRECISIONS
def test_the_exponential_is_right_to_two_units_in_the_last_place(libraries, dtype):
    """Over its whole range; its ends are 0 and infinity, NaN stays."""
    low, high = (-86.9, 88.7) if dtype is np.float32 else (-707.5, 709.7)
    x = np.concatenate([np.linspace(low, high, 200_001), np.linspace(-1, 1, 20_001), np.geomspace(1e-40, 1, 999)])
    x = np.concatenate([x, math.log(2) * (np.arange(-120, 121, 0.5))]).astype(dtype)
    exact = np.exp(x.astype(HIGHER[dtype]))
    error = np.abs(reals(libraries[dtype], x)["exp"] - exact) / (exact * np.finfo(dtype).eps)
    assert error.max() < 2
    ends = np.array([-np.inf, -1e30, -1e3, 1e3, 1e30, np.inf, np.nan, 0, -0.0], dtype)
    y = reals(libraries[dtype], ends)["exp"]
    assert np.array_equal(y, np.array([0, 0, 0, np.inf, np.inf, np.inf, np.nan, 1, 1]), equal_nan=True)


@PRECISIONS
def test_the_normal_distribution_is_right(libraries, dtype):
    x = np.linspace(-40, 40, 100_001).astype(dtype)
    got = reals(libraries[dtype], x)
    exact = np.array([0.5 * math.erfc(-float(v) / math.sqrt(2)) for v in x])
    approximated = 7.5e-8 if dtype is np.float32 else 1e-16
    assert np.abs(got["normal"] - exact).max() < approximated + 2 * np.finfo(dtype).eps
    bell = np.exp(-0.5 * x.astype(HIGHER[dtype]) ** 2) / math.sqrt(2 * math.pi)
    assert (np.abs(got["density"] - bell) <= np.finfo(dtype).eps * (4 + x.astype(float) ** 2) * bell + 1e-37).all()
    assert np.array_equal(got["same"], x)
    assert np.isnan(reals(libraries[dtype], np.full(1, np.nan, dtype))["normal"]).all()


@PRECISIONS
def test_the_error_function_is_right(libraries, dtype):
    """Also relatively, where it is small."""
    x = np.concatenate([np.linspace(-40, 40, 50_001), np.linspace(-1, 1, 20_001), np.geomspace(1e-30, 1, 999)])
    x = x.astype(dtype)
    got = reals(libraries[dtype], x)["erf"]
    exact = np.array([math.erf(float(v)) for v in x])
    eps = np.finfo(dtype).eps
    assert np.abs(got - exact).max() < 2 * eps
    near = np.abs(x) < 0.46875
    assert (np.abs(got - exact)[near] <= 4 * eps * np.abs(exact[near])).all()
    ends = np.array([-np.inf, -1e30, 1e30, np.inf, np.nan, 0], dtype)
    assert np.array_equal(reals(libraries[dtype], ends)["erf"], [-1, -1, 1, 1, np.nan, 0], equal_nan=True)
    halves = np.full(1, 0.46875, dtype)  # where its two formulas meet
    parts = reals(libraries[dtype], halves**2)["near"], reals(libraries[dtype], halves)["far"]
    meet = halves * parts[0], 1 - np.exp(-(halves**2)) * parts[1]
    np.testing.assert_allclose(*meet, rtol=4 * eps)


@PRECISIONS
def test_what_c_plus_plus_computes_is_what_the_kernels_compute(libraries, dtype):
    """Every level rounds a little differently from it, where it fuses products and sums; none more than that."""
    x = np.linspace(-12, 12, 10_001).astype(dtype)
    got = reals(libraries[dtype], x)
    for level in kernels.levels():
        kernels.select(level)
        for name, kernel in (("tanh", kernels.gelu_tanh), ("gelu", kernels.gelu_erf)):
            for mine, theirs in zip((got[name], got[f"{name} slope"]), kernel(x), strict=True):
                tolerance = 3e-7 * 12 if dtype is np.float32 else 1e-14
                np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance)


@PRECISIONS
def test_the_sigmoid_keeps_its_digits_where_it_is_small(libraries, dtype):
    x = np.linspace(*((-86, 90) if dtype is np.float32 else (-700, 710)), 100_001).astype(dtype)
    exact = 1 / (1 + np.exp(-x.astype(HIGHER[dtype])))
    error = np.abs(reals(libraries[dtype], x)["sigmoid"] - exact) / (exact * np.finfo(dtype).eps)
    assert error.max() < 3
    ends = np.array([-np.inf, -1e30, 1e30, np.inf, np.nan, 0], dtype)
    assert np.array_equal(reals(libraries[dtype], ends)["sigmoid"], [0, 0, 1, 1, np.nan, 0.5], equal_nan=True)


def test_hashes_are_those_of_rng(libraries):
    rows = np.random.default_rng(0).integers(0, 2**64, 1000, dtype=np.uint64)
    rows[:3] = 0, 2**32 - 1, 2**64 - 1
    for library in libraries.values():
        out = np.empty((5, 1000), np.uint32)
        library.words(*pointers(rows, out), 1000)
        low = rows.astype(np.uint32)
        assert np.array_equal(out[0], fold32(rows))
        assert np.array_equal(out[1], lowbias32(low))
        assert np.array_equal(out[2], lowbias32(low + np.uint32(1)))
        assert np.array_equal(out[3].astype(np.uint64) << np.uint64(32) | out[4], splitmix64(rows))


@PRECISIONS
def test_noise_is_near_one_and_uniform(libraries, dtype):
    words = np.concatenate([[0, 2**32 - 1, 2**31], np.random.default_rng(0).integers(0, 2**32, 100_000)])
    rows, out = words.astype(np.uint64), np.empty(words.size, dtype)  # by a name: a pointer keeps nothing alive
    libraries[dtype].noise(*pointers(rows, out), out.size)
    exact = 1 + 0.25 * (2 * (words + 0.5) / 2**32 - 1)
    assert np.abs(out - exact).max() <= 1.5 * np.finfo(dtype).eps
    assert out.min() == out[0] >= 0.75
    assert out.max() == out[1] <= 1.25


@PRECISIONS
def test_an_update_is_adamw(libraries, dtype):
    rng = np.random.default_rng(0)
    p, g, m, v = (rng.standard_normal(100).astype(dtype) for _ in range(4))
    v *= v
    c = np.array([0.9, 0.1, 0.99, 0.01, 1e-8, 0.03, 0.999], dtype)
    new_m, new_v = c[0] * m + c[1] * g, c[2] * v + c[3] * g * g
    new_p = c[6] * p - c[5] * new_m / (np.sqrt(new_v) + c[4])
    libraries[dtype].update(*pointers(c, p, g, m, v), 100)
    for got, expected in ((m, new_m), (v, new_v), (p, new_p)):
        np.testing.assert_allclose(got, expected, rtol=0, atol=8 * np.finfo(dtype).eps)


# --------------------------------------------------------------------------------------------- NVRTC


@PRECISIONS
def test_nvrtc_compiles_the_header(dtype):
    library = nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    program = ctypes.c_void_p()
    text, name = [ctypes.c_char_p(HEADER.read_bytes())], [ctypes.c_char_p(b"numerics.h")]
    failed = library.nvrtcCreateProgram(
        ctypes.byref(program),
        ctypes.c_char_p((GPU + BODY).encode()),
        ctypes.c_char_p(b"numerics.cu"),
        1,
        (ctypes.c_char_p * 1)(*text),
        (ctypes.c_char_p * 1)(*name),
    )
    assert failed == 0
    options = [*DEFINES[dtype], "--gpu-architecture=compute_75", "-default-device", "--std=c++14"]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = library.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert failed == 0, log.value.decode()
    assert "warning" not in log.value.decode()
    library.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    library.nvrtcGetPTX(program, ptx)
    for entry in (b".entry reals", b".entry words", b".entry update"):
        assert entry in ptx.value
