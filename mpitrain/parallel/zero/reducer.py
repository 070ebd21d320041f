"""Gradients go to the ranks that keep their rows, and updated weights come back from them.

    stage 1   at the end of a step: reduce-scatter of gradients; after the update: all-gather of weights
    stage 2   in every micro-batch, as gradients become final: reduce-scatter; after the update: all-gather of weights
    stage 3   as stage 2, without the last: weights are gathered when they are needed (gather.py)

Parameters leave in buckets, from the end of the model, because backward finishes the last layer first.  The order is
fixed here and the same on all ranks.  Each element is added up in rank order in deterministic mode, as an all-reduce
does, so stages 0 and 1 have the same bits; with several micro-batches stages 2 and 3 add in another order: over ranks
first, then over micro-batches.

Paper: Rajbhandari et al. 2020, arXiv:1910.02054, sections 5 and 7.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpitrain.autograd.tape import PATH
from mpitrain.backend import Array, array_module
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.request import Request
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.nn.share import CutFlat
from mpitrain.nn.unit import Unit
from mpitrain.parallel.data import Reducer, settle

BUCKET_BYTES = 1 << 20


class RowReducer(Reducer):
    """ZeRO's way for gradients, and for weights.

    Args:
        model: materialised with `zero` 1, 2 or 3.
        mesh: where the axes come from.
        bucket_bytes: a bucket is closed when its gradients have at least this many bytes on the wire.
        overlap: buckets travel while backward goes on; else each is waited for.

    Cost: with n ranks, Psi elements and m micro-batches each rank sends (n-1)/n times 2 Psi (stage 1), (m + 1) Psi
    (stage 2), m Psi (stage 3, beside what gathers weights); for the parameters that are summed over n ranks.
    Memory: in stages 2 and 3 whole gradients of the buckets that were not sent yet.
    """

    def __init__(self, model: Module, mesh: Mesh, bucket_bytes: int = BUCKET_BYTES, *, overlap: bool = False) -> None:
        self._model = model
        self._overlap = overlap
        self.every_walk = model.zero >= 2
        cut = [flat for flat in model.flats if isinstance(flat, CutFlat)]
        self._whole = [p for flat in model.flats if not isinstance(flat, CutFlat) for p in flat.parameters]
        stages = _stages_of(model) if self.every_walk else {}
        made = []
        for flat in cut:
            axis = mesh.merged(flat.axes)
            for first, last in _buckets(flat, bucket_bytes, stages):
                made.append(_Bucket(flat, first, last, axis, stages.get(flat.parameters[first], model.stages[:1])))
        self._buckets = sorted(made, key=lambda bucket: bucket.place, reverse=True)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._waiting: dict[int, list[_Bucket]] = {}  # stage -> its buckets that were not sent in this walk
        self._renew()

    def begin(self) -> None:
        for bucket in self._buckets:
            bucket.drop()
        self._renew()
        for unit in self._units():
            unit.reset()

    def add(self, parameter: Parameter) -> None:
        bucket = self._bucket_of.get(parameter)
        if bucket is None or not (self._overlap or self.every_walk):
            return
        bucket.missing.discard(parameter)
        waiting = self._waiting[bucket.stages[0]]
        while waiting and not waiting[0].missing:
            waiting.pop(0).start(self._overlap)

    def walked(self, stage: int) -> None:
        for bucket in self._waiting[stage]:
            bucket.start(self._overlap)
        for bucket in self._buckets:
            if stage in bucket.stages:
                bucket.land()
        self._renew(stage)

    def finish(self) -> None:
        settle(self._whole)
        for unit in self._units():
            unit.forget()  # a part that no pass came to: its weights are about to change
        if self.every_walk:
            settle(share for bucket in self._buckets for share in bucket.shares)
            return
        for waiting in self._waiting.values():
            for bucket in waiting:
                bucket.start(self._overlap)
        for bucket in self._buckets:
            bucket.land()
        self._renew()

    def updated(self) -> None:
        if self._model.zero == 3:
            return
        path = PATH.set("weights")  # else a ledger would take these messages for the optimizer's own
        for bucket in reversed(self._buckets):
            bucket.gather()
        PATH.reset(path)

    def _units(self) -> Iterator[Unit]:
        """The parts of the model whose weights come and go."""
        return (module.unit for module in self._model.modules() if module.unit is not None)

    def _renew(self, stage: int | None = None) -> None:
        """A new walk: nothing is final."""
        for each in self._model.stages if stage is None else (stage,):
            self._waiting[each] = [bucket for bucket in self._buckets if each in bucket.stages]
            for bucket in self._waiting[each]:
                bucket.missing = set(bucket.parameters)


class _Bucket:
    """Neighbours in a flat buffer that travel together.

    Attributes:
        stages: of the model that use them.
        place: of the first of them in the model.
        missing: those that are not final in this walk.
    """

    def __init__(self, flat: CutFlat, first: int, last: int, axis: Communicator, stages: Sequence[int]) -> None:
        self.flat, self.first, self.last = flat, first, last
        self.axis = axis
        self.stages = tuple(stages)
        self.parameters = flat.parameters[first:last]
        self.shares = flat.shares[first:last]
        self.counts = flat.counts(first, last)
        self.place = flat.places[first]
        self.missing: set[Parameter] = set()
        self._coming: tuple[Request | None, Array] | None = None

    def start(self, overlap: bool) -> None:
        """Send what is here of the gradients, and let it go where it is not kept."""
        flat = self.flat
        flat.expect(self.first, self.last)
        packed = flat.packed_grads(self.first, self.last)
        if flat.stage > 1:
            for p in self.parameters:
                p.grad, p.touched = None, False
        own, dtype = self.counts[flat.rank], flat.grads.dtype
        straight = flat.own_grads is not None and not self.shares[0].touched
        if straight:
            assert flat.own_grads is not None
            out = flat.own_grads[flat.own(self.first, self.last)]
        else:
            out = array_module(packed).empty(own, dtype)
        if overlap:
            self._coming = self.axis.ireduce_scatter(packed, out=out, counts=self.counts), out
        else:
            self.axis.reduce_scatter(packed, out=out, counts=self.counts)
            self._coming = None, out
            self.land()

    def land(self) -> None:
        """Wait, and add the sum to what earlier micro-batches brought."""
        if self._coming is None:
            return
        request, summed = self._coming
        self._coming = None
        if request is not None:
            request.wait()
        self.flat.bring(self.first, self.last, summed)
        for share in self.shares:
            share.touched = True

    def drop(self) -> None:
        """Forget a sum that is on its way, of a step that an error has ended."""
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] is not None:
            coming[0].wait()

    def gather(self) -> None:
        """Everybody gets the weights that their owners have updated."""
        flat = self.flat
        gathered = self.axis.all_gather(flat.packed_weights(self.first, self.last), counts=self.counts)
        flat.unpack(gathered, self.first, self.last, [p.data for p in self.parameters])


def _stages_of(model: Module) -> dict[Parameter, tuple[int, ...]]:
    """The stages of this rank that use each parameter."""
    if len(model.stages) == 1:
        return dict.fromkeys(model.parameters(), tuple(model.stages))
    found: dict[Parameter, tuple[int, ...]] = {}
    for stage in model.stages:
        for p in dict.fromkeys(p for part in model.parts(stage) for p in part.parameters()):
            found[p] = (*found.get(p, ()), stage)
    return found


def _buckets(flat: CutFlat, bucket_bytes: int, stages: dict[Parameter, tuple[int, ...]]) -> list[tuple[int, int]]:
    """Ranges of parameters (first, last + 1), from the last to the first, each of one stage."""
    itemsize = flat.weights.dtype.itemsize
    ranges = []
    last = len(flat.parameters)
    for first in range(last - 1, -1, -1):
        full = (flat.offsets[last] - flat.offsets[first]) * itemsize >= bucket_bytes
        here = stages.get(flat.parameters[first])
        if first == 0 or full or stages.get(flat.parameters[first - 1]) != here:
            ranges.append((first, last))
            last = first
    return ranges
