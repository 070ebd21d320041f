"""Encodings of saved arrays on device arrays: the same words, the same bits back, and nothing crosses but counts."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from strict_array import crossings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_cnn

from mpitrain.autograd import ops
from mpitrain.autograd.needs import EXACT, SIGN
from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.comm.alone import Alone
from mpitrain.comm.world import World
from mpitrain.memory.gist import Gist, Narrow, Planes, Sparse
from mpitrain.memory.gist.sparse import filled_in

DTYPES = (np.float32, np.float64, np.float16)


def drawn(dtype=np.float32):
    x = np.random.default_rng(0).standard_normal((7, 150)).astype(dtype)
    x[:, ::3] = 0
    x[0, :5] = [np.nan, np.inf, -np.inf, 3e-8, -0.0]
    return x


@pytest.mark.parametrize("bits", [16, 10, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_words_are_those_of_the_host(cupy, bits, dtype):
    narrow, x = Narrow(bits), drawn(dtype)
    words = narrow.encode(cupy.asarray(x))
    assert isinstance(words, cupy.ndarray)
    np.testing.assert_array_equal(words.get(), narrow.encode(x))
    back = narrow.decode(words, x.shape, x.dtype)
    np.testing.assert_array_equal(back.get(), narrow.decode(narrow.encode(x), x.shape, x.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("narrow", [None, Narrow(10)])
def test_sparse_storage_is_that_of_the_host(cupy, dtype, narrow):
    x = drawn(dtype)
    flat, given = x.reshape(-1), cupy.asarray(x).reshape(-1)
    count = int(filled_in(flat).sum())
    encoding = Sparse(narrow)
    here, there = encoding.encode(flat, filled_in(flat), count), encoding.encode(given, filled_in(given), count)
    for mine, theirs in zip(here, there, strict=True):
        np.testing.assert_array_equal(theirs.get(), mine)
    for need, kind in ((EXACT, x.dtype), (SIGN, np.dtype(bool))):
        back = encoding.decode(there, need, x.shape, x.dtype)
        assert back.dtype == kind
        np.testing.assert_array_equal(back.get(), encoding.decode(here, need, x.shape, x.dtype))


@pytest.mark.parametrize("count", [2, 4, 9])
def test_planes_are_those_of_the_host(cupy, count):
    numbers = np.random.default_rng(1).integers(0, count, (5, 13)).astype(np.uint8)
    planes = Planes(count)
    (there,) = planes.encode(cupy.asarray(numbers))
    np.testing.assert_array_equal(there.get(), planes.encode(numbers)[0])
    np.testing.assert_array_equal(planes.decode((there,), EXACT, numbers.shape, numbers.dtype).get(), numbers)


@pytest.mark.parametrize("bits", [None, 16, 8])
def test_a_cnn_learns_on_a_device_what_it_learns_on_the_host(cupy, numpy_kernels, bits):
    one = checks_cnn.train(World(Alone(), "none"), policy=Gist(bits))
    other = checks_cnn.train(World(Alone(), "none"), policy=Gist(bits), xp=cupy)
    for kind, tensors in one.items():
        for name, array in tensors.items():
            np.testing.assert_allclose(other[kind][name], array, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bits", [None, 16, 10])
def test_only_counts_of_zeros_come_to_the_host(cupy, numpy_kernels, bits):
    """How many elements are 0 decides how an array waits; nothing else is asked of the device."""
    x = Tensor(cupy.asarray(drawn()[1:]), requires_grad=True)
    w = Tensor(cupy.asarray(np.ones((150, 3), np.float32)), requires_grad=True)
    seed, policy = cupy.asarray(np.ones((6, 3), np.float32)), Gist(bits)
    for _ in range(2):  # the first one brings the table of a format to the device
        with Tape(policy) as tape, crossings() as forward:
            y = ops.linear(ops.relu(x), w)
        with crossings() as backward:
            tape.run_backward([(y, seed)])
    assert set(forward) == {"get"}
    assert forward["get"] <= 3
    assert not backward
