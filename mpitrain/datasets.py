"""Contiguous HDF5 datasets whose bytes are moved past HDF5.

h5py lays datasets out and closes the file; after that every byte of a dataset has its place, and goes there by
`os.pwrite`: no lock of HDF5's, and Python's is left alone.  What the file then holds, any HDF5 tool shows.

h5py is imported when the first file is laid out, not before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from mpitrain.backend import is_half


def lay_out(
    file: Any, datasets: Iterable[tuple[str, tuple[int, ...], Any]], *, metadata_first: bool = False
) -> dict[str, int]:
    """Make datasets, with room for their values but none written.

    Args:
        file: an `h5py.File`, open to write.
        datasets: path-like name, shape and dtype of each; bfloat16 becomes uint16, which HDF5 has.  Those without
            elements are left out: they take no place.
        metadata_first: values lie together behind all that describes them, which can then be read at once; it takes a
            value of each to be written, a zero.

    Returns:
        name -> where in the file its bytes begin.
    """
    import h5py

    space = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    space.set_layout(h5py.h5d.CONTIGUOUS)
    space.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE if metadata_first else h5py.h5d.ALLOC_TIME_EARLY)
    space.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    space.set_obj_track_times(False)  # the same values make the same file
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    kinds: dict[Any, tuple[Any, Any]] = {}  # dtype -> the stored one, as HDF5 knows it, and a zero of it
    made = []
    for name, shape, dtype in datasets:
        if 0 in shape:
            continue
        if dtype not in kinds:
            stored = np.dtype(dtype)
            stored = np.dtype(np.uint16) if is_half(stored) and stored.kind != "f" else stored
            kinds[dtype] = h5py.h5t.py_create(stored, logical=True), np.zeros(1, stored)
        extent = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
        dataset = h5py.h5d.create(file.id, name.encode(), kinds[dtype][0], extent, dcpl=space, lcpl=links)
        made.append((name, dataset, extent, len(shape), *kinds[dtype]))
    one = h5py.h5s.create_simple((1,))
    for _, dataset, extent, dims, kind, zero in made if metadata_first else ():
        if dims:
            extent.select_hyperslab((0,) * dims, (1,) * dims)
        dataset.write(one, extent, zero, kind)  # the first value: now it is given its place
    return {name: dataset.get_offset() for name, dataset, *_ in made}
