"""All that a rank has elsewhere: one store, sized before the first step.

parameters     weights, masters and gradients of its shares     flats that live there (stored_flat.py)
optimizer      moments, and masters of halves                   vectors for the optimizer, window by window
activations    what waits for backward                          a policy for tapes (offload.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.backend import Array, wide
from mpitrain.memory.store import Region, Store
from mpitrain.memory.stored_array import StoredArray
from mpitrain.memory.stored_flat import StoredFlat
from mpitrain.nn.parameter import Flat, Parameter

ZEROS = 2**18
"""Elements that are made zero at a time."""


class Home:
    """The store of a rank, and what is to live there.

    Args:
        open: makes the store from its regions; where ranks could fail apart it has them agree.
        kinds: of optimizer state that live there (`Optimizer.kinds`); none: it lies beside the weights.
        masters: whether masters of halves do, where the weights themselves are here.
        others: regions besides.

    Attributes:
        store: after `take_in`.
    """

    store: Store
    flat = StoredFlat
    """Makes a flat whose parameters will live in the store."""

    def __init__(
        self,
        open: Callable[[Sequence[Region]], Store],
        *,
        kinds: Sequence[str] = (),
        masters: bool = False,
        others: Sequence[Region] = (),
    ) -> None:
        self._open = open
        self._kinds = tuple(kinds)
        self._masters = masters
        self._others = tuple(others)
        self._given: set[str] = set()

    def take_in(self, flats: Sequence[Flat]) -> None:
        """Open the store, with room for all that shall live there; what has values already brings them."""
        regions = [region for flat in flats if isinstance(flat, StoredFlat) for region in flat.regions]
        moving = [flat for flat in flats if self._moves_masters(flat)]
        for number, flat in enumerate(moving):
            regions.append(Region(_masters(number), flat.masters.size, flat.masters.dtype))
        count = sum(_size(share) for flat in flats if not flat.frozen for share in flat.shares)
        dtypes = [flat.dtype if isinstance(flat, StoredFlat) else flat.weights.dtype for flat in flats]
        dtype = wide(dtypes[0]) if dtypes else np.dtype(np.float64)  # masters have one dtype
        regions += [Region(_state(kind), count, dtype) for kind in self._kinds]
        self.store = self._open([*regions, *self._others])
        for flat in flats:
            if isinstance(flat, StoredFlat):
                flat.live_in(self.store)
        for number, flat in enumerate(moving):
            self._move_masters(flat, number)
        self.store.flush()

    def keep(self, kind: str, elements: int, dtype: Any) -> StoredArray:
        """A vector of zeros for the state of an optimizer."""
        vector = StoredArray(self.store, _state(kind), 0, (elements,), dtype)
        if kind in self._given:  # to an optimizer before
            for start in range(0, elements, ZEROS):
                zeros = vector.room(min(ZEROS, elements - start))  # where one computes: a store takes no other arrays
                zeros[...] = 0
                vector.put(start, zeros)
        self._given.add(kind)
        return vector

    def close(self) -> None:
        """Give the store back."""
        if hasattr(self, "store"):
            self.store.close()

    def _moves_masters(self, flat: Flat) -> bool:
        return self._masters and not isinstance(flat, StoredFlat) and flat.masters is not flat.weights

    def _move_masters(self, flat: Flat, number: int) -> None:
        vector = StoredArray(self.store, _masters(number), 0, (flat.masters.size,), flat.masters.dtype)
        at = 0
        for share in flat.shares:
            master: Array = share.master
            vector.put(at, master.reshape(-1).copy())
            share.bind(share.data, vector.part(at, master.shape), share.grad)
            at += master.size
        flat.move_masters(vector)


def _size(share: Parameter) -> int:
    """Elements of what a rank updates of a parameter."""
    return int(np.prod([part.stop - part.start for part in share.rectangle], dtype=np.int64))


def _masters(number: int) -> str:
    return f"optimizer/masters/{number}"


def _state(kind: str) -> str:
    return f"optimizer/{kind}"
