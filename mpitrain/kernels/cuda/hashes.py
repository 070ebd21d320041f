"""Hashes of rows: `csrc/hashes.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels import reference
from mpitrain.kernels.cuda.arrays import solid
from mpitrain.kernels.cuda.launch import THREADS, blocks_for, launch

_ANY = np.dtype(np.float32)  # the kernel has no numbers of a precision


def hash_rows(first: Array, key: Any, *more: Array) -> Array:
    vectors = first, *more
    fits = all(type(x) is type(first) and x.dtype == np.int64 and x.ndim == 1 for x in vectors)
    if not fits or np.ndim(key) or len(more) not in (1, 2):
        return reference.hash_rows(first, key, *more)
    shape = tuple(x.size for x in vectors)
    rows = array_module(first).empty(shape, np.uint64)
    pointers = [*map(solid, vectors), None][:3]
    sizes = rows.size, shape[1], shape[2] if len(more) == 2 else 1
    blocks = blocks_for(rows.size) if rows.size else 0
    launch("hashes", "hash_rows", _ANY, blocks, THREADS, np.uint64(key), *pointers, rows, *sizes)
    return rows
