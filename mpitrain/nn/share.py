"""Shares: of each parameter the rows that this rank updates, where ranks deal them out (ZeRO).

Ranks that would all hold the same weights, gradients and optimizer state keep each a part of them instead:

    stage 1    whole weights, whole gradients     masters and optimizer state of its own rows
    stage 2    whole weights                      gradients too: whole ones are there until they were sent
    stage 3                                       weights too: whole ones are there while a part of the model works

A share looks like a parameter: its rectangle is smaller, and its spec says Shard(0) on the axes over which the
parameter is dealt out.  So optimizers, norms and checkpoints take shares as they take parameters, and know nothing of
ZeRO.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5; there slices of one flat buffer, here rows of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpitrain import kernels
from mpitrain.backend import Array, array_module, is_half, wide
from mpitrain.nn.parameter import Flat, Parameter
from mpitrain.nn.rows import Rows, assign_rows
from mpitrain.spec import slab_shape

STAGES = (0, 1, 2, 3)


class Share(Parameter):
    """This rank's rows of a parameter; there may be none.

    Args:
        whole: the parameter, whose rectangle is known.
        rows: of that rectangle.
        axes: over which it is dealt out.
    """

    __slots__ = ("rows", "whole")

    def __init__(self, whole: Parameter, rows: Rows, axes: Sequence[str]) -> None:
        spec = whole.spec.by_rows(axes)
        super().__init__(whole.name, whole.full_shape, spec, init=whole.init, decay=whole.decay)
        self.whole, self.rows = whole, rows
        self.in_full, self.outside, self.frozen = whole.in_full, whole.outside, whole.frozen
        first, *others = whole.rectangle
        self.rectangle = (slice(first.start + rows[0], first.start + rows[1]), *others)
        self.writes = whole.writes


class CutFlat(Flat):
    """Values and gradients of parameters of which each rank keeps its rows.

    Args:
        parameters, places, axes, dtype: as of a `Flat`.
        stage: 1, 2 or 3.
        ranks: of the merge of the axes.
        rank: this one among them.
        frozen: whether nobody trains them.

    Attributes:
        shares: of the parameters, in their order.
        ranges: rank -> of each parameter the elements (start, stop) that this rank keeps, counted in the parameter.
        own_offsets: where each share begins in what is kept of it alone.
        own_grads: gradients of the shares, one after the other; None in stage 1, where they are views of whole ones.

    What is frozen is dealt out in stage 3 alone, for its weights: it has no gradients and no masters (`frozen`).
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        places: Sequence[int],
        axes: tuple[str, ...],
        dtype: Any,
        xp: Any,
        *,
        stage: int,
        ranks: int,
        rank: int,
        frozen: bool = False,
    ) -> None:
        self._deal_out(parameters, places, axes, xp, stage, ranks, rank)
        self.frozen = frozen
        shapes = [slab_shape(p.rectangle) for p in self.parameters]
        own, whole = self.own_offsets[-1], self.offsets[-1]
        half = is_half(dtype) and not frozen
        self.weights = xp.empty(whole if stage < 3 else own, dtype)
        self._masters = xp.empty(own, wide(dtype)) if half else None
        self.grads = xp.zeros(0 if frozen else whole if stage == 1 else own, wide(dtype))
        self.own_grads = None if stage == 1 else self.grads
        whole_weights = self.views(self.weights) if stage < 3 else [absent(shape, dtype, xp) for shape in shapes]
        whole_grads = self.views(self.grads) if stage == 1 else [None] * len(shapes)
        masters = self._own_views(self._masters) if self._masters is not None else [None] * len(shapes)
        own_weights = self._own_views(self.weights) if stage == 3 else None
        own_grads = self._own_views(self.grads) if stage > 1 and not frozen else None
        for place, (p, share) in enumerate(zip(self.parameters, self.shares, strict=True)):
            assert isinstance(share, Share)
            p.bind(whole_weights[place], None, whole_grads[place])
            p.visits = stage == 3
            rows = slice(*share.rows)
            grad = None if frozen else own_grads[place] if own_grads is not None else p.grad[rows]
            share.bind(own_weights[place] if own_weights is not None else p.data[rows], masters[place], grad)

    share_type: type[Share] = Share

    def _deal_out(
        self,
        parameters: Sequence[Parameter],
        places: Sequence[int],
        axes: tuple[str, ...],
        xp: Any,
        stage: int,
        ranks: int,
        rank: int,
    ) -> None:
        """Which rows of which parameter are whose, and where they lie; takes no memory."""
        self.parameters, self.places, self.axes = tuple(parameters), tuple(places), axes
        self.stage, self.ranks, self.rank, self.xp = stage, ranks, rank, xp
        shapes = [slab_shape(p.rectangle) for p in self.parameters]
        table = rows_of(self.parameters, ranks)
        widths = [math.prod(shape[1:]) for shape in shapes]
        self.ranges = [
            [(start * width, stop * width) for (start, stop), width in zip(of_rank, widths, strict=True)]
            for of_rank in table
        ]
        self.offsets = _ends([math.prod(shape) for shape in shapes])
        self.own_offsets = _ends([stop - start for start, stop in self.ranges[rank]])
        dealt = zip(self.parameters, table[rank], strict=True)
        self.shares: tuple[Parameter, ...] = tuple(self.share_type(p, rows, axes) for p, rows in dealt)

    @property
    def updated(self) -> list[Array]:
        if self.frozen:
            return []
        return [share.grad for share in self.shares] if self.own_grads is None else [self.own_grads]

    def refresh(self) -> None:
        for share in self.shares:
            share.refresh()

    def start(self, seed: int) -> None:
        for share in self.shares:
            if self.stage < 3:
                assert isinstance(share, Share)
                p = share.whole
                values = p.init(p.name, p.full_shape, p.rectangle, seed).astype(share.master.dtype)
                p.data[...] = array_module(p.data).asarray(values.astype(p.data.dtype))
                values = values[slice(*share.rows)]
            elif share.data.size:
                values = share.init(share.name, share.full_shape, share.rectangle, seed).astype(share.master.dtype)
            else:
                continue
            share.master[...] = array_module(share.master).asarray(values)
            share.refresh()

    def _own_views(self, vector: Array) -> list[Array]:
        """Each share's part of a vector of what this rank keeps."""
        shapes = [slab_shape(share.rectangle) for share in self.shares]
        ends = zip(self.own_offsets, self.own_offsets[1:], shapes, strict=False)
        return [vector[start:stop].reshape(shape) for start, stop, shape in ends]

    # -- messages -----------------------------------------------------------------------------------------------------

    def counts(self, first: int, last: int) -> list[int]:
        """Elements of parameters [first, last) that each rank keeps."""
        return [sum(stop - start for start, stop in of_rank[first:last]) for of_rank in self.ranges]

    def own(self, first: int, last: int) -> slice:
        """Where the shares of parameters [first, last) lie in what this rank keeps."""
        return slice(self.own_offsets[first], self.own_offsets[last])

    def packed_grads(self, first: int, last: int) -> Array:
        """Gradients of parameters [first, last) as they travel: what each rank keeps of them, rank after rank.

        Zeros for what was not used.  They are in the dtype of the weights, as `as_sent` has them.
        """
        dtype = self.weights.dtype
        vectors = [p.grad.reshape(-1) if p.touched else None for p in self.parameters[first:last]]
        buffer = self.xp.empty(self.offsets[last] - self.offsets[first], dtype)
        at = 0
        for of_rank in self.ranges:
            for (start, stop), vector in zip(of_rank[first:last], vectors, strict=True):
                target = buffer[at : at + stop - start]
                at += stop - start
                if vector is None:
                    target[...] = 0
                elif is_half(dtype) and stop > start:
                    kernels.narrow(vector[start:stop], dtype, out=target)
                else:
                    target[...] = vector[start:stop]
        return buffer

    def expect(self, first: int, last: int) -> None:
        """Gradients of parameters [first, last) will be brought."""

    def bring(self, first: int, last: int, summed: Array) -> None:
        """Keep what the sum over ranks of gradients of parameters [first, last) is, added to what is there.

        Args:
            first, last: which.
            summed: of this rank's rows, one after the other; where nothing is there yet it may lie in its place.
        """
        shares = self.shares[first:last]
        if self.own_grads is None:
            at = 0
            for share in shares:
                share.grad[...] = summed[at : at + share.grad.size].reshape(share.grad.shape)
                at += share.grad.size
        elif shares[0].touched:
            self.own_grads[self.own(first, last)] += summed

    def packed_weights(self, first: int, last: int) -> Array:
        """This rank's weights of parameters [first, last), one after the other."""
        if self.stage == 3:
            return self.weights[self.own(first, last)]
        return self.xp.concatenate([share.data.reshape(-1) for share in self.shares[first:last]])

    def unpack(self, gathered: Array, first: int, last: int, into: Sequence[Array]) -> None:
        """Bring what ranks keep of parameters [first, last), rank after rank, into whole tensors."""
        vectors = [whole.reshape(-1) for whole in into]
        at = 0
        for of_rank in self.ranges:
            for (start, stop), vector in zip(of_rank[first:last], vectors, strict=True):
                vector[start:stop] = gathered[at : at + stop - start]
                at += stop - start


def rows_of(parameters: Sequence[Parameter], ranks: int) -> list[list[Rows]]:
    """Which rows of each parameter each rank keeps (`assign_rows`); their rectangles are known.

    What is cut over tp is dealt out last, since its sizes may differ there; what two end stages hold alike goes to the
    first rank where it stays whole.
    """
    return assign_rows(
        [slab_shape(p.rectangle) for p in parameters],
        ranks,
        sizes=[math.prod(p.full_shape) for p in parameters],
        pinned={place for place, p in enumerate(parameters) if p.spec.tied},
        later={place for place, p in enumerate(parameters) if "tp" in p.spec.shard_dims()},
    )


def absent(shape: tuple[int, ...], dtype: Any, xp: Any) -> Array:
    """What stands for an array that is not here: its shape and dtype, no memory, and NaN for whoever reads it."""
    return xp.broadcast_to(xp.asarray(math.nan, dtype), shape)


def is_absent(array: Array) -> bool:
    """Whether it only stands for an array that is not here."""
    return bool(array.ndim and array.size and not any(array.strides))


def _ends(sizes: Sequence[int]) -> list[int]:
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return ends
