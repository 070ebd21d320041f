"""Page-locked buffers: arrays cross once each way, and no buffer is used again before its copy is done."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from strict_array import crossings
from strict_stream import asynchronous, launches

from mpitrain.backend import address
from mpitrain.comm.staging import MOST_WAITING, Pinned, _rounded


def test_a_buffer_comes_back_when_its_last_view_is_gone(cupy):
    pinned = Pinned(cupy)
    whole = pinned.empty((10, 100), np.float32)
    start, held = address(whole), pinned.held
    row = whole[3].view(np.uint32)
    del whole
    other = pinned.empty((10, 100), np.float32)
    assert address(other) != start
    del row
    gc.collect()
    assert address(pinned.empty((500,), np.float64)) == start
    assert pinned.held == 2 * held


def test_a_buffer_waits_for_the_copy_out_of_it(cupy):
    pinned = Pinned(cupy)
    with asynchronous():
        first = pinned.empty((1000,), np.float64)
        first[...] = 1.0
        start, x = address(first), pinned.upload(first)
        del first
        second = pinned.empty((1000,), np.float64)
        assert address(second) != start
        second[...] = 2.0
        y = pinned.upload(second)
        del second
        np.testing.assert_array_equal(x.get(), np.ones(1000))
        np.testing.assert_array_equal(y.get(), np.full(1000, 2.0))
        assert address(pinned.empty((1000,), np.float64)) == start


def test_a_host_that_runs_ahead_of_its_device_takes_no_more_than_a_few_buffers(cupy):
    pinned = Pinned(cupy)
    made = []
    with asynchronous():
        for value in range(3 * MOST_WAITING):
            host = pinned.empty((1000,), np.float32)
            host[...] = value
            made.append(pinned.upload(host))
            del host
        for value, x in enumerate(made):
            np.testing.assert_array_equal(x.get(), np.full(1000, value, np.float32))
    assert pinned.held == MOST_WAITING * _rounded(4000)


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4), (70_000,)])
@pytest.mark.parametrize("dtype", ["?", "i2", "f2", "f4", "c16"])
def test_values_are_those_on_the_device_and_cross_once(cupy, shape, dtype):
    truth = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
    pinned, x = Pinned(cupy), cupy.asarray(truth)
    with asynchronous(), crossings() as crossed, launches() as launched:
        host = pinned.download(x)
        back = pinned.upload(host)
    np.testing.assert_array_equal(host, truth)
    assert (back.shape, back.dtype) == (truth.shape, truth.dtype)
    assert crossed == ({"get": 1, "set": 1} if truth.size else {})
    assert not launched
    np.testing.assert_array_equal(back.get(), truth)


def test_other_orders_are_put_right_on_the_device(cupy):
    pinned, x = Pinned(cupy), cupy.asarray(np.arange(12.0).reshape(3, 4))
    with asynchronous(), crossings() as crossed:
        host = pinned.download(x.T[::-1])
        out = cupy.zeros((3, 4)).T
        assert pinned.upload(host, out) is out
    assert host.flags.c_contiguous
    np.testing.assert_array_equal(host, np.arange(12.0).reshape(3, 4).T[::-1])
    np.testing.assert_array_equal(out.get(), host)
    assert crossed == {"get": 1, "set": 1}


def test_memory_of_others_has_been_read_on_return(cupy):
    host = np.ones(1000)
    with asynchronous():
        x = Pinned(cupy).upload(host)
        host[...] = 2.0
        np.testing.assert_array_equal(x.get(), np.ones(1000))


def test_sizes_are_few_and_waste_a_quarter_at_most():
    sizes = [*range(1, 20_000, 7), *(2**k + d for k in range(15, 34) for d in (-1, 0, 1))]
    assert all(n <= _rounded(n) <= max(4096, 1.25 * n + 1) for n in sizes)
    assert len({_rounded(n) for n in range(2**20, 2**21, 999)}) <= 5
