"""What HDF5's filters did to a chunk, undone with bounds: deflate, shuffle, fletcher32.

A compressed chunk cannot become longer than its shape says, however it was made; HDF5 itself would go on to unpack
until memory is full.  The formats are those of HDF5's manual ("HDF5 File Format Specification", IV.A.2.l, filter
pipeline message).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np


def unpack(
    packed: np.ndarray, filters: Sequence[str], mask: int, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """A chunk's values.

    Args:
        packed: its bytes in the file.
        filters: through which it went, in this order.
        mask: bit i: filter i was left out.
        shape: of the chunk.
        dtype: of its values.

    Raises:
        ValueError: these bytes were not made by these filters from such values.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    data = packed
    for index in reversed(range(len(filters))):
        if mask >> index & 1:
            continue
        if filters[index] == "deflate":
            data = _inflated(data, nbytes + 4)  # a checksum may have been put before
        elif filters[index] == "shuffle":
            data = _unshuffled(data, dtype.itemsize)
        elif filters[index] == "fletcher32":
            data = _verified(data)
        else:
            raise ValueError(f"filter {filters[index]} is not known")
    if data.size != nbytes:
        raise ValueError(f"a chunk has {data.size} bytes, its shape needs {nbytes}")
    return data.view(dtype).reshape(shape)


def fletcher32(data: np.ndarray) -> int:
    """Fletcher's checksum (1982) over big-endian words of 16 bits, as HDF5 takes it."""
    even = data[: data.size // 2 * 2].view(">u2").astype(np.uint64)
    words = np.concatenate([even, data[-1:].astype(np.uint64) << np.uint64(8)]) if data.size % 2 else even
    first = second = 0
    for at in range(0, words.size, 1 << 20):  # sums of so many products of 20 and 16 bits fit into 64
        part = words[at : at + (1 << 20)]
        weights = np.arange(part.size, 0, -1, dtype=np.uint64)
        second += first * part.size + int((part * weights).sum())
        first += int(part.sum())
    return _folded(second) << 16 | _folded(first)


def _folded(total: int) -> int:
    """A sum modulo 65535 as additions with end-around carry leave it: never 0 unless nothing was added."""
    return total % 65535 or (65535 if total else 0)


def _verified(data: np.ndarray) -> np.ndarray:
    """The bytes before a checksum, which they must have."""
    if data.size < 4 or fletcher32(data[:-4]) != int.from_bytes(data[-4:].tobytes(), "little"):
        raise ValueError("a chunk does not have its checksum: it is damaged")
    return data[:-4]


def _unshuffled(data: np.ndarray, itemsize: int) -> np.ndarray:
    """Bytes of which first all first ones of the items came, then all second ones, ..."""
    whole = data.size // itemsize * itemsize
    return np.concatenate([data[:whole].reshape(itemsize, -1).T.reshape(-1), data[whole:]])


def _inflated(data: np.ndarray, most: int) -> np.ndarray:
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(data.tobytes(), most + 1)
    except zlib.error:
        raise ValueError("a compressed chunk is damaged") from None
    if len(plain) > most or not inflate.eof:
        raise ValueError("a compressed chunk does not end where its shape says")
    return np.frombuffer(plain, np.uint8)
