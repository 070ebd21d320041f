"""Do all ranks hold the same values where they should?  A digest of each value, compared in one small message an axis.

What claims to be Invariant or Replicate on an axis is the same on all its ranks, to the last bit.  Each rank keeps a
list of digests, in the order of its program, which is the program of all; from time to time the ranks compare a digest
of the list.  Only where these differ are the lists exchanged, to find the first value that is not the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpitrain.autograd.lazy import GroupedProduct, Lazy, Product, RowSum
from mpitrain.backend import to_host
from mpitrain.comm.communicator import Communicator


def digest(value: Any, start: int = 0) -> int:
    """CRC-32 of the bytes of an array, or of what a gradient will be made from.

    Cost: about 0.3 ns a byte; arrays that are not contiguous are copied, those on a device to the host.
    """
    if isinstance(value, Product):
        return digest(value.b, digest(value.a, start))
    if isinstance(value, GroupedProduct):
        return digest(value.b, digest(value.a, digest(np.asarray(value.counts, np.int64), start)))
    if isinstance(value, RowSum):
        return digest(value.rows, digest(value.ids, start))
    array = np.ascontiguousarray(to_host(value.array() if isinstance(value, Lazy) else value))
    return zlib.crc32(array.reshape(-1).view(np.uint8).data, start)


class Odd(NamedTuple):
    """The first value that is not the same on all ranks.

    what: its description, as the first rank has it; odd: ranks of the world that hold another value than most;
    others: the ranks that agree.
    """

    what: str
    odd: tuple[int, ...]
    others: tuple[int, ...]


class Digests:
    """The running list of one rank on one axis.

    Args:
        axis: whose ranks should agree.
    """

    def __init__(self, axis: Communicator) -> None:
        self.axis = axis
        self._digests: list[int] = []
        self._whats: list[Callable[[], str]] = []

    def add(self, value: int, what: Callable[[], str]) -> None:
        """Note a digest; `what` describes the value, and is called only where it differs."""
        self._digests.append(value)
        self._whats.append(what)

    def confirm(self) -> Odd | None:
        """Compare what was noted since the last time; collective over the axis.

        Returns:
            The first value that differs, the same on all ranks of the axis; None: all are the same.

        Cost: an all-gather of 16 bytes a rank.
        """
        digests, whats = self._digests, self._whats
        self._digests, self._whats = [], []
        summary = np.array([[len(digests), zlib.crc32(np.array(digests, np.uint32).tobytes())]], np.int64)
        found = self.axis.all_gather(summary)
        if (found == found[0]).all():
            return None
        lists = self.axis.exchange(digests)
        at = next(
            (i for i, row in enumerate(zip(*lists, strict=False)) if len(set(row)) > 1),
            min(len(each) for each in lists),
        )
        here = [each[at] if at < len(each) else None for each in lists]
        what = self.axis.exchange(whats[at]() if at < len(whats) else "")
        most = max(here, key=here.count)  # of several that are held by as many ranks, that of the first
        odd = tuple([rank for rank, value in zip(self.axis.ranks, here, strict=True) if value != most])
        others = tuple([rank for rank in self.axis.ranks if rank not in odd])
        return Odd(next(text for text in what if text), odd, others)
