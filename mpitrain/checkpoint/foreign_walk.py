"""What stands in an HDF5 file, looked at with care: link by link, object by object, before anything is followed.

`foreign` has this done in a child process, for a file that nobody vouches for.  The child is started by its path and
imports nothing of mpitrain.  The file comes as an open descriptor, a request as JSON on standard input; the answer is
JSON on standard output, either what the file holds or why it is refused:

    {"datasets": [["weight/ln.weight", [64], "float32", {"offset": 2048}], ...]}
    {"refused": ["weight/x", "is an external link"]}

First the process gives up what it will not need: memory, time, writing, and, once HDF5 has opened its one file, opening
files at all.  No value is read, nor any attribute: where the bytes of a dataset lie is all that is told.

A checkpoint's files are looked at by the same walk (`describe`), after their sums were compared.
"""

from __future__ import annotations

import json
import math
import re
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

MAX_DEPTH = 8
MAX_OBJECTS = 10**6
MAX_NAME = 1024  # characters of a component
MAX_DIMS = 32
MAX_ATTRIBUTES = 64  # of an object
MAX_ATTRIBUTE = 64 << 10  # bytes
MAX_CHUNK = 16 << 20  # bytes of its values
MAX_CHUNKS = 10**5
MAX_ANSWER = 16 << 20  # bytes
EXPANSION = 100
"""Values may take so many times the bytes of the file: what is compressed well is zeros, and much of it is a bomb."""
ALWAYS_ALLOWED = 64 << 20
"""Values of so many bytes may come from a file of any size."""

COMPONENT = re.compile(r"[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*")  # no dot at an end, and no two in a row
FILTERS = {1: "deflate", 2: "shuffle", 3: "fletcher32"}
DTYPES = (*(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "float16", "float32", "float64")


class Refused(Exception):
    """The file holds what is not accepted: (name of the object, why)."""


def main() -> None:
    """Answer the request on standard input."""
    request = json.load(sys.stdin)
    for limit, value in (
        (resource.RLIMIT_AS, request["memory"]),
        (resource.RLIMIT_CPU, math.ceil(request["seconds"])),
        (resource.RLIMIT_FSIZE, MAX_ANSWER),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    sys.path[:] = request["path"]
    sys.stdout.write(answer(request["descriptor"], request["names"]))
    sys.stdout.flush()


def answer(descriptor: int, names: list[str] | None) -> str:
    """What an open file holds, or why it is refused.  Afterwards this process cannot open files any more."""
    try:
        text = json.dumps({"datasets": list(_look(descriptor, names))})
        if len(text) > MAX_ANSWER:
            raise Refused("", f"is described by {len(text)} bytes; at most {MAX_ANSWER} are allowed")
        return text
    except Refused as refused:
        return json.dumps({"refused": refused.args})
    except MemoryError:
        return json.dumps({"refused": ["", "takes more memory to look at than is allowed"]})
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        return json.dumps({"refused": ["", f"HDF5 cannot read it: {' '.join(str(error).split())[:160]}"]})


def _look(descriptor: int, names: list[str] | None) -> Iterator[list[Any]]:
    """The datasets of an open file, all or those named."""
    import h5py

    plist = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    plist.set_fapl_sec2()
    file = h5py.h5f.open(f"/dev/fd/{descriptor}".encode(), h5py.h5f.ACC_RDONLY, plist)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # whatever the file points to cannot be opened any more
    size = file.get_filesize()
    if file.get_create_plist().get_userblock():
        raise Refused("", "begins with a user block")
    root = h5py.h5g.open(file, b"/")
    _check_attributes(root, "/")
    total = 0
    for name, dataset in _named(root, names) if names is not None else _all(root):
        about = _describe(dataset, name, size)
        total += math.prod(about[1]) * int(re.sub(r"\D", "", about[2])) // 8
        if total > max(EXPANSION * size, ALWAYS_ALLOWED):
            raise Refused(name, f"brings all values to {total} bytes, too many for a file of {size}")
        yield about


def describe(file: Any, names: list[str], size: int) -> Iterator[list[Any]]:
    """Datasets of an open file of so many bytes, one after the other: name, shape, dtype, place.

    Args:
        file: HDF5's identifier of it.
        names: of the datasets.
        size: of the file.

    Raises:
        Refused: one is not there, or not plain.
    """
    import h5py

    for path, dataset in _named(h5py.h5g.open(file, b"/"), names):
        yield _describe(dataset, path, size)


def _all(root: Any) -> Iterator[tuple[str, Any]]:
    """Every dataset below a group, with its name."""
    import h5py

    seen = {h5py.h5o.get_info(root).addr}
    groups = [("", root)]
    while groups:
        above, group = groups.pop()
        inner = []
        for name in _members(group, above, MAX_OBJECTS - len(seen)):
            child, address = _child(group, name, above)
            path = f"{above}{name}"
            if address in seen:
                raise Refused(path, "is another name of an object that has one")
            seen.add(address)
            if isinstance(child, h5py.h5d.DatasetID):
                yield path, child
            else:
                inner.append((f"{path}/", child))
        groups += reversed(inner)


def _named(root: Any, names: list[str]) -> Iterator[tuple[str, Any]]:
    """The datasets of these names."""
    import h5py

    seen: dict[int, str] = {}
    groups: dict[str, Any] = {}  # that were opened on the way
    for path in names:
        node = root
        above, address = "", 0
        for name in path.split("/"):
            if not isinstance(node, h5py.h5g.GroupID):
                raise Refused(above.rstrip("/"), "is not a group")
            inner = f"{above}{name}/"
            if inner in groups:
                node = groups[inner]
            else:
                node, address = _child(node, name, above)
                if isinstance(node, h5py.h5g.GroupID):
                    groups[inner] = node
            above = inner
        if not isinstance(node, h5py.h5d.DatasetID):
            raise Refused(path, "is not a dataset")
        if seen.setdefault(address, path) != path:
            raise Refused(path, f"is another name of {seen[address]}")
        yield path, node


def _members(group: Any, above: str, most: int) -> list[str]:
    """Names in a group, in order; at most so many."""
    names: list[bytes] = []

    def note(name: bytes) -> bool:
        names.append(name)
        return len(names) > most

    group.links.iterate(note)
    if len(names) > most:
        raise Refused(above.rstrip("/"), f"brings the objects to more than {MAX_OBJECTS}")
    return [name.decode("utf-8", "backslashreplace") for name in names]


def _child(group: Any, name: str, above: str) -> tuple[Any, int]:
    """A group or dataset behind a hard link, opened, and its address in the file."""
    import h5py

    path = f"{above}{name}"
    if path.count("/") >= MAX_DEPTH:
        raise Refused(path, f"lies below {MAX_DEPTH} groups; at most {MAX_DEPTH - 1} are allowed")
    if len(name) > MAX_NAME or not COMPONENT.fullmatch(name):
        allowed = f"letters, digits, _ - and single dots, at most {MAX_NAME}"
        raise Refused(path or "/", f"has a name that is not allowed; allowed are {allowed}")
    word = name.encode()
    if not group.links.exists(word):
        raise Refused(path, "is not in it")
    kind = group.links.get_info(word).type
    if kind != h5py.h5l.TYPE_HARD:
        kinds = {h5py.h5l.TYPE_SOFT: "a soft link", h5py.h5l.TYPE_EXTERNAL: "an external link"}
        raise Refused(path, f"is {kinds.get(kind, 'a user-defined link')}; only the file's own objects are read")
    about = h5py.h5o.get_info(group, name=word)
    opened: Callable[[Any, bytes], Any]
    if about.type == h5py.h5o.TYPE_GROUP:
        opened = h5py.h5g.open
    elif about.type == h5py.h5o.TYPE_DATASET:
        opened = h5py.h5d.open
    else:
        raise Refused(path, "is a committed type, neither a group nor a dataset")
    child = opened(group, word)
    _check_attributes(child, path)
    return child, about.addr


def _check_attributes(node: Any, path: str) -> None:
    """Refuse an object with many or huge attributes; none is read."""
    import h5py

    count = h5py.h5a.get_num_attrs(node)
    if count > MAX_ATTRIBUTES:
        raise Refused(path, f"has {count} attributes; at most {MAX_ATTRIBUTES} are allowed")
    for index in range(count):
        size = h5py.h5a.get_info(node, index=index).data_size
        if size > MAX_ATTRIBUTE:
            raise Refused(path, f"has an attribute of {size} bytes; at most {MAX_ATTRIBUTE} are allowed")


def _describe(dataset: Any, path: str, file_size: int) -> list[Any]:
    """Name, shape, dtype and place of a dataset that is plain in every respect."""
    import h5py

    # The layout first: HDF5 opens the sources of a virtual dataset when it is asked for the shape.
    created = dataset.get_create_plist()
    layout = created.get_layout()
    if layout not in (h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED):
        kinds = {h5py.h5d.VIRTUAL: "a virtual dataset", h5py.h5d.COMPACT: "a compact dataset"}
        raise Refused(path, f"is {kinds.get(layout, 'of an unknown layout')}; allowed are contiguous and chunked ones")
    if created.get_external_count():
        raise Refused(path, "keeps its values in another file")
    dtype = _dtype(dataset.get_type(), path)
    space = dataset.get_space()
    if space.get_simple_extent_type() not in (h5py.h5s.SCALAR, h5py.h5s.SIMPLE):
        raise Refused(path, "has no shape")
    if space.get_simple_extent_ndims() > MAX_DIMS:
        raise Refused(path, f"has more than {MAX_DIMS} dims")
    shape = [int(length) for length in space.get_simple_extent_dims()]
    itemsize = int(re.sub(r"\D", "", dtype)) // 8
    nbytes = math.prod(shape) * itemsize
    if nbytes > max(EXPANSION * file_size, ALWAYS_ALLOWED):
        raise Refused(path, f"is said to have {nbytes} bytes, too many for a file of {file_size}")
    if layout == h5py.h5d.CHUNKED:
        return [path, shape, dtype, _chunks(dataset, created, path, shape, itemsize, file_size)]
    if created.get_nfilters():
        raise Refused(path, "is contiguous and has filters")
    offset = dataset.get_offset() if nbytes else 0
    if nbytes and (offset is None or dataset.get_storage_size() != nbytes):
        raise Refused(path, f"has {dataset.get_storage_size()} bytes in the file, its shape needs {nbytes}")
    if offset + nbytes > file_size:
        raise Refused(path, "reaches beyond the end of the file")
    return [path, shape, dtype, {"offset": int(offset)}]


def _dtype(kind: Any, path: str) -> str:
    """NumPy's name of a plain little-endian number."""
    import h5py
    import numpy as np

    if kind.committed():
        raise Refused(path, "has a committed type")
    name = ""
    if kind.get_class() == h5py.h5t.FLOAT:
        name = f"float{8 * kind.get_size()}"
    elif kind.get_class() == h5py.h5t.INTEGER:
        name = f"{'' if kind.get_sign() == h5py.h5t.SGN_2 else 'u'}int{8 * kind.get_size()}"
    if name in DTYPES and kind.equal(h5py.h5t.py_create(np.dtype(name).newbyteorder("<"))):
        return name
    raise Refused(path, "does not hold plain little-endian numbers of 1, 2, 4 or 8 bytes")


def _chunks(dataset: Any, created: Any, path: str, shape: list[int], itemsize: int, file_size: int) -> dict[str, Any]:
    """Filters, chunk shape, and (offset, bytes, mask of left-out filters) of every chunk, in order of coordinates."""
    filters = [created.get_filter(index)[0] for index in range(created.get_nfilters())]
    if unknown := [code for code in filters if code not in FILTERS]:
        raise Refused(path, f"has filter {unknown[0]}; allowed are {', '.join(FILTERS.values())}")
    if len(set(filters)) != len(filters):
        raise Refused(path, "has a filter twice")
    chunk = [int(length) for length in created.get_chunk()]
    size = math.prod(chunk) * itemsize
    if not 0 < size <= MAX_CHUNK:
        raise Refused(path, f"has chunks of {size} bytes; at most {MAX_CHUNK} are allowed")
    grid = [-(-length // part) for length, part in zip(shape, chunk, strict=True)]
    count = math.prod(grid)
    if count > MAX_CHUNKS:
        raise Refused(path, f"has {count} chunks; at most {MAX_CHUNKS} are allowed")
    found: dict[tuple[int, ...], tuple[int, int, int]] = {}
    more = size + size // 64 + 64  # deflate makes what it cannot compress a little longer

    def note(about: Any) -> bool | None:
        place = tuple(int(at) for at in about.chunk_offset)
        inside = all(at % part == 0 and at < length for at, part, length in zip(place, chunk, shape, strict=True))
        within = 0 < about.size <= more and about.byte_offset + about.size <= file_size
        fits = inside and within and place not in found and len(found) < count
        found[place] = (int(about.byte_offset), int(about.size), int(about.filter_mask))
        return None if fits else True

    if count and dataset.chunk_iter(note):
        raise Refused(path, "has a chunk that lies outside of it or of the file, or is too long")
    if len(found) != count:
        raise Refused(path, f"has {len(found)} chunks in the file, its shape needs {count}")
    return {
        "chunk": chunk,
        "filters": [FILTERS[code] for code in filters],
        "chunks": [found[at] for at in sorted(found)],
    }


if __name__ == "__main__":
    main()
