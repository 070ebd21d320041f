"""Weights come from the ranks that keep their rows, part by part of the model, when the part works (stage 3).

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3; prefetch as in Zhao et al. 2023, arXiv:2304.11277.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from mpitrain.backend import Array
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.request import Request
from mpitrain.memory.stored_flat import StoredFlat
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.nn.share import CutFlat
from mpitrain.nn.unit import Resident, Unit
from mpitrain.spec import slab_shape

PREFETCH = 1
"""Units that are on their way while another one works."""


class Parcel(NamedTuple):
    """Neighbours in a flat buffer, whose weights travel together."""

    flat: CutFlat
    first: int
    last: int
    axis: Communicator

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Those that are in it."""
        return self.flat.parameters[self.first : self.last]


class GatheredUnit(Unit):
    """A unit whose weights are gathered over the ranks that keep their rows.

    Args:
        name: of the part of the model.
        parcels: of its weights.
        resident: counts for all units of the model.
        ahead: whether it may be asked for ahead, by messages that do not block.

    Cost: each rank sends (n-1)/n of the bytes of its whole weights, once forwards and once backwards.
    """

    def __init__(self, name: str, parcels: Sequence[Parcel], resident: Resident, ahead: bool = True) -> None:
        super().__init__(name, [p for parcel in parcels for p in parcel.parameters], resident)
        self.parcels = tuple(parcels)
        self._ahead = ahead
        self._coming: list[Request | Array] = []

    def ask(self) -> None:
        for flat, first, last, axis in self.parcels:
            send = axis.iall_gather if self._ahead else axis.all_gather
            self._coming.append(send(flat.packed_weights(first, last), counts=flat.counts(first, last)))

    def arrived(self) -> list[Array]:
        arrays: list[Array] = []
        for parcel, coming in zip(self.parcels, self._coming, strict=True):
            gathered = coming.wait() if isinstance(coming, Request) else coming
            whole = _whole(parcel)
            parcel.flat.unpack(gathered, parcel.first, parcel.last, whole)
            arrays += whole
        self._coming = []
        return arrays


class StoredUnit(GatheredUnit):
    """A unit whose rows live in a store: they are fetched ahead, and gathered where other ranks keep some too."""

    def ask(self) -> None:
        for flat, first, last, _ in self.parcels:
            assert isinstance(flat, StoredFlat)
            flat.expect_weights(first, last)

    def arrived(self) -> list[Array]:
        arrays: list[Array] = []
        for parcel in self.parcels:
            flat, first, last, axis = parcel
            own = flat.packed_weights(first, last)
            if flat.ranks == 1:
                shapes = [slab_shape(p.rectangle) for p in parcel.parameters]
                starts = [flat.offsets[place] - flat.offsets[first] for place in range(first, last)]
                arrays += [own[at : at + math.prod(s)].reshape(s) for at, s in zip(starts, shapes, strict=True)]
                continue
            gathered, whole = axis.all_gather(own, counts=flat.counts(first, last)), _whole(parcel)
            flat.unpack(gathered, first, last, whole)
            arrays += whole
        return arrays

    def take_gradients(self) -> None:
        for unit in (self, *self.before):
            for parcel in unit.parcels if isinstance(unit, StoredUnit) else ():
                assert isinstance(parcel.flat, StoredFlat)
                if unit is self:
                    parcel.flat.take_gradients(parcel.first, parcel.last)
                else:
                    parcel.flat.expect_gradients(parcel.first, parcel.last)


def _whole(parcel: Parcel) -> list[Array]:
    """Room for the whole tensors of a parcel, one after the other."""
    flat, first, last, _ = parcel
    buffer = flat.xp.empty(flat.offsets[last] - flat.offsets[first], flat.weights.dtype)
    shift = flat.offsets[first]
    return [
        buffer[flat.offsets[place] - shift : flat.offsets[place + 1] - shift].reshape(
            slab_shape(flat.parameters[place].rectangle)
        )
        for place in range(first, last)
    ]


def gather_units(model: Module, mesh: Mesh, prefetch: int = PREFETCH) -> None:
    """Make each part of a model of stage 3 a unit; called once, on all ranks, after `materialize`.

    A weight that two parts use, as a tied table, comes for each of them.  Parameters of no part come for the whole
    stage.

    Args:
        model: materialised with `zero=3`; of another stage nothing happens.
        mesh: the layout.
        prefetch: units that are asked for ahead; with 0 each is waited for when it is needed.
    """
    all_flats = [*model.flats, *model.frozen_flats]
    flats = [flat for flat in all_flats if isinstance(flat, CutFlat) and flat.stage == 3]
    if not flats or model.resident is not None:
        return
    places = {p: (flat, place) for flat in flats for place, p in enumerate(flat.parameters)}
    axes = {flat.axes: mesh.merged(flat.axes) for flat in flats}
    resident = Resident()
    make = StoredUnit if any(isinstance(flat, StoredFlat) for flat in flats) else GatheredUnit
    for stage in model.stages:
        units: list[Unit] = []
        for part in model.parts(stage):
            own = [p for p in part.parameters() if p in places]
            if own and part.unit is None:
                part.unit = make(part.name, _parcels(own, places, axes), resident, ahead=prefetch > 0)
            if part.unit is not None:
                units.append(part.unit)
        first = _first_back(model, stage, units)
        for number, unit in enumerate(units):
            unit.after = tuple(units[number + 1 : number + 1 + prefetch])
            unit.before = tuple(reversed(units[max(first, number - prefetch) : number]))
    in_parts = {p for stage in model.stages for part in model.parts(stage) for p in part.parameters()}
    rest = [p for p in model.parameters() if p in places and p not in in_parts]
    if rest:
        model.unit = make(model.name or "model", _parcels(rest, places, axes), resident, ahead=False)
    model.resident = resident


def _first_back(model: Module, stage: int, units: Sequence[Unit]) -> int:
    """Number of the first unit of a stage that backward comes to; as many as there are where it comes to none."""
    if stage != model.trains_from:
        return 0 if stage > model.trains_from else len(units)
    trained = (number for number, unit in enumerate(units) if any(not p.frozen for p in unit.parameters))
    return next(trained, len(units))


def _parcels(
    parameters: Sequence[Parameter],
    places: dict[Parameter, tuple[CutFlat, int]],
    axes: dict[tuple[str, ...], Communicator],
) -> list[Parcel]:
    """The fewest messages that bring these parameters: neighbours in a flat buffer travel together."""
    found = sorted({places[p] for p in parameters}, key=lambda each: (each[0].places[0], each[1]))
    parcels = []
    for _, members in groupby(enumerate(found), key=lambda each: (each[1][0].places[0], each[1][1] - each[0])):
        run = [place for _, place in members]
        (flat, first), (_, last) = run[0], run[-1]
        parcels.append(Parcel(flat, first, last + 1, axes[flat.axes]))
    return parcels
