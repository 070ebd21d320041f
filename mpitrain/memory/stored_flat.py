"""Parameters that live in a store: weights, masters and gradients of a rank's shares (ZeRO's stage 3, for 1 rank too).

    forward, backward   a part of the model has its weights fetched ahead, and drops them after (mpitrain.nn.unit)
    gradients           are added to what is in the store as they become final, in every micro-batch
    update              window by window (mpitrain.optim.windows)

So of the weights only those of a few parts are ever here, and of the gradients those of one bucket.

Source: Pudipeddi et al. 2020, L2L, arXiv:2002.05645; Rajbhandari et al. 2021, ZeRO-Infinity, arXiv:2104.07857.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain import kernels
from mpitrain.backend import Array, is_half, wide
from mpitrain.memory.store import Region, Store
from mpitrain.memory.stored_array import Factor, StoredArray
from mpitrain.nn.parameter import Parameter
from mpitrain.nn.share import CutFlat, Share, absent
from mpitrain.spec import slab_shape


class StoredShare(Share):
    """Rows of a parameter that live in a store."""

    __slots__ = ()

    def refresh(self) -> None:
        if self._master is not None:
            self.data.put(0, kernels.narrow(self._master.here().reshape(-1), self.data.dtype))


class StoredFlat(CutFlat):
    """As its base, of stage 3; nothing is here before `live_in`.

    Args:
        parameters, places, axes, dtype, xp, ranks, rank, frozen: as of a `CutFlat`.
        number: among the flats of the model; names regions.
    """

    share_type = StoredShare
    weights: StoredArray
    grads: StoredArray | Array  # of frozen weights an empty array, as they have elsewhere

    def __init__(
        self,
        parameters: Sequence[Parameter],
        places: Sequence[int],
        axes: tuple[str, ...],
        dtype: Any,
        xp: Any,
        *,
        ranks: int,
        rank: int,
        number: int,
        frozen: bool = False,
    ) -> None:
        self._deal_out(parameters, places, axes, xp, 3, ranks, rank)
        self.frozen = frozen
        self.own_grads = None
        self.dtype = np.dtype(dtype)
        self._number = number

    @property
    def regions(self) -> list[Region]:
        """What it needs of a store."""
        own, full = self.own_offsets[-1], wide(self.dtype)
        if self.frozen:
            return [Region(self._name("weights"), own, self.dtype)]
        masters = [Region(self._name("masters"), own, full)] if is_half(self.dtype) else []
        return [Region(self._name("weights"), own, self.dtype), *masters, Region(self._name("gradients"), own, full)]

    def _name(self, what: str) -> str:
        return f"parameters/{self._number}/{what}"

    def live_in(self, store: Store) -> None:
        """Take a store that has its regions."""
        own, full, factor = (self.own_offsets[-1],), wide(self.dtype), Factor()
        self.weights = StoredArray(store, self._name("weights"), 0, own, self.dtype)
        trains = not self.frozen
        has_masters = trains and is_half(self.dtype)
        self._masters = StoredArray(store, self._name("masters"), 0, own, full) if has_masters else None
        self.grads = self.xp.empty(0, full)
        if trains:
            self.grads = StoredArray(store, self._name("gradients"), 0, own, full, factor)
        self._factor = factor
        for p, share, start in zip(self.parameters, self.shares, self.own_offsets, strict=False):
            shape = slab_shape(share.rectangle)
            p.bind(absent(slab_shape(p.rectangle), self.dtype, self.xp), None, None)
            p.visits = True
            master = None if self._masters is None else self._masters.part(start, shape)
            share.bind(self.weights.part(start, shape), master, self.grads.part(start, shape) if trains else None)

    @property
    def updated(self) -> list[Any]:
        return [] if self.frozen else [self.grads]

    def start(self, seed: int) -> None:
        for share in self.shares:
            if share.data.size:
                values = share.init(share.name, share.full_shape, share.rectangle, seed).astype(share.master.dtype)
                share.master[...] = self.xp.asarray(values)
                share.refresh()

    # -- gradients ----------------------------------------------------------------------------------------------------

    def expect_gradients(self, first: int, last: int) -> None:
        """Those of parameters [first, last) will be taken."""
        if self.ranks == 1 and self.shares[first].touched:
            self.grads.prefetch(self.offsets[first], self.offsets[last])

    def take_gradients(self, first: int, last: int) -> None:
        """Have backward go on from the sums of earlier micro-batches, where no other rank adds to them.

        One product then adds to what is there, as it does where gradients are here: in another order bits may differ.
        """
        members = self.parameters[first:last]
        if self.ranks > 1 or not self.shares[first].touched or all(p.touched for p in members):
            return
        found = self.grads.take(self.offsets[first], self.offsets[last])
        for p, view in zip(members, self._whole_views(found, first, last), strict=True):
            if not p.touched:  # else another part uses it as well, and came first
                p.grad, p.touched = view, True

    def _whole_views(self, vector: Array, first: int, last: int) -> list[Array]:
        """Parameters [first, last) in a vector of them."""
        starts = [start - self.offsets[first] for start in self.offsets[first : last + 1]]
        shapes = [slab_shape(p.rectangle) for p in self.parameters[first:last]]
        return [vector[a:b].reshape(shape) for a, b, shape in zip(starts, starts[1:], shapes, strict=False)]

    def packed_grads(self, first: int, last: int) -> Array:
        if self.ranks > 1:
            return super().packed_grads(first, last)
        buffer = self.xp.empty(self.offsets[last] - self.offsets[first], self.grads.dtype)  # nothing travels
        for place, view in zip(range(first, last), self._whole_views(buffer, first, last), strict=True):
            p, share = self.parameters[place], self.shares[place]
            if p.touched:
                view[...] = p.grad
            elif share.touched:  # in an earlier micro-batch only
                view[...] = self.grads.take(self.offsets[place], self.offsets[place + 1]).reshape(view.shape)
            else:
                view[...] = 0
        return buffer

    def expect(self, first: int, last: int) -> None:
        if self.ranks > 1 and self.shares[first].touched:
            own = self.own(first, last)
            self.grads.prefetch(own.start, own.stop)

    def bring(self, first: int, last: int, summed: Array) -> None:
        own, shares = self.own(first, last), self.shares[first:last]
        if not shares[0].touched:
            self._factor.value = 1.0  # a new step
        elif self.ranks > 1:
            summed += self.grads.take(own.start, own.stop)
        at = 0
        for share in shares:
            size = math.prod(share.grad.shape)
            share.grad.squares = kernels.sum_of_squares(summed[at : at + size])
            at += size
        self.grads.put(own.start, summed)

    # -- weights ------------------------------------------------------------------------------------------------------

    def packed_weights(self, first: int, last: int) -> Array:
        own = self.own(first, last)
        return self.weights.take(own.start, own.stop)

    def expect_weights(self, first: int, last: int) -> None:
        """Weights of parameters [first, last) will be asked for."""
        own = self.own(first, last)
        self.weights.prefetch(own.start, own.stop)
