"""Devices, streams, events and page-locked memory of the stand-in; what is read too early or reused too early shows."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from strict_array import crossings
from strict_memory import memory_at
from strict_runtime import devices
from strict_stream import asynchronous, launches

HOST = np.arange(6.0)
CODE = 'extern "C" __global__ void plus_one(const double *x, double *y) { y[threadIdx.x] = x[threadIdx.x] + 1; }'


@pytest.fixture
def late(cupy):
    with asynchronous():
        yield cupy


def page_locked(cupy, array):
    host = np.frombuffer(cupy.cuda.alloc_pinned_memory(array.nbytes), array.dtype, array.size)
    host[...] = array
    return host


def stale(array):
    """Whether all of it is what nobody wrote."""
    return bool(np.isnan(array).all())


# ----------------------------------------------------------------------------------------------------------- one stream


def test_work_waits_for_whoever_asks(late):
    x = late.asarray(HOST)
    y = x * 2
    z = late.empty(6)
    late.RawKernel(CODE, "plus_one")((1,), (6,), (y, z))
    z[1:3] = 7
    z[late.asarray([5])] += 1
    assert stale(y._values)
    assert stale(z._values)
    assert z.get().tolist() == [1, 7, 7, 7, 9, 12]
    assert y._values.tolist() == [0, 2, 4, 6, 8, 10]


def test_results_have_their_shapes_at_once_and_views_stay_views(late):
    x = late.asarray(HOST).reshape(2, 3)
    assert (x.T @ x).shape == (3, 3)
    assert x.sum(0).dtype == np.float64
    assert x.T.base is x.base is not None
    first = x[0, 0]  # a view, too
    x += 1
    assert float(first) == 1
    assert [part.get().tolist() for part in late.split(x, 2)] == [[[1, 2, 3]], [[4, 5, 6]]]
    out = late.empty((2, 3))
    assert late.add(x, x, out=out) is out
    assert late.maximum(x, 3, out=out) is out
    assert out.get().tolist() == [[3, 3, 3], [4, 5, 6]]


def test_shapes_that_depend_on_values_make_the_host_wait(late):
    x = late.asarray(HOST) - 2
    with crossings(waits=True) as counted:
        assert late.nonzero(x)[0].shape == (5,)
        assert x[x > 0].shape == (3,)
        assert late.unique(x * 0).shape == (1,)
    assert counted == {"nonzero": 1, "mask": 1, "unique": 1}


def test_a_mistake_is_told_at_once(late):
    x = late.asarray(HOST)
    with pytest.raises(ValueError, match="broadcast"):
        x + late.zeros(5)
    with pytest.raises(TypeError):
        late.RawKernel(CODE, "plus_one")((1,), (6,), (x, None))
    assert (x + 1).get().tolist() == [1, 2, 3, 4, 5, 6]


def test_a_kernel_that_fails_late_is_told_to_whoever_waits(late):
    x, y = late.asarray(HOST), late.zeros(3)
    late.RawKernel(CODE, "plus_one")((1,), (6,), (x, y))
    with pytest.raises(Exception, match="out of bounds"):
        y.get()


# --------------------------------------------------------------------------------------------------------- two streams


def test_streams_are_tied_by_events_alone(late):
    cuda = late.cuda
    other = cuda.Stream(non_blocking=True)
    x = late.asarray(HOST) + 1
    host = page_locked(late, np.zeros(6))
    x.get(stream=other, out=host)
    assert stale(host)  # it did not wait for the sum
    other.wait_event(cuda.get_current_stream().record())
    x.get(stream=other, out=host)
    assert host.tolist() == [1, 2, 3, 4, 5, 6]
    with other:
        y = x * 2
    assert stale((y + 0).get())
    cuda.get_current_stream().wait_event(other.record())
    assert (y + 0).get().tolist() == [2, 4, 6, 8, 10, 12]


def test_a_blocking_stream_is_tied_to_the_default_one(late):
    other = late.cuda.Stream()
    x = late.asarray(HOST)
    with other:
        y = x + 1
    assert (y * 2).get().tolist() == [2, 4, 6, 8, 10, 12]
    third = late.cuda.Stream()
    with other:
        y = x + 1
    with third:  # but not to each other
        assert stale((y * 2).get())


def test_the_device_waits_for_all_of_its_streams(late):
    x = late.asarray(HOST)
    with late.cuda.Stream(non_blocking=True) as other:
        y = late.zeros(6) + 1
    assert other.is_non_blocking
    late.cuda.Device().synchronize()
    assert not stale(x._values)
    assert not stale(y._values)


def test_events(late):
    cuda = late.cuda
    assert cuda.Event().done  # never recorded
    start, end = cuda.Event(), cuda.Event()
    start.record()
    x = late.asarray(HOST)
    end.record()
    with pytest.raises(RuntimeError, match="NotReady"):
        cuda.get_elapsed_time(start, end)
    assert not end.done
    assert stale(x._values)
    end.synchronize()
    assert end.done
    assert not stale(x._values)
    assert cuda.get_elapsed_time(start, end) >= 0
    asked = cuda.get_current_stream().record()
    assert [asked.done, asked.done] == [False, True]  # whoever asks again and again gets there
    with pytest.raises(RuntimeError, match="timing"):
        cuda.get_elapsed_time(start, cuda.Event(disable_timing=True))


# -------------------------------------------------------------------------------------------------- page-locked memory


def test_page_locked_memory_is_read_and_written_when_the_copy_runs(late):
    host = page_locked(late, HOST)
    x = late.empty(6)
    x.set(host)
    host[...] = 9  # used again before the copy
    assert x.get().tolist() == [9] * 6
    y = late.asarray(host)
    done = late.cuda.get_current_stream().record()
    done.synchronize()
    host[...] = 1
    assert y.get().tolist() == [9] * 6
    y.get(out=host, blocking=False)
    assert host.tolist() == [1] * 6  # not there yet
    late.cuda.get_current_stream().synchronize()
    assert host.tolist() == [9] * 6


def test_other_memory_of_the_host_is_copied_before_the_call_returns(late):
    host = HOST.copy()
    x = late.asarray(host)
    y = late.empty(6)
    y.set(host)
    host[...] = 9
    assert x.get().tolist() == y.get().tolist() == HOST.tolist()
    x.get(out=host, blocking=False)
    assert host.tolist() == HOST.tolist()


def test_page_locked_memory_that_nobody_holds_is_somebody_elses(late):
    x = late.empty(6)
    x.set(page_locked(late, HOST))
    assert stale(x.get())


def test_page_locked_memory_as_cupy_has_it(cupy):
    memory = cupy.cuda.alloc_pinned_memory(700)
    assert memory.size() == 1024  # the pool has powers of two
    assert np.frombuffer(memory, np.uint8, 700).ctypes.data == memory.ptr
    whole = cupy.cuda.PinnedMemory(100)
    assert cupy.cuda.PinnedMemoryPointer(whole, 60).size() == 40
    np.frombuffer(cupy.cuda.PinnedMemoryPointer(whole, 0), np.uint8, 100)[60:] = 3
    assert bytes(cupy.cuda.PinnedMemoryPointer(whole, 60)) == b"\3" * 40


# ------------------------------------------------------------------------------------------------- memory of the device


def test_freed_memory_is_taken_in_the_order_of_its_stream(late):
    cuda = late.cuda
    other, host = cuda.Stream(non_blocking=True), page_locked(late, np.zeros(6))
    for waits in (True, False):
        x = late.asarray(HOST) + 1
        other.wait_event(cuda.get_current_stream().record())
        x.get(stream=other, out=host, blocking=False)
        if waits:  # what comes next on the stream of x comes after the copy
            cuda.get_current_stream().wait_event(other.record())
        del x
        late.zeros(6).get()
        other.synchronize()
        assert stale(host) != waits
    y = late.asarray(HOST) + 1
    z = y * 2
    del y  # on the same stream nothing is ahead of the product
    assert z.get().tolist() == [2, 4, 6, 8, 10, 12]


def test_memory_is_counted(cupy):
    pool = cupy.get_default_memory_pool()
    x = cupy.zeros(1000)
    view = x[10:20]
    assert (pool.used_bytes(), pool.total_bytes()) == (8192, 8192)
    y = x + 1
    assert pool.used_bytes() == 16_384
    del x
    assert pool.used_bytes() == 16_384  # the view holds it
    del view, y
    assert (pool.used_bytes(), pool.total_bytes(), pool.free_bytes()) == (0, 16_384, 16_384)
    pool.free_all_blocks()
    assert pool.total_bytes() == 0
    pool.set_limit(size=4096)
    with pytest.raises(MemoryError, match="Out of memory allocating 8,192 bytes"):
        cupy.zeros(1000)


def test_pointers_lead_to_live_arrays(cupy):
    x = cupy.asarray(HOST)
    at = x[2:4].data.ptr
    assert at == x.data.ptr + 16
    assert memory_at(at, 16).view(np.float64).tolist() == [2, 3]
    memory_at(at, 16).view(np.float64)[...] = 7
    assert x.tolist() == [0, 1, 7, 7, 4, 5]
    with pytest.raises(RuntimeError, match="IllegalAddress"):
        memory_at(at, 40)
    del x
    with pytest.raises(RuntimeError, match="IllegalAddress"):
        memory_at(at, 16)


# ------------------------------------------------------------------------------------------------------------ by chance


@pytest.mark.parametrize("seed", range(5))
def test_work_that_runs_by_chance_keeps_what_is_promised(cupy, seed):
    """Rows of sums on two streams that are tied: any order that CUDA allows gives the same."""
    with asynchronous(seed):
        other, host = cupy.cuda.Stream(non_blocking=True), page_locked(cupy, np.zeros(6))
        x = cupy.asarray(HOST)
        for i in range(10):
            x = x + 1
            other.wait_event(cupy.cuda.get_current_stream().record())
            with other:
                y = x * 2
            done = other.record()
            cupy.cuda.get_current_stream().wait_event(done)
            y.get(stream=other, out=host, blocking=False)
            x = y - x
            other.synchronize()
            assert host.tolist() == (2 * (HOST + i + 1)).tolist()


def test_by_chance_work_may_run_before_anybody_waits(cupy):
    found = set()
    for seed in range(20):
        with asynchronous(seed):
            x = cupy.asarray(HOST)
            _ = cupy.zeros(6) + 1
            found.add(stale(x._values))
    assert found == {True, False}


# -------------------------------------------------------------------------------------------------------------- devices


def test_each_thread_has_its_device_and_its_stream(cupy):
    with devices(2):
        cuda, found = cupy.cuda, []

        def other():
            found.append((cuda.Device().id, cuda.get_current_stream() == cuda.Stream.null))

        cuda.Device(1).use()
        try:
            with cuda.Stream() as stream:
                assert stream.device_id == cupy.zeros(3).device.id == 1
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()
                assert cuda.get_current_stream() == stream
            x = cupy.zeros(3)
            with cuda.Device(0):
                with pytest.raises(ValueError, match="array device = 1 while current = 0"):
                    x + 1
                with pytest.raises(ValueError, match="array device = 1 while current = 0"):
                    cupy.RawKernel(CODE, "plus_one")((1,), (3,), (x, x))
                with pytest.raises(RuntimeError, match="does not match"):
                    stream.use()
                assert x.get().tolist() == [0, 0, 0]
        finally:
            cuda.Device(0).use()
        assert found == [(0, True)]
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            cuda.Device(2).use()
        assert cuda.runtime.getDeviceProperties(1)["uuid"] != cuda.runtime.getDeviceProperties(0)["uuid"]


def test_a_machine_without_a_driver(cupy):
    with devices(0):
        assert not cupy.cuda.is_available()
        assert cupy.cuda.runtime.driverGetVersion() == 0
        for asked in (cupy.cuda.runtime.getDeviceCount, lambda: cupy.zeros(1), lambda: cupy.asarray(HOST)):
            with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="InsufficientDriver"):
                asked()


def test_copies_and_fills_are_told_apart(cupy):
    with launches() as launched, crossings() as crossed:
        cupy.asarray(3.0)
        x = cupy.asarray(HOST)
        x.T.get()
        x[::2].get()
    assert launched == {"fill": 1, "copy": 1}
    assert crossed == {"asarray": 1, "get": 2}
