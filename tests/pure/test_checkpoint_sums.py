"""Sums beside whoever moves the bytes: right, in order, not too far behind; where bytes lie; memory of a snapshot."""

import hashlib
import threading
import time
import zlib

import h5py
import numpy as np
import pytest

from mpitrain import disk
from mpitrain.checkpoint import SlabRef, Snapshot, hdf5, sums
from mpitrain.checkpoint.sums import Comparison, Sums
from mpitrain.datasets import lay_out

BLOCKS = [("", b"head"), ("w", b"x" * 70_000), ("w", b"y" * 5), ("", b"gap"), ("v", b"z" * 40_000)]


OTHERS = set()  # threads of a save that another test has left under way


@pytest.fixture(autouse=True)
def _others():
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def ours():
    return [
        thread for thread in threading.enumerate() if thread.name == "sums of a checkpoint" and thread not in OTHERS
    ]


@pytest.mark.parametrize("ahead", [None, 2, 4])
def test_sums_are_those_of_the_blocks_in_their_order(ahead):
    taken = Sums(ahead)
    for name, block in BLOCKS:
        taken.add(name, memoryview(block))
    crcs, sha256 = taken.told()
    assert sha256 == hashlib.sha256(b"".join(block for _, block in BLOCKS)).hexdigest()
    assert crcs["w"] == (zlib.crc32(BLOCKS[1][1]), zlib.crc32(BLOCKS[2][1]))
    assert crcs[""] == (zlib.crc32(b"headgap"),)  # what is no slab has one
    taken.close()
    assert not ours()


def test_a_buffer_may_be_used_again_when_as_many_have_followed_as_sums_may_be_behind(monkeypatch):
    """One that hashes slowly: the buffer that comes round again has been summed by then."""

    class Slow:
        def __init__(self):
            self.seen = []

        def update(self, block):
            time.sleep(0.002)
            self.seen.append(bytes(block))

        def hexdigest(self):
            return b"".join(self.seen)

    monkeypatch.setattr(sums, "sha256", Slow)
    buffers = [bytearray(1) for _ in range(sums.AHEAD + 2)]
    taken = Sums()
    for number in range(50):
        buffers.append(buffers.pop(0))
        buffers[0][0] = number
        taken.add("w", memoryview(buffers[0]))
    assert taken.told()[1] == bytes(range(50))


def test_sums_that_are_given_up_end_at_once(monkeypatch):
    """As after a disk that is full: nobody waits for the sums of what was not written."""
    monkeypatch.setattr(sums, "sha256", lambda: type("Slow", (), {"update": lambda *_: time.sleep(0.05)})())
    taken = Sums(None)
    for _ in range(100):
        taken.add("w", memoryview(b"x"))
    began = time.perf_counter()
    taken.close()
    taken.close()
    assert time.perf_counter() - began < 2
    assert not ours()


@pytest.mark.parametrize("size", [10, 2 * sums.SMALL])
def test_a_block_that_differs_is_told_at_the_latest_at_the_end(size):
    good, bad = memoryview(b"a" * size), memoryview(b"b" * size)
    comparison = Comparison()

    def compare():
        for number, block in enumerate([good, good, bad, good, bad]):
            comparison.add(block, zlib.crc32(good), lambda number=number: ValueError(f"block {number}"))
        comparison.finish()

    with pytest.raises(ValueError, match="block 2"):
        compare()
    comparison.close()
    right = Comparison()
    right.add(good, zlib.crc32(good), AssertionError)
    right.finish()
    assert not ours()


def test_what_describes_values_lies_before_them_and_values_are_the_array_s(tmp_path):
    """Large ones begin at a page; the rest lies where there is room."""
    random = np.random.default_rng(0)
    shapes = {"weight/a": (3,), "weight/b": (300, 200), "state/a": (), "state/b": (200, 300)}
    arrays = {name: random.random(shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["state/b"] = np.ascontiguousarray(arrays["state/b"]).T  # not contiguous: its bytes are copied
    parts = [hdf5.Part(name, a, tuple(slice(0, n) for n in a.shape)) for name, a in arrays.items()]
    written = hdf5.write(tmp_path / "x.h5", parts)
    data = (tmp_path / "x.h5").read_bytes()
    offsets = {name: offset for name, (offset, _) in written.slabs.items()}
    assert [offsets[name] % hdf5.ALIGNED for name in ("weight/b", "state/b")] == [0, 0]
    for name, offset in offsets.items():
        assert data[offset : offset + arrays[name].nbytes] == arrays[name].tobytes()
    with h5py.File(tmp_path / "x.h5") as file:
        for name, array in arrays.items():
            np.testing.assert_array_equal(file[name][()], array)
    assert written.entry.sha256 == hashlib.sha256(data).hexdigest()


def test_a_file_of_many_tensors_has_its_metadata_in_two_pieces(tmp_path):
    """In front, and what HDF5 allocates when the file is closed: not one at each tensor."""
    parts = [hdf5.Part(f"weight/{n}", np.full(1 << 14, n, np.float64), (slice(0, 1 << 14),)) for n in range(40)]
    written = hdf5.write(tmp_path / "x.h5", parts)
    offsets = {name: offset for name, (offset, _) in written.slabs.items()}
    between = [e for e in hdf5.extents(offsets, dict.fromkeys(offsets, 1 << 17), written.entry.nbytes) if not e[2]]
    assert len(between) <= 2
    assert between[0][0] == 0


@pytest.mark.parametrize("first", [True, False])
def test_values_that_are_laid_out_have_their_room(tmp_path, first):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        datasets = [("a", (3, 4), np.float64), ("none", (0, 4), np.float32), ("b", (), np.int64)]
        offsets = lay_out(file, datasets, metadata_first=first)
        assert sorted(offsets) == ["a", "b"]
        assert file["a"].id.get_storage_size() == 96
    assert (tmp_path / "x.h5").stat().st_size >= max(offsets["a"] + 96, offsets["b"] + 8)


def test_a_hint_to_the_disk_changes_nothing(tmp_path):
    path = tmp_path / "x"
    file = disk.create(path)
    disk.write(file, path, b"a" * 100_000, 0)
    disk.begin_sync(file, 0, 100_000)
    disk.sync(file, path)
    assert path.read_bytes() == b"a" * 100_000


def test_a_snapshot_copies_into_the_memory_that_was_reserved_and_its_copies_are_their_own():
    slabs = [
        SlabRef("w", (4, 3), (slice(0, 4), slice(0, 3)), np.arange(12.0).reshape(4, 3), (0, 1)),
        SlabRef("others", (4,), (slice(0, 4),), np.ones(4), None),
    ]
    snapshot = Snapshot()
    snapshot.reserve(slabs)
    part = hdf5.Part("w", slabs[0].array, slabs[0].written)
    first = snapshot.take(part).array
    np.testing.assert_array_equal(first, slabs[0].array)
    assert not any(thread.name == "memory of a snapshot" for thread in threading.enumerate())
    slabs[0].array[...] = 7
    assert first[0, 1] == 1
    assert snapshot.take(part).array is first
    assert first[0, 1] == 7
