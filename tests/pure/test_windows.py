"""Windows of an update: every element once, fetched ahead, and state that lives elsewhere is looked at as any other."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mpitrain.memory.io_thread import IoThread
from mpitrain.memory.media import HostMemory
from mpitrain.memory.store import MemoryStore, Region, open_store
from mpitrain.memory.stored_array import StoredArray
from mpitrain.nn.materialize import materialize
from mpitrain.nn.parameter import Parameter
from mpitrain.optim import AdamW
from mpitrain.optim.groups import Treatment
from mpitrain.optim.runs import Run
from mpitrain.optim.windows import Vector, pass_over, windows_of

LIKE = np.zeros(0)


def runs_of(*sizes):
    ends = np.cumsum([0, *sizes])
    arrays = [np.zeros(size) for size in sizes]
    return [Run(a, a, None, int(at), Treatment(0.0, 1.0)) for a, at in zip(arrays, ends, strict=False)]


@pytest.mark.parametrize("elements", [1, 3, 7, 100])
def test_windows_have_every_element_once_and_in_order(elements):
    runs = runs_of(5, 1, 12, 2)
    windows = windows_of(runs, elements)
    seen = [run.start + at for cuts in windows for run, start, stop in cuts for at in range(start, stop)]
    assert seen == list(range(20))
    lengths = [sum(stop - start for _, start, stop in cuts) for cuts in windows]
    assert all(length == elements for length in lengths[:-1])
    assert windows_of([], elements) == []


def test_what_is_written_into_a_window_is_kept_and_what_is_only_read_is_not():
    store = open_store("host", [Region("x", 10, np.float64), Region("y", 10, np.float64)], like=LIKE)
    x, y = (StoredArray(store, name, 0, (10,), np.float64) for name in "xy")
    here = np.arange(10.0)
    vectors = ((x, True), (y, False), (here, True))
    windows = [[Vector(of, at, at + 2, is_written) for of, is_written in vectors] for at in range(0, 10, 2)]
    for mine, other, view in pass_over(windows):
        mine += view
        other += 1
        view *= 2
    assert x[...].tolist() == list(range(10))
    assert not y[...].any()
    assert here.tolist() == list(range(0, 20, 2))
    store.close()


class Slow(HostMemory):
    """Takes its time for every read."""

    def read(self, region, offset, into):
        time.sleep(0.004)
        super().read(region, offset, into)


def waited(ahead):
    store = MemoryStore([Region("x", 400, np.float64)], Slow([Region("x", 400, np.float64)]), IoThread(), LIKE)
    array = StoredArray(store, "x", 0, (400,), np.float64)
    for _ in pass_over([[Vector(array, at, at + 10, True)] for at in range(0, 400, 10)], ahead):
        time.sleep(0.006)  # the update of a window
    seconds = store.moved.waited
    store.close()
    return seconds


def test_what_is_fetched_ahead_is_not_waited_for():
    assert waited(1) < 0.5 * waited(0)


def parameters():
    made = [Parameter(name, (4, 3), init=lambda name, full, part, seed: np.ones((4, 3)), decay=True) for name in "ab"]
    materialize(made, {}, {}, 0, np.float64)
    for p in made:
        p.grad[...] = 0.5
        p.touched = True
    return made


@pytest.mark.parametrize(
    ("kind", "value"), [("first_moment", np.nan), ("second_moment", -1.0), ("second_moment", np.inf)]
)
def test_state_that_is_not_sound_is_seen_also_where_it_lives_elsewhere(kind, value):
    store = open_store("host", [Region(name, 24, np.float64) for name in AdamW.kinds], like=LIKE)
    optimizer = AdamW(
        parameters(), keep=lambda name, size, dtype: StoredArray(store, name, 0, (size,), dtype), window=7
    )
    assert optimizer.is_sound(optimizer.look())
    optimizer.step()
    assert optimizer.is_sound(optimizer.look())
    read = store.moved.read
    optimizer.look()
    assert store.moved.read == read  # what was seen as it left is enough
    optimizer.state_dict()[kind]["b"][1, 2] = value
    assert not optimizer.is_sound(optimizer.look())
    store.close()


def test_state_goes_to_a_store_and_comes_from_it_one_tensor_at_a_time():
    store = open_store("host", [Region(name, 24, np.float64) for name in AdamW.kinds], like=LIKE)
    there = AdamW(parameters(), keep=lambda name, size, dtype: StoredArray(store, name, 0, (size,), dtype), window=7)
    here = AdamW(parameters())
    for optimizer in (here, there):
        optimizer.step()
    there.step()
    there.load_state(here.state_dict(), here.updates)
    for kind, of in here.state_dict().items():
        for name, array in of.items():
            np.testing.assert_array_equal(there.state_dict()[kind][name], array)
    here.load_state(there.state_dict(), 1)
    store.close()


def test_numbers_whose_squares_overflow_are_sound_as_they_are_here():
    store = open_store("host", [Region(name, 24, np.float64) for name in AdamW.kinds], like=LIKE)
    there = AdamW(parameters(), keep=lambda name, size, dtype: StoredArray(store, name, 0, (size,), dtype), window=7)
    here = AdamW(parameters())
    for optimizer in (here, there):
        optimizer.state_dict()["first_moment"]["a"][0, 0] = 1e200
        assert optimizer.is_sound(optimizer.look())
    store.close()
