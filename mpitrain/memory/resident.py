"""A store in the memory where one computes: for what is written for a store, where nothing has to leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain.backend import Array, array_module
from mpitrain.memory.io_thread import Moved
from mpitrain.memory.media import Region


class Resident:
    """A store from which nothing moves.

    What `get` gives are the elements themselves, and putting them back is nothing.

    Args:
        regions: all of them.
        like: an array of the kind that it gives.
    """

    def __init__(self, regions: Sequence[Region], like: Array) -> None:
        self.regions = {region.name: region for region in regions}
        self._xp = xp = array_module(like)
        self._arrays = {region.name: xp.zeros(region.elements, region.dtype) for region in regions}
        self.moved = Moved()

    def put_each(self, region: str, parts: Sequence[tuple[int, Array]]) -> None:
        for start, array in parts:
            self.put(region, start, array)

    def put(self, region: str, start: int, array: Array) -> None:
        self._arrays[region][start : start + array.size] = array.reshape(-1)

    def prefetch(self, region: str, start: int, stop: int, out: Array | None = None) -> None:
        pass

    def get(self, region: str, start: int, stop: int, out: Array | None = None) -> Array:
        found = self._arrays[region][start:stop]
        if out is None:
            return found
        out[...] = found
        return out

    def prefetch_each(self, region: str, spans: Sequence[tuple[int, int]]) -> None:
        pass

    def get_each(self, region: str, spans: Sequence[tuple[int, int]]) -> list[Array]:
        return [self._arrays[region][start:stop] for start, stop in spans]

    def room(self, elements: int, dtype: Any) -> Array:
        return self._xp.empty(elements, dtype)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._arrays.clear()
