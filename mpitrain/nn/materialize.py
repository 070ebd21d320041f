"""Memory and initial values for the parameters of a model: this rank's slabs of them, or its rows of these slabs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mpitrain.backend import wide
from mpitrain.nn.parameter import Flat, FrozenFlat, Parameter
from mpitrain.nn.share import CutFlat
from mpitrain.spec import slab


class Home(Protocol):
    """Where parameters live that are not here (mpitrain.memory.home)."""

    def flat(
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
        frozen: bool,
    ) -> Flat:
        """Parameters that are summed over the same axes, without memory yet."""

    def take_in(self, flats: Sequence[Flat]) -> None:
        """Give memory to all of them."""


def materialize(
    parameters: Sequence[Parameter],
    coords: Mapping[str, int],
    sizes: Mapping[str, int],
    seed: int,
    dtype: Any,
    xp: Any = np,
    zero: int = 0,
    home: Home | None = None,
    *,
    start: bool = True,
) -> list[Flat]:
    """Give each parameter this rank's slab, with its initial values.

    Values are drawn in float64 from the stream of the parameter's name, so every layout and dtype starts from the same
    numbers.

    Args:
        parameters: in the order of the model.
        coords, sizes: this rank's place in the layout, and the layout.
        seed: of the initial values.
        dtype: of the weights.
        xp: where they live.
        zero: what ranks deal out that would all hold the same: 0 nothing, or stage 1, 2, 3 (`mpitrain.nn.share`).
        home: makes flats that live elsewhere (stage 3); None: they live here.
        start: whether to write the initial values.

    Returns:
        One `Flat` for each set of axes over which gradients are summed and each dtype, in order of first appearance;
        what is frozen lies in flats of its own, of which stages 1 and 2 deal out nothing.

    Raises:
        ShapeError: a parameter has no dims, so that it cannot be dealt out.
    """
    groups: dict[tuple[tuple[str, ...], Any, bool], list[int]] = {}
    for place, p in enumerate(parameters):
        p.rectangle = slab(p.full_shape, p.spec, coords, sizes)
        stored = wide(dtype) if p.in_full else np.dtype(dtype)
        groups.setdefault((p.spec.replicate_axes(), stored, p.frozen), []).append(place)
    flats: list[Flat] = []
    where: dict[str, Any]
    for (axes, stored, frozen), places in groups.items():
        members = [parameters[place] for place in places]
        ranks, rank = _place(axes, coords, sizes)
        if home is not None:
            where = {"ranks": ranks, "rank": rank, "number": len(flats), "frozen": frozen}
            flats.append(home.flat(members, places, axes, stored, xp, **where))
        elif ranks > 1 and (zero == 3 or (zero and not frozen)):
            where = {"stage": zero, "ranks": ranks, "rank": rank, "frozen": frozen}
            flats.append(CutFlat(members, places, axes, stored, xp, **where))
        else:
            flats.append((FrozenFlat if frozen else Flat)(members, places, axes, stored, xp))
    if home is not None:
        home.take_in(flats)
    for flat in flats:
        if start:
            flat.start(seed)
        for p in (*flat.parameters, *flat.shares):
            p.touched = False
            p.version = 0
    return flats


def _place(axes: Sequence[str], coords: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, int]:
    """How many ranks the merge of some axes has, and which of them is this one."""
    ranks, rank = 1, 0
    for axis in axes:
        ranks *= sizes.get(axis, 1)
        rank = rank * sizes.get(axis, 1) + coords.get(axis, 0)
    return ranks, rank
