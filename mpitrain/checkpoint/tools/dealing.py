"""How tensors are dealt out over files of nearly equal size.

Think of all tensors laid end to end, in the order of the index, and of that line cut into as many equal parts as there
shall be files:

    |  rank-00000.h5  |  rank-00001.h5  |  rank-00002.h5  |
    | wte    | wpe| blocks.0 ... | blocks.1 ...   | head  |

A cut goes through a tensor between two rows, so files are balanced to within a row; small tensors are not cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from mpitrain.checkpoint.manifest import Logical
from mpitrain.checkpoint.tools.source import Rectangle, nbytes

SMALL = 1 << 16
"""Bytes; a tensor that is smaller is not cut."""


class Share(NamedTuple):
    """Part of a tensor that goes into one file."""

    name: str
    rectangle: Rectangle

    @property
    def shape(self) -> tuple[int, ...]:
        """Its lengths."""
        return tuple(part.stop - part.start for part in self.rectangle)


def deal(tensors: Mapping[str, Logical], num_files: int) -> list[list[Share]]:
    """Deal tensors out over files of nearly equal size, each file a stretch of them; a file may get nothing.

    Args:
        tensors: in their order.
        num_files: how many.
    """
    total = sum(map(nbytes, tensors.values()))
    shares: list[list[Share]] = [[] for _ in range(num_files)]
    at = 0
    for name, tensor in tensors.items():
        size = nbytes(tensor)
        if not size:
            continue
        whole = [slice(0, length) for length in tensor.shape]
        dim = next((dim for dim, length in enumerate(tensor.shape) if length > 1), None)
        first, last = at * num_files // total, (at + size - 1) * num_files // total
        if size < SMALL or dim is None:
            middle = (2 * at + size) * num_files // (2 * total)
            shares[middle].append(Share(name, tuple(whole)))
        else:
            rows = tensor.shape[dim]
            cuts = (round((file * total / num_files - at) * rows / size) for file in range(first + 1, last + 1))
            for file, (start, stop) in zip(range(first, last + 1), pairwise([0, *cuts, rows]), strict=True):
                if start < stop:
                    shares[file].append(Share(name, (*whole[:dim], slice(start, stop), *whole[dim + 1 :])))
        at += size
    return shares
