"""The stand-in is as strict as CuPy: every kind of mistake raises, and what CuPy leaves open shows."""

from __future__ import annotations

import copy
import math
import operator
import sys

import numpy as np
import pytest
from strict_array import crossings, ndarray
from strict_cupy import installed

from mpitrain.backend import Pool, array_module, to_device, to_host

HOST = np.arange(6.0).reshape(2, 3)

REFUSED = {
    "asarray": lambda cp, x: np.asarray(x),
    "array of a list": lambda cp, x: np.array([x[0, 0], x[0, 1]]),
    "scalar of a 0-d array": lambda cp, x: np.float32(x.sum()),
    "buffer": lambda cp, x: memoryview(x),
    "assignment to a host array": lambda cp, x: operator.setitem(np.zeros((2, 3)), ..., x),
    "math of NumPy": lambda cp, x: np.sqrt(x),
    "sum of NumPy": lambda cp, x: np.sum(x),
    "shape of NumPy": lambda cp, x: np.shape(x),
    "method of a NumPy ufunc": lambda cp, x: np.add.reduce(x),
    "out of NumPy": lambda cp, x: np.add(HOST, 1, out=x),
    "concatenation by NumPy": lambda cp, x: np.concatenate([HOST, x]),
    "host + device": lambda cp, x: HOST + x,
    "device + host": lambda cp, x: x + HOST,
    "device += host": lambda cp, x: operator.iadd(x, HOST),
    "host += device": lambda cp, x: operator.iadd(HOST.copy(), x),
    "device @ host": lambda cp, x: x @ HOST.T,
    "device < host": lambda cp, x: x < HOST,
    "0-d host array": lambda cp, x: x * np.array(2.0),
    "ufunc with host": lambda cp, x: cp.multiply(x, HOST),
    "ufunc into host": lambda cp, x: cp.multiply(x, 2, out=HOST.copy()),
    "function with host": lambda cp, x: cp.concatenate([x, HOST]),
    "function of host alone": lambda cp, x: cp.exp(HOST),
    "host into device": lambda cp, x: operator.setitem(x, ..., HOST),
    "host row into device": lambda cp, x: operator.setitem(x, 0, HOST[0]),
    "list into device": lambda cp, x: operator.setitem(x, 0, [1.0, 2.0, 3.0]),
    "host ids": lambda cp, x: x[np.array([0])],
    "list of ids": lambda cp, x: x[[0]],
    "host mask": lambda cp, x: x[HOST > 2],
    "host ids to take": lambda cp, x: x.take(np.array([0])),
    "device ids of a host array": lambda cp, x: HOST[cp.asarray([0])],
    "host condition": lambda cp, x: cp.where(HOST > 0, x, x),
    "number as a condition": lambda cp, x: cp.where(True, x, x),
    "number in matmul": lambda cp, x: cp.matmul(x, 2.0),
    "set from a device": lambda cp, x: x.set(x),
    "a missing function": lambda cp, x: cp.block([x]),
    "errstate": lambda cp, x: cp.errstate(all="ignore"),
    "a missing function of linalg": lambda cp, x: cp.linalg.multi_dot([x, x.T]),
    "a missing dtype": lambda cp, x: cp.longdouble,
    "a missing method": lambda cp, x: x.setflags(write=False),
    "a missing attribute": lambda cp, x: x.ctypes,
    "array interface": lambda cp, x: x.__array_interface__,
    "array struct": lambda cp, x: x.__array_struct__,
    "a missing flag": lambda cp, x: x.flags.writeable,
    "a keyword of a ufunc": lambda cp, x: cp.add(x, 1, where=x > 0),
    "another one": lambda cp, x: cp.exp(x, order="C"),
    "a keyword of a function": lambda cp, x: cp.sum(x, initial=0),
    "a keyword of a method": lambda cp, x: x.sum(where=x > 0),
    "too many arguments": lambda cp, x: x.item(0),
    "reduce of a ufunc": lambda cp, x: cp.maximum.reduce(x),
    "reduceat of a ufunc": lambda cp, x: cp.multiply.reduceat(x, cp.asarray([0])),
    "a loop that is not there": lambda cp, x: cp.bitwise_and(x, x),
    "subtraction of truth values": lambda cp, x: cp.subtract(x > 0, x > 0),
    "another kind of sort": lambda cp, x: x.argsort(kind="quicksort"),
    "an index that is no number": lambda cp, x: range(cp.asarray(3)),
    "a hash": lambda cp, x: hash(x),
    "a loop over a 0-d array": lambda cp, x: list(x.sum()),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_is(cupy, what):
    x = cupy.asarray(HOST)
    with pytest.raises((TypeError, AttributeError, ValueError, NotImplementedError, IndexError)):
        REFUSED[what](cupy, x)
    np.testing.assert_array_equal(x.get(), np.arange(6.0).reshape(2, 3))


def test_the_words_are_cupys(cupy):
    x = cupy.asarray(HOST)
    with pytest.raises(TypeError, match=r"Implicit conversion to a NumPy array is not allowed. Please use `.get\(\)`"):
        np.asarray(x)
    with pytest.raises(TypeError, match=r"Unsupported type <class 'numpy.ndarray'>"):
        x + HOST
    with pytest.raises(TypeError, match=r"numpy.sqrt of a device array: take the function from array_module"):
        np.sqrt(x)
    with pytest.raises(AttributeError, match="module 'cupy' has no attribute 'block'"):
        _ = cupy.block
    with pytest.raises(AttributeError, match=r"cupy.fft exists, the stand-in does not play it"):
        _ = cupy.fft
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'initial'; CuPy's parameters are \(a, axis=, "):
        cupy.sum(x, initial=0)


def test_allowed_is_what_cupy_allows(cupy):
    x = cupy.asarray(HOST)
    for y in (x + 1, 2.0 * x, np.float32(2) * x, x * np.float64(2), np.uint64(3) ^ x.astype(np.uint64), x**2, -x):
        assert isinstance(y, ndarray)
    assert (float(x.sum()), int(x[1, 2]), bool(x.any()), x[0, 1].item()) == (15.0, 5, True, 1.0)
    assert math.sqrt(x[1, 1]) == 2.0
    assert [row.shape for row in x] == [(3,), (3,)]
    assert len(x) == 2
    first, second = cupy.zeros((2, 4))
    assert first.base is second.base is not None
    assert f"{x.sum():.1f}" == "15.0"
    np.testing.assert_array_equal(cupy.asnumpy(x), HOST)
    np.testing.assert_array_equal(copy.deepcopy(x).get(), HOST)
    out = np.empty((2, 3))
    assert x.get(out=out) is out
    x.set(HOST + 1)
    np.testing.assert_array_equal(x.get(), HOST + 1)
    x[:, 1:] = 7
    assert x.tolist() == [[1, 7, 7], [4, 7, 7]]


def test_the_left_side_of_an_operator_may_want_to_be_asked(cupy):
    class Other:
        __array_ufunc__ = None

        def __radd__(self, left):
            return "asked"

    assert cupy.ones(3) + Other() == "asked"


def test_reductions_give_arrays_not_numbers(cupy):
    x = cupy.asarray(HOST)
    for y in (x.sum(), x.max(), cupy.dot(x[0], x[0]), x[0, 0], cupy.count_nonzero(x), cupy.allclose(x, x), x.any()):
        assert isinstance(y, ndarray)
        assert y.shape == ()


def test_no_floating_point_warnings(cupy):
    x = cupy.zeros(2)
    assert cupy.isnan(x / x).all()
    assert np.isinf(float(cupy.exp(x + 1000)[0]))
    x[0] = 1e300
    x *= 1e300
    assert np.isinf(float(x[0]))


def test_unwritten_memory_shows(cupy):
    for made in (cupy.empty(3), cupy.empty_like(cupy.zeros(3)), cupy.ndarray((3,), np.float32)):
        assert bool(cupy.isnan(made).all())
    assert cupy.empty(2, np.int64).tolist() == [-1, -1]
    assert cupy.empty(2, bool).tolist() == [True, True]


def test_values_that_race_for_one_element_show(cupy):
    x = cupy.zeros(4)
    x[cupy.asarray([1, 1, 2])] += cupy.asarray([1.0, 2.0, 3.0])
    assert np.isnan(x.get()).tolist() == [False, True, False, False]
    assert x.get()[2] == 3
    x[cupy.asarray([1, 1])] = 5  # the same value twice is no race
    x[cupy.asarray([0, 3])] = cupy.asarray([6.0, 7.0])
    assert x.tolist() == [6, 5, 3, 7]
    y = cupy.zeros((2, 3))
    y[cupy.asarray([0, 1, 0]), cupy.asarray([1, 2, 1])] = cupy.asarray([1.0, 2.0, 3.0])
    assert np.isnan(y.get()).tolist() == [[False, True, False], [False, False, False]]


def test_ids_wrap_around(cupy):
    x = cupy.asarray(HOST)
    assert x[cupy.asarray([2, -3])].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert x[:, cupy.asarray([4])].tolist() == [[1], [4]]
    assert x[..., None, cupy.asarray([4])].tolist() == [[[1]], [[4]]]
    assert cupy.take(x, cupy.asarray([4]), axis=1).tolist() == [[1], [4]]
    assert cupy.take_along_axis(x, cupy.asarray([[4], [5]]), 1).tolist() == [[1], [5]]
    x[cupy.asarray([3])] = 9
    assert x.tolist() == [[0, 1, 2], [9, 9, 9]]
    with pytest.raises(IndexError):
        _ = x[2]


def test_views_share_memory_and_know_whose(cupy):
    x = cupy.zeros(12)
    matrix = x.reshape(3, 4)
    for view in (matrix, matrix.T, matrix[1:], cupy.broadcast_to(matrix, (2, 3, 4)), x.view(np.int64), matrix.ravel()):
        assert view.base is x
    for fresh in (matrix.copy(), matrix + 0, matrix.T.reshape(12), matrix.astype(np.float64), x.sum()):
        assert fresh.base is None
    matrix[0, 0] = 5
    assert float(x[0]) == 5
    for same in (cupy.asarray(x), x.astype(np.float64, copy=False), cupy.ascontiguousarray(x), cupy.exp(x, out=x)):
        assert same is x
    assert x.__cuda_array_interface__["data"][0] == matrix.__cuda_array_interface__["data"][0]
    assert matrix.T.__cuda_array_interface__["strides"] == (8, 32)


def test_uploads_are_copies(cupy):
    host = HOST.copy()
    x = cupy.asarray(host)
    host[...] = 0
    np.testing.assert_array_equal(x.get(), HOST)
    x.get()[...] = 0
    np.testing.assert_array_equal(x.get(), HOST)


def test_crossings_are_counted(cupy):
    with crossings() as counted:
        x = cupy.asarray(HOST)
        (x * 2).sum().astype(np.float32).reshape(1)[0]
        assert bool(x.any())
        float(x.sum())
        x.get()
        cupy.array([1.0])
    assert counted == {"asarray": 1, "bool": 1, "float": 1, "get": 1, "array": 1}


@pytest.mark.parametrize("char", "bBhHiIlLefdFD")
@pytest.mark.parametrize("name", "add multiply true_divide maximum power exp sqrt abs sign equal isfinite".split())
def test_ufuncs_give_the_dtypes_of_cupy(cupy, name, char):
    """The stand-in compares the dtype that NumPy gives with that of CuPy's loop."""
    x = cupy.asarray(np.ones(3, char))
    ufunc = getattr(cupy, name)
    assert isinstance(ufunc(*[x] * ufunc.nin), ndarray)


def test_bfloat16_is_what_cupy_has_of_it(cupy):
    """CuPy 14.2 has a loop of bfloat16 behind each of float16, but for a few."""
    brain = pytest.importorskip("ml_dtypes").bfloat16
    x = cupy.asarray(HOST.astype(brain))
    assert (x + x).dtype == cupy.maximum(x, x).dtype == cupy.exp(x).dtype == x.sum().dtype == brain
    assert (x + x.astype(np.float32)).dtype == (x + x.astype(np.float16)).dtype == np.float32
    for refused in (
        x.all,
        x.any,
        lambda: cupy.any(x),
        lambda: x.clip(0, 1),
        lambda: cupy.clip(x, 0, 1),
        lambda: cupy.logical_not(x),
        lambda: x * 2.0,  # float32 of NumPy, bfloat16 of CuPy
        lambda: 1 + x,
    ):
        with pytest.raises(TypeError):
            refused()
    x *= 2.0
    assert float(x[0, 1]) == 2


def test_a_host_that_walks_over_elements_is_stopped(cupy):
    x = cupy.arange(100.0)
    assert [float(x[i]) for i in range(8)] == [0, 1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(TypeError, match="one by one"):
        _ = [float(x[i]) for i in range(9)]
    with pytest.raises(TypeError, match="one by one"):
        _ = [int(x[i]) for i in range(20)]
    with pytest.raises(TypeError, match="a loop of the host over 100"):
        list(x)
    assert len(list(x.reshape(50, 2))) == 50
    for _ in range(20):  # one number of each of many arrays
        float((x + 1)[0])


def test_the_library_finds_it_while_it_is_installed():
    assert "cupy" not in sys.modules
    with installed() as cp:
        x = to_device(HOST, cp.zeros(1))
        assert array_module(2.0, x) is cp
        np.testing.assert_array_equal(to_host(x), HOST)
        pool = Pool(cp)
        scratch = pool.take((2, 3), np.float32)
        assert isinstance(scratch, ndarray)
        pool.give(scratch)
        assert pool.take((6,), np.float32).base is scratch.base
    assert "cupy" not in sys.modules
    assert array_module(HOST) is np
