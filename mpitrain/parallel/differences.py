"""Where ranks differ in what they hold alike: the first tensor, and which of the ranks.

Each rank brings one checksum for all that it holds alike along the same axes, and every rank is told those of all: one
small message, and nothing more as long as they agree.  Where they do not, the checksums of single tensors follow.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.backend import Array, to_host
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.places import named

_ENDS = "ends"  # stands for axes where the first and the last stage of a pipeline are meant


class Held(NamedTuple):
    """An array that this rank holds as others do: along which axes, and whether the other end of a pipeline does."""

    name: str
    axes: tuple[str, ...]
    tied: bool
    array: Array


def difference(held: Sequence[Held], mesh: Mesh, when: str) -> str | None:
    """What differs between ranks that hold it alike, in words, the same on all ranks; None: nothing.

    Collective over the world.
    """
    groups: dict[str, list[Held]] = {}  # axes along which it is held -> what
    for each in held:
        axes = [axis for axis in each.axes if mesh.sizes[axis] > 1]
        if axes:
            groups.setdefault("+".join(axes), []).append(each)
        if each.tied and mesh.sizes["pp"] > 1:
            groups.setdefault(_ENDS, []).append(each)
    mine = {axes: _checksum(each.array for each in of) for axes, of in groups.items()}
    told: list[dict[str, int]] = mesh.world.exchange(mine)
    parted = {}
    for (axes, first), ranks in _meetings(told, mesh).items():
        if len({told[rank][axes] for rank in ranks}) > 1:
            parted[axes, first] = ranks
    if not parted:
        return None
    asked = {axes for (axes, _), ranks in parted.items() if mesh.world.rank in ranks}
    lists = {axes: [(each.name, _checksum([each.array])) for each in groups[axes]] for axes in asked}
    details: list[dict[str, list[tuple[str, int]]]] = mesh.world.exchange(lists)
    for (axes, _), ranks in parted.items():
        rows = list(zip(*(details[rank][axes] for rank in ranks), strict=True))
        odd = [row for row in rows if len({checksum for _, checksum in row}) > 1]
        if odd:
            shown = axes.replace("edp+ep", "dp") if mesh.sizes["ep"] > 1 else axes.replace("edp", "dp")
            more = f"  {len(odd)} of {len(rows)} tensors differ." if len(odd) > 1 else ""
            return f"{_words(odd[0], ranks, when)}, axis {shown}.{more}"
    return f"Weights differed between ranks that share them, {when}, when they were first looked at, and then no more."


def _meetings(told: Sequence[Mapping[str, int]], mesh: Mesh) -> dict[tuple[str, int], list[int]]:
    """(axes, first rank) -> the ranks that differ along these axes only."""
    found: dict[tuple[str, int], list[int]] = {}
    for rank, of_rank in enumerate(told):
        coords = mesh.coords_of(rank)
        for axes in of_rank:
            along = ["pp"] if axes == _ENDS else axes.split("+")
            found.setdefault((axes, mesh.rank_of({**coords, **dict.fromkeys(along, 0)})), []).append(rank)
    return found


def _words(row: Sequence[tuple[str, int]], ranks: Sequence[int], when: str) -> str:
    """Which ranks differ from most, or where there is no majority from the first one."""
    checksums = [checksum for _, checksum in row]
    usual = Counter(checksums).most_common(1)[0][0]
    odd = [rank for rank, checksum in zip(ranks, checksums, strict=True) if checksum != usual]
    others = [rank for rank in ranks if rank not in odd]
    return f"{row[0][0]} differs between ranks that share it, {when}: {named(odd)} against {named(others)}"


def _checksum(arrays: Iterable[Array]) -> int:
    """CRC-32 of the bytes: it finds every single bit, and runs at more than twice the speed of SHA-256."""
    found = 0
    for array in arrays:
        found = zlib.crc32(np.ascontiguousarray(to_host(array)).reshape(-1).view(np.uint8), found)
    return found
