"""HDF5 files that lead astray whoever opens them: one trick a function, for test_hostile_files.py.

Each function is given an open file, the name of the dataset that a victim will ask for, and the path of a bait: an HDF5
file with datasets `x` and `below/x`, which the trick has HDF5 open, where that is what it does.
"""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)
TRICKS: dict[str, Callable[[h5py.File, str, Path], object]] = {}
BAITED = {"external_link", "external_link_in_the_middle", "external_storage", "virtual_dataset"} | {
    "virtual_dataset_without_end"
}
"""Tricks that point to the bait."""


def trick(function):
    TRICKS[function.__name__] = function
    return function


def make_bait(path):
    with h5py.File(path, "w") as file:
        for name in ("x", "below/x"):
            file[name] = VALUES
        file.create_dataset("endless", data=VALUES, maxshape=(None, 4), chunks=(1, 4))


def make(name, path, bait, dataset="weight/x"):
    """The file of a trick, which hangs the dataset of this name under its hook."""
    options = {"libver": "latest"} if name in ("huge_attribute", "many_attributes") else {}
    if name == "user_block":
        options["userblock_size"] = 512
    with h5py.File(path, "w", **options) as file:
        TRICKS[name](file, dataset, bait)
    if name == "user_defined_link":
        _patch(path, b"\x01\x18\x40", b"\x01\x18\x63", b"\x01\x08\x40", b"\x01\x08\x63")
    if name == "unknown_filter":
        _patch(path, (32000).to_bytes(2, "little"), (12345).to_bytes(2, "little"))


def _patch(path, *pairs):
    data = path.read_bytes()
    changed = data
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        changed = changed.replace(old, new)
    assert changed != data
    path.write_bytes(changed)


def _group(file, dataset):
    above, _, last = dataset.rpartition("/")
    return (file.require_group(above) if above else file), last


# ---------------------------------------------------------------------------------------------------------------- links


@trick
def external_link(file, dataset, bait):
    file[dataset] = h5py.ExternalLink(bait, "/x")


@trick
def external_link_in_the_middle(file, dataset, bait):
    above, _, last = dataset.partition("/")
    assert last
    file[above] = h5py.ExternalLink(bait, "/below")


@trick
def soft_link(file, dataset, bait):
    file["real"] = VALUES
    file[dataset] = h5py.SoftLink("/real")


@trick
def soft_link_in_the_middle(file, dataset, bait):
    above, _, last = dataset.partition("/")
    file[f"real/{last}"] = VALUES
    file[above] = h5py.SoftLink("/real")


@trick
def soft_link_to_nothing(file, dataset, bait):
    file[dataset] = h5py.SoftLink("/nothing")


@trick
def user_defined_link(file, dataset, bait):
    file[dataset] = h5py.ExternalLink("y", "/x")  # `make` changes the number of its kind


@trick
def hard_link_cycle(file, dataset, bait):
    group, last = _group(file, dataset)
    group[last] = group


@trick
def two_names_of_a_dataset(file, dataset, bait):
    file[dataset] = VALUES
    file["again"] = file[dataset]


@trick
def groups_that_meet_again(file, dataset, bait):
    """2^7 paths through 7 groups."""
    group, last = _group(file, dataset)
    for name in "abcdefg":
        below = group.create_group(f"{name}0")
        group[f"{name}1"] = below
        group = below
    group[last] = VALUES


@trick
def deep_nesting(file, dataset, bait):
    group, last = _group(file, dataset)
    for _ in range(500):
        group = group.create_group("g")
    group[last] = VALUES


# -------------------------------------------------------------------------------------------------------------- storage


@trick
def external_storage(file, dataset, bait):
    file.create_dataset(dataset, (3, 4), np.float32, external=[(bait, 0, VALUES.nbytes)])


@trick
def virtual_dataset(file, dataset, bait):
    layout = h5py.VirtualLayout((3, 4), np.float32)
    layout[:] = h5py.VirtualSource(bait, "x", (3, 4))
    file.create_virtual_dataset(dataset, layout)


@trick
def virtual_dataset_without_end(file, dataset, bait):
    """HDF5 opens its source when it is asked for the shape."""
    layout = h5py.VirtualLayout((3, 4), np.float32, maxshape=(None, 4))
    source = h5py.VirtualSource(bait, "endless", (3, 4), maxshape=(None, 4))
    layout[: h5py.h5s.UNLIMITED, :] = source[: h5py.h5s.UNLIMITED, :]
    file.create_virtual_dataset(dataset, layout)


@trick
def compact_dataset(file, dataset, bait):
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_layout(h5py.h5d.COMPACT)
    group, last = _group(file, dataset)
    space = h5py.h5s.create_simple((3, 4))
    h5py.h5d.create(group.id, last.encode(), h5py.h5t.IEEE_F32LE, space, created).write(space, space, VALUES)


@trick
def shape_bomb_in_chunks(file, dataset, bait):
    """256 GiB, of which no chunk was ever written."""
    file.create_dataset(dataset, (1 << 18, 1 << 18), np.float32, chunks=(256, 256))


@trick
def shape_bomb_of_one_piece(file, dataset, bait):
    file.create_dataset(dataset, (1 << 18, 1 << 18), np.float32)


@trick
def chunks_that_are_not_there(file, dataset, bait):
    file.create_dataset(dataset, (3, 4), np.float32, chunks=(1, 4))[1] = 1


@trick
def huge_chunk(file, dataset, bait):
    file.create_dataset(dataset, (3, 4), np.float32, chunks=(1 << 14, 1 << 14), maxshape=(None, None), data=None)


@trick
def decompression_bomb(file, dataset, bait):
    """512 MiB of zeros."""
    bomb = file.create_dataset(dataset, (128, 1 << 20), np.float32, chunks=(1, 1 << 20), compression="gzip")
    packed = zlib.compress(bytes(4 << 20), 9)
    for row in range(128):
        bomb.id.write_direct_chunk((row, 0), packed)


@trick
def unknown_filter(file, dataset, bait):
    file.create_dataset(dataset, data=VALUES, chunks=(3, 4), compression="lzf")  # `make` changes its number


@trick
def filter_of_a_plugin(file, dataset, bait):
    file.create_dataset(dataset, data=VALUES, chunks=(3, 4), compression="lzf")


@trick
def filter_that_stands_twice(file, dataset, bait):
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_chunk((3, 4))
    for _ in range(2):
        created.set_deflate(9)
    group, last = _group(file, dataset)
    space = h5py.h5s.create_simple((3, 4))
    h5py.h5d.create(group.id, last.encode(), h5py.h5t.IEEE_F32LE, space, created).write(space, space, VALUES)


@trick
def user_block(file, dataset, bait):
    file[dataset] = VALUES


# ---------------------------------------------------------------------------------------------------- types, attributes


@trick
def text_of_variable_length(file, dataset, bait):
    file.create_dataset(dataset, data=["a"] * 12, dtype=h5py.string_dtype())


@trick
def numbers_of_variable_length(file, dataset, bait):
    file.create_dataset(dataset, (3, 4), h5py.vlen_dtype(np.float32))


@trick
def object_references(file, dataset, bait):
    file["y"] = VALUES
    file.create_dataset(dataset, (3, 4), h5py.ref_dtype)[:] = file["y"].ref


@trick
def region_references(file, dataset, bait):
    file["y"] = VALUES
    file.create_dataset(dataset, (3, 4), h5py.regionref_dtype)[0, 0] = file["y"].regionref[:1]


@trick
def committed_type(file, dataset, bait):
    file["type"] = np.dtype(np.float32)
    file.create_dataset(dataset, data=VALUES, dtype=file["type"])
    del file["type"]


@trick
def committed_type_as_an_object(file, dataset, bait):
    file[dataset] = np.dtype(np.float32)


@trick
def compound(file, dataset, bait):
    file.create_dataset(dataset, (3, 4), [("a", "<f4"), ("b", "<i4")])


@trick
def opaque_pickle(file, dataset, bait):
    file[dataset] = np.void(b"cposix\nsystem\n(S'touch /tmp/owned'\ntR.")


@trick
def truth_values(file, dataset, bait):
    file[dataset] = VALUES > 3


@trick
def big_endian_numbers(file, dataset, bait):
    file.create_dataset(dataset, data=VALUES.astype(">f4"))


@trick
def number_of_no_shape(file, dataset, bait):
    file.create_dataset(dataset, data=h5py.Empty(np.float32))


@trick
def huge_attribute(file, dataset, bait):
    file[dataset] = VALUES
    file[dataset].attrs["a"] = np.zeros(1 << 20, np.uint8)


@trick
def many_attributes(file, dataset, bait):
    file[dataset] = VALUES
    for number in range(100):
        file[dataset].attrs[f"a{number}"] = number


# ---------------------------------------------------------------------------------------------------------------- names


def _named(name):
    def make_named(file, dataset, bait):
        group, _ = _group(file, dataset)
        space = h5py.h5s.create_simple((3, 4))
        h5py.h5d.create(group.id, name, h5py.h5t.IEEE_F32LE, space).write(space, space, VALUES)

    return make_named


TRICKS |= {
    "name_of_two_dots": _named(b".."),
    "name_with_a_space": _named(b"a b"),
    "name_with_a_colon": _named(b"a:0"),
    "name_of_a_look_alike": _named("\u0445".encode()),
    "name_that_is_not_unicode": _named(b"\xff\xfe"),
    "name_with_a_terminal_code": _named(b"\x1b]0;x\x07"),
    "name_of_2000_letters": _named(b"x" * 2000),
    "name_that_begins_with_a_dot": _named(b".x"),
}


# ------------------------------------------------------------------------------------------------------- no HDF5 at all


def not_hdf5(folder: Path) -> Iterator[Path]:
    """Files that are none, or no file."""
    for name, data in {
        "empty.h5": b"",
        "pickle.h5": b"\x80\x04cposix\nsystem\n.",
        "signature.h5": b"\x89HDF\r\n\x1a\n" + bytes(100),
        "zip.h5": b"PK\x03\x04" + bytes(100),
    }.items():
        (folder / name).write_bytes(data)
        yield folder / name
    yield folder
    yield folder / "nothing.h5"
    yield Path("/dev/zero")
