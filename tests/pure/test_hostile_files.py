"""HDF5 files that lead astray: refused by name, in 512 MiB and 5 s of a core, and nothing they point to is opened."""

import os
import tracemalloc
import zlib

import h5py
import hostile_hdf5
import numpy as np
import pytest
from access_trace import opened_in
from confined import outcomes

from mpitrain.checkpoint import foreign, foreign_walk
from mpitrain.checkpoint.unpack import unpack
from mpitrain.errors import CheckpointError

REASONS = {
    "external_link": "weight/x is an external link",
    "external_link_in_the_middle": "weight is an external link",
    "soft_link": "weight/x is a soft link",
    "soft_link_in_the_middle": "weight is a soft link",
    "soft_link_to_nothing": "weight/x is a soft link",
    "user_defined_link": "weight/x is a user-defined link",
    "hard_link_cycle": "weight/x is another name",
    "two_names_of_a_dataset": "weight/x is another name",
    "groups_that_meet_again": "weight/a1 is another name",
    "deep_nesting": "lies below 8 groups",
    "external_storage": "weight/x keeps its values in another file",
    "virtual_dataset": "weight/x is a virtual dataset",
    "virtual_dataset_without_end": "weight/x is a virtual dataset",
    "compact_dataset": "weight/x is a compact dataset",
    "shape_bomb_in_chunks": "weight/x is said to have 274877906944 bytes",
    "shape_bomb_of_one_piece": "weight/x is said to have 274877906944 bytes",
    "chunks_that_are_not_there": "weight/x has 1 chunks in the file, its shape needs 3",
    "huge_chunk": "weight/x has chunks of 1073741824 bytes",
    "decompression_bomb": "weight/x is said to have 536870912 bytes",
    "unknown_filter": "weight/x has filter 12345",
    "filter_of_a_plugin": "weight/x has filter 32000",
    "filter_that_stands_twice": "weight/x has a filter twice",
    "user_block": "begins with a user block",
    "text_of_variable_length": "weight/x does not hold plain",
    "numbers_of_variable_length": "weight/x does not hold plain",
    "object_references": "weight/x does not hold plain",
    "region_references": "weight/x does not hold plain",
    "committed_type": "weight/x has a committed type",
    "committed_type_as_an_object": "weight/x is a committed type",
    "compound": "weight/x does not hold plain",
    "opaque_pickle": "weight/x does not hold plain",
    "truth_values": "weight/x does not hold plain",
    "big_endian_numbers": "weight/x does not hold plain",
    "number_of_no_shape": "weight/x has no shape",
    "huge_attribute": "weight/x has an attribute of 1048576 bytes",
    "many_attributes": "weight/x has 100 attributes",
    **{name: "has a name that is not allowed" for name in hostile_hdf5.TRICKS if name.startswith("name_")},
}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Trick -> its file, all with one bait in a folder of its own."""
    folder = tmp_path_factory.mktemp("hostile")
    bait = folder / "bait" / "bait.h5"
    bait.parent.mkdir()
    hostile_hdf5.make_bait(bait)
    files = {name: folder / f"{name}.h5" for name in hostile_hdf5.TRICKS}
    for name, path in files.items():
        hostile_hdf5.make(name, path, bait)
    return folder, files


def test_each_trick_is_refused_by_name_and_no_bait_is_opened(hostile):
    folder, files = hostile
    assert REASONS.keys() == files.keys()
    with opened_in(folder / "bait") as opened:
        found = outcomes("hostile_calls", [["look_unhindered", str(path)] for path in files.values()])
    assert not opened
    for name, outcome in zip(files, found, strict=True):
        assert outcome.end == "refused", (name, outcome)
        assert REASONS[name] in outcome.text, (name, outcome)


def test_a_trick_is_refused_also_where_only_its_name_is_wanted(hostile):
    folder, files = hostile
    wanted = {name: path for name, path in files.items() if not name.startswith(("name_", "groups_", "two_", "deep_"))}
    with opened_in(folder / "bait") as opened:
        found = outcomes("hostile_calls", [["look", str(path), ["weight/x"]] for path in wanted.values()])
    assert not opened
    for name, outcome in zip(wanted, found, strict=True):
        expected = "weight/x is not a dataset" if name == "hard_link_cycle" else REASONS[name]
        assert outcome.end == "refused", (name, outcome)
        assert expected in outcome.text, (name, outcome)


def test_the_trace_sees_a_victim_open_the_bait(hostile):
    """Of the tests above: they could fail."""
    folder, files = hostile
    baited = sorted(hostile_hdf5.BAITED)
    with opened_in(folder / "bait") as opened:
        found = outcomes("hostile_calls", [["read_naively", str(files[name]), "weight/x"] for name in baited])
    assert opened.count("bait.h5") >= len(baited)
    for name, outcome in zip(baited, found, strict=True):
        assert outcome.end == "returned", (name, outcome)


def test_once_hdf5_has_its_file_no_other_can_be_opened(hostile, tmp_path):
    good, other = tmp_path / "good.h5", tmp_path / "other"
    with h5py.File(good, "w") as file:
        file["a"] = hostile_hdf5.VALUES
    other.write_text("secret")
    (outcome,) = outcomes("hostile_calls", [["look_and_open", str(good), str(other)]])
    assert "Too many open files" in outcome.text


@pytest.mark.parametrize("name", ["external_link", "virtual_dataset_without_end", "decompression_bomb"])
def test_a_user_is_told_which_file_and_why(hostile, name):
    _, files = hostile
    with pytest.raises(CheckpointError) as caught:
        foreign.open_file(files[name])
    assert str(caught.value).startswith(f"{files[name]} is refused: {REASONS[name]}")
    assert len(str(caught.value).splitlines()) <= 5


def test_what_is_no_hdf5_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.h5")
    (tmp_path / "dangling.h5").symlink_to("nothing")
    (tmp_path / "endless.h5").symlink_to("/dev/zero")
    paths = [*hostile_hdf5.not_hdf5(tmp_path), *(tmp_path / f"{name}.h5" for name in ("pipe", "dangling", "endless"))]
    found = outcomes("hostile_calls", [["open_file", str(path)] for path in paths])
    for path, outcome in zip(paths, found, strict=True):
        assert outcome.kind == "CheckpointError", (path, outcome)
        assert outcome.text.startswith(str(path))
        assert len(outcome.text.splitlines()) <= 5


def test_of_a_file_with_odd_things_the_plain_ones_can_be_asked_for(hostile):
    _, files = hostile
    with foreign.open_file(files["object_references"], ["y"]) as file:
        np.testing.assert_array_equal(file.read("y"), hostile_hdf5.VALUES)
    names = ["y/z/w", "../y", "/y", "y/", "y//z", "", ".", "nothing", "y\0", "Y" * 1000]
    found = outcomes("hostile_calls", [["look", str(files["object_references"]), [name]] for name in names])
    assert [outcome.end for outcome in found] == ["refused"] * len(names), found


# ----------------------------------------------------------------------------------------------------------- good files


def _good(path):
    """Every plain kind of dataset, and their values."""
    draw = np.random.default_rng(0)
    values = {}
    with h5py.File(path, "w") as file:

        def put(name, array, **options):
            values[name] = np.asarray(array)
            file.create_dataset(name, data=array, **options)

        for dtype in foreign_walk.DTYPES:
            put(f"dtype/{dtype}", draw.integers(0, 100, (5, 3)).astype(dtype))
        put("number", np.float64(0.1))
        put("nothing", np.zeros((0, 4), np.float16))
        put("a/b/c/d/e/f/g/h", [1, 2, 3])
        put("c/plain", draw.standard_normal((100, 37)), chunks=(13, 8))
        small = draw.integers(-100, 100, (101, 3)).astype(np.int8)
        put("c/grows", small, chunks=(13, 3), fletcher32=True, maxshape=(None, 3))
        put("c/noise", draw.standard_normal((64, 64)), chunks=(64, 64), compression="gzip")  # deflate leaves itself out
        put("c/three", draw.standard_normal((9, 8, 7)).astype(np.float32), chunks=(2, 3, 7), shuffle=True)
        options = {"chunks": (13, 9), "compression": "gzip", "shuffle": True, "fletcher32": True}
        put("c/all", np.arange(3700, dtype=np.uint16).reshape(100, 37), **options)
        put("c/zeros", np.zeros((128, 64), np.float32), **{**options, "chunks": (64, 64)})
        put("c/nothing", np.zeros((0, 4), np.float32), **{**options, "chunks": (2, 2), "maxshape": (None, None)})
        file["number"].attrs["unit"] = "metres"  # of variable length, and never looked at
    return values


def test_plain_files_are_read_as_h5py_reads_them(tmp_path):
    values = _good(tmp_path / "good.h5")
    with foreign.open_file(tmp_path / "good.h5") as file:
        assert file.datasets.keys() == values.keys()
        assert file.total == sum(array.nbytes for array in values.values())
        assert file.nbytes == (tmp_path / "good.h5").stat().st_size
        for name, array in values.items():
            found = file.read(name)
            np.testing.assert_array_equal(found, array, strict=True)
            assert file.datasets[name].nbytes == array.nbytes
            for start, stop in ((1, 3), (5, 30), (0, 0), (7, 9)) if array.ndim and len(array) > 30 else ():
                np.testing.assert_array_equal(file.read(name, start, stop), array[start:stop], strict=True)
        assert file.datasets["dtype/uint8"].stored == 15


def test_a_link_that_the_user_names_is_followed(tmp_path):
    values = _good(tmp_path / "good.h5")
    (tmp_path / "link.h5").symlink_to("good.h5")
    with foreign.open_file(tmp_path / "link.h5", ["number", "a/b/c/d/e/f/g/h"]) as file:
        assert list(file.datasets) == ["number", "a/b/c/d/e/f/g/h"]
        assert file.read("number") == values["number"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda packed: zlib.compress(bytes(1 << 24), 9), "does not end where its shape says"),
        (lambda packed: packed[:-9], "does not end where its shape says"),
        (lambda packed: b"\x00" + packed[1:], "a compressed chunk is damaged"),
        (lambda packed: zlib.compress(bytes(100)), "a chunk has 100 bytes, its shape needs 16384"),
    ],
)
def test_a_chunk_that_is_not_what_its_shape_says_is_refused(tmp_path, change, why):
    """16 MiB of zeros in a chunk of 16 KiB, and what is cut off or changed."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        made = file.create_dataset("a", (64, 64), np.float32, chunks=(64, 64), compression="gzip")
        packed = zlib.compress(np.random.default_rng(0).integers(0, 9, 4096, np.int32).tobytes())
        made.id.write_direct_chunk((0, 0), change(packed))
    with foreign.open_file(path) as file, pytest.raises(CheckpointError, match=f"a cannot be read: .*{why}"):
        file.read("a")


def test_a_checksum_of_a_chunk_is_checked(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("a", data=hostile_hdf5.VALUES, chunks=(3, 4), fletcher32=True)
        about = file["a"].id.get_chunk_info(0)
    with open(path, "r+b") as raw:
        raw.seek(about.byte_offset + 5)
        raw.write(b"\xff")
    with foreign.open_file(path) as file, pytest.raises(CheckpointError, match=r"a cannot be read: .*checksum"):
        file.read("a")


def test_a_file_that_shrinks_under_its_reader_is_an_error(tmp_path):
    values = _good(tmp_path / "good.h5")
    with foreign.open_file(tmp_path / "good.h5") as file:
        os.truncate(tmp_path / "good.h5", 100)
        for name in ("number", "c/plain"):
            assert values[name].size
            with pytest.raises(CheckpointError, match=f"good.h5: {name} cannot be read: .*shorter"):
                file.read(name)


# --------------------------------------------------------------------------------------------------- the child's limits


@pytest.mark.parametrize(("limits", "why"), [({"memory": 64 << 20}, ""), ({"seconds": 0.01}, "longer than 0.04 s")])
def test_a_child_that_needs_more_than_it_has_refuses_the_file(tmp_path, limits, why):
    _good(tmp_path / "good.h5")
    with pytest.raises(CheckpointError, match=f"good.h5 is refused: .*{why}"):
        foreign.open_file(tmp_path / "good.h5", **limits)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"datasets": [["../x", [1], "float32", {"offset": 0}]]},
        {"datasets": [["x", [1], "object", {"offset": 0}]]},
        {"datasets": [["x", [-1], "float32", {"offset": 0}]]},
        {"datasets": [["x", [1 << 61], "float32", {"offset": 0}]]},
        {"datasets": [["x", [1], "float32", {"offset": 997}]]},
        {"datasets": [["x", [1.5], "float32", {"offset": 0}]]},
        {"datasets": [["x", [1], "float32", {"chunk": [1], "filters": [], "chunks": []}]]},
        {"datasets": [["x", [1], "float32", {"chunk": [0], "filters": [], "chunks": []}]]},
        {"datasets": [["x", [1], "float32", {"chunk": [1 << 40], "filters": [], "chunks": [[0, 4, 0]]}]]},
        {"datasets": [["x", [1], "float32", {"chunk": [1], "filters": [], "chunks": [[998, 4, 0]]}]]},
        {"datasets": [["x", [1], "float32", {"chunk": [1], "filters": ["lzf"], "chunks": [[0, 4, 0]]}]]},
        {"datasets": [["y", [1], "float32", {"offset": 0}]]},
    ],
)
def test_a_child_that_was_led_astray_is_not_believed(answer):
    with pytest.raises(CheckpointError, match=r"a.h5 is refused"):
        foreign._believe(answer, ["x"] if answer else None, 1000, "a.h5")
    good = {"datasets": [["x", [1], "float32", {"offset": 996}]]}
    assert list(foreign._believe(good, ["x"], 1000, "a.h5")) == ["x"]


def test_a_group_with_too_many_names_is_not_listed_to_its_end(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(9):
            file[f"x{number}"] = 0
        assert foreign_walk._members(file.id, "", 9) == [f"x{number}" for number in range(9)]
        with pytest.raises(foreign_walk.Refused, match="objects to more than 1000000"):
            foreign_walk._members(file.id, "", 8)


def test_a_chunk_takes_no_more_memory_than_its_shape_says():
    bomb = np.frombuffer(zlib.compress(bytes(1 << 24), 9), np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="does not end where its shape says"):
            unpack(bomb, ("deflate",), 0, (64, 64), np.dtype(np.float32))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
