"""Stores: what is got is what was put, whoever is faster; room is there from the start, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import threading
import time

import h5py
import numpy as np
import pytest

from mpitrain.errors import ConfigError, StoreError
from mpitrain.events import listen
from mpitrain.memory import store_file
from mpitrain.memory.io_thread import READ, WRITE, IoThread, Job
from mpitrain.memory.store import MemoryStore, Region, Resident, open_store
from mpitrain.memory.store_file import PREFIX, sweep
from mpitrain.memory.stored_array import StoredArray

LIKE = np.zeros(0)
REGIONS = [Region("a/x", 1000, np.float32), Region("b", 5000, np.float64), Region("none", 0, np.float64)]


@pytest.fixture(params=["device", "host", "hdf5"])
def store(request, tmp_path):
    made = open_store(request.param + f":{tmp_path}" * (request.param == "hdf5"), REGIONS, like=LIKE, pending=20_000)
    yield made
    made.close()


def test_what_is_got_is_what_was_put_last_in_any_order_of_calls(store):
    rng, truth = np.random.default_rng(0), np.zeros(5000)
    for turn in range(300):
        at, size = int(rng.integers(0, 4000)), int(rng.integers(1, 1000))
        if turn % 2:
            store.prefetch("b", at, at + size)
        values = rng.random(size)
        place = int(rng.integers(0, 4000))
        store.put("b", place, values.copy())
        truth[place : place + size] = values
        if turn % 3:
            store.prefetch("b", at, at + size)
        np.testing.assert_array_equal(store.get("b", at, at + size), truth[at : at + size])
    store.flush()
    np.testing.assert_array_equal(store.get("b", 0, 5000), truth)


def test_several_arrays_go_and_come_in_one_go(store):
    parts = [(10, np.arange(5.0)), (2000, np.arange(3.0) + 7), (100, np.zeros(0))]
    store.put_each("b", [(at, array.copy()) for at, array in parts])
    store.prefetch_each("b", [(2000, 2003), (10, 15)])
    later, first = store.get_each("b", [(2000, 2003), (10, 15)])
    assert later.tolist() == [7, 8, 9]
    assert first.tolist() == [0, 1, 2, 3, 4]
    assert store.get_each("b", []) == []
    assert store.get("none", 0, 0).size == 0


def test_it_reads_into_the_array_that_is_given(store):
    store.put("b", 0, np.arange(10.0))
    out = np.empty(4)
    store.prefetch("b", 3, 7, out=out)
    assert store.get("b", 3, 7, out=out) is out
    assert out.tolist() == [3, 4, 5, 6]
    other = np.empty(4)
    store.prefetch("b", 3, 7)
    assert store.get("b", 3, 7, out=other) is other
    assert other.tolist() == out.tolist()


def test_a_stored_array_is_an_array_for_whoever_takes_it_whole(store):
    store.put("b", 0, np.arange(5000.0))
    array = StoredArray(store, "b", 100, (4, 5), np.float64)
    np.testing.assert_array_equal(np.asarray(array), np.arange(100.0, 120).reshape(4, 5))
    assert (array.shape, array.size, array.ndim, len(array), array.nbytes) == ((4, 5), 20, 2, 4, 0)
    array[1:3, 2] = 7.0
    assert array[1, 2] == 7.0
    assert array.part(7, (2,))[0] == 7.0
    assert array[0, 0] == 100.0
    array[...] = np.ones((4, 5))
    assert array.squares == 20.0
    assert array.part(5, (5,)).adjoins(array.part(0, (5,)))
    assert not array.part(6, (5,)).adjoins(array.part(0, (5,)))
    assert not array.adjoins(np.zeros(3))


class Gate:
    """A medium whose work waits until it is let through."""

    def __init__(self):
        self.open, self.log = threading.Event(), []

    def job(self, kind, name, after=()):
        def work():
            self.open.wait()
            self.log.append(name)

        return Job(kind, name, 1, work, after)


def test_reads_come_first_but_after_the_writes_of_what_they_read():
    gate, io = Gate(), IoThread()
    held = io.submit(gate.job(WRITE, "held"))
    time.sleep(0.05)  # it is under way
    writes = [io.submit(gate.job(WRITE, f"w{n}")) for n in range(3)]
    free = io.submit(gate.job(READ, "free"))
    bound = io.submit(gate.job(READ, "bound", after=[writes[1]]))
    gate.open.set()
    for job in (held, *writes, free, bound):
        io.wait(job)
    assert gate.log == ["held", "free", "w0", "w1", "bound", "w2"]
    io.close()


def test_a_put_waits_while_too_much_is_to_be_written():
    class Slow:
        written = 0

        def write(self, region, offset, data):
            time.sleep(0.02)
            self.written += data.nbytes

        def close(self):
            pass

    medium = Slow()
    store = MemoryStore([Region("x", 1000, np.float64)], medium, IoThread(), LIKE, pending=1600)
    for at in range(0, 1000, 100):
        store.put("x", at, np.zeros(100))
        assert at * 8 + 800 - medium.written <= 1600 + 800  # the one that is under way counts until it is done
    store.close()


def test_what_was_moved_is_counted_and_told(store):
    heard = []
    with listen(heard.append):
        store.put("b", 0, np.zeros(100))
        store.get("b", 0, 50)
        store.flush()
    if isinstance(store, Resident):
        assert store.moved.read == store.moved.written == 0
        assert not heard
        return
    assert (store.moved.read, store.moved.written) == (400, 800)
    assert [(e.kind, e.phase, e.info["kind"], e.info["nbytes"]) for e in heard] == [
        ("copy", "end", "write", 800),
        ("copy", "end", "read", 400),
    ]
    assert all(e.info["stop"] >= e.info["start"] for e in heard)


# -- files ------------------------------------------------------------------------------------------------------------


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_file_is_plain_hdf5_with_room_for_all_and_goes_at_the_end(tmp_path):
    store = open_store(f"hdf5:{tmp_path}", REGIONS, like=LIKE, rank=3)
    (name,) = files(tmp_path)
    assert name.startswith(f"{PREFIX}rank-00003-")
    path = tmp_path / name
    assert path.stat().st_blocks * 512 >= 4000 + 40000
    store.put("b", 7, np.arange(3.0))
    store.flush()
    with h5py.File(path, "r", locking=False) as file:
        assert file["b"][6:11].tolist() == [0, 0, 1, 2, 0]
        assert file["a/x"].dtype == np.float32
        assert "none" not in file
    store.close()
    assert files(tmp_path) == []


def test_files_whose_process_is_gone_are_swept_and_no_others(tmp_path):
    store = open_store(f"hdf5:{tmp_path}", REGIONS, like=LIKE)
    (kept,) = files(tmp_path)
    stale, other = tmp_path / f"{PREFIX}rank-00000-dead.h5", tmp_path / "mine.h5"
    for path in (stale, other):
        path.write_bytes(b"x")
    assert sweep(tmp_path) == [stale]
    assert files(tmp_path) == sorted([kept, "mine.h5"])
    store.close()


def refusing(number, after=0):
    calls = iter(range(10**9))

    def call(*_):
        if next(calls) >= after:
            raise OSError(number, os.strerror(number))
        return 0

    return call


def test_a_disk_without_room_is_said_at_the_start_and_no_file_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", refusing(errno.ENOSPC))
    with pytest.raises(StoreError, match=r"rank 5 on \S+ needs 0\.00 GiB there, where .* GiB are free: No space left"):
        open_store(f"hdf5:{tmp_path}", REGIONS, like=LIKE, rank=5)
    assert files(tmp_path) == []


@pytest.mark.parametrize(("folder", "why"), [("file", "it is no folder"), ("file/in", "Not a directory")])
def test_a_folder_that_cannot_be_used_is_said(tmp_path, folder, why):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=rf"rank 0 on \S+ cannot make its file there: {why}"):
        open_store(f"hdf5:{tmp_path}/{folder}", REGIONS, like=LIKE)


@pytest.mark.parametrize("error", [OSError("errno = 28"), RuntimeError("errno = 28"), ValueError("errno = 28")])
def test_what_hdf5_refuses_is_said_and_no_file_stays(tmp_path, monkeypatch, error):
    def refuse(*_):
        raise error

    monkeypatch.setattr(store_file, "_lay_out", refuse)
    with pytest.raises(StoreError, match="cannot make its file there: errno = 28"):
        open_store(f"hdf5:{tmp_path}", REGIONS, like=LIKE)
    assert files(tmp_path) == []


def test_a_folder_may_be_named_from_home_and_is_made_if_it_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    open_store("hdf5:~/new/deep", REGIONS, like=LIKE).close()
    assert files(tmp_path / "new") == ["deep"]


def test_two_runs_may_share_a_folder(tmp_path):
    one, other = (open_store(f"hdf5:{tmp_path}", REGIONS, like=LIKE) for _ in range(2))
    assert len(files(tmp_path)) == 2
    for number, store in enumerate((one, other)):
        store.put("b", 0, np.full(5, float(number)))
    assert [store.get("b", 0, 5).tolist() for store in (one, other)] == [[0.0] * 5, [1.0] * 5]
    one.close()
    assert other.get("b", 0, 1) == 1
    other.close()
    assert files(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_later_is_an_error_of_the_next_call(tmp_path, monkeypatch, number):
    store = open_store(f"hdf5:{tmp_path}", REGIONS, like=LIKE)
    monkeypatch.setattr(os, "pwritev", refusing(number))
    store.put("b", 0, np.zeros(5))
    with pytest.raises(StoreError, match=rf"cannot be used any more: {os.strerror(number)}"):
        store.get("b", 0, 5)
    with pytest.raises(StoreError):
        store.put("b", 0, np.zeros(5))
    store.close()
    assert files(tmp_path) == []


def test_a_file_that_was_cut_short_is_an_error(tmp_path):
    store = open_store(f"hdf5:{tmp_path}", REGIONS, like=LIKE)
    os.truncate(tmp_path / files(tmp_path)[0], 100)
    with pytest.raises(StoreError, match="shorter than it was"):
        store.get("b", 0, 5000)
    store.close()


@pytest.mark.parametrize("where", ["disk", "hdf5:", "host:x", "hdf5"])
def test_a_place_that_is_none_is_refused(where):
    with pytest.raises(ConfigError, match="must be host, or hdf5:DIR"):
        open_store(where, REGIONS, like=LIKE)
