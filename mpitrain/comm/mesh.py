"""The ranks as a grid: one axis for each kind of parallelism.

    mesh = Mesh(world(), pp=2, tp=2)          8 ranks: 2 stages, 2-way tensor parallel, so dp is 2
    mesh.tp                                   this rank's neighbours along tp: a Communicator
    print(mesh)                               the grid

Axes from slowest to fastest: pp, edp, ep, cp, tp (Narayanan et al. 2021, arXiv:2104.04473: tensor parallel ranks talk
most, so they are neighbours and sit on one node).  Data parallelism is dp = edp x ep: the batch is divided over all of
it; experts are cut over ep and replicated over edp.

    rank = (((pp_i * edp + edp_i) * ep + ep_i) * cp + cp_i) * tp + tp_i

Every axis always exists.  One of size 1 sends nothing, so nobody asks whether a kind of parallelism is on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, NoReturn

from mpitrain.comm.communicator import Communicator
from mpitrain.comm.world import World
from mpitrain.errors import MeshError
from mpitrain.spec import ATOMIC_AXES, MERGED_AXES


class Mesh:
    """A grid of ranks, seen from one of them.

    Args:
        world: all ranks.
        pp: pipeline stages.
        dp: data parallel ranks; None: whatever the other sizes leave.
        cp: ranks that share a sequence (context parallel).
        tp: tensor parallel ranks.
        ep: ranks over which experts are spread; divides dp.

    Attributes:
        world: all ranks.
        pp, edp, ep, cp, tp: the communicators along the atomic axes.
        dp: the merge of edp and ep.
        ends: the first and the last stage of this rank's pipeline; this rank alone if it is neither.
        coords: atomic axis -> this rank's index on it.
        sizes: atomic axis -> number of ranks on it.
        is_reporter: True on the one rank that prints: of the last stage, the first in all other axes.

    Raises:
        MeshError: the sizes do not fit the ranks (before any message, the same on all ranks).

    Building it is collective over all ranks: each axis larger than 1 becomes a group, in the order above.
    """

    def __init__(
        self, world: World, *, pp: int = 1, dp: int | None = None, cp: int = 1, tp: int = 1, ep: int = 1
    ) -> None:
        dp = _fit(world, pp, dp, cp, tp, ep)
        self.world = world
        self.sizes: Mapping[str, int] = {"pp": pp, "edp": dp // ep, "ep": ep, "cp": cp, "tp": tp}
        self.coords: Mapping[str, int] = self.coords_of(world.rank)
        self._merged: dict[tuple[str, ...], Communicator] = {}
        self.pp, self.edp, self.ep, self.cp, self.tp = (self._axis((axis,)) for axis in ATOMIC_AXES)
        self.dp = self._axis(("edp", "ep"))
        self.ends = world.group(self._end_ranks(), "ends")
        last = pp - 1
        self.is_reporter = all(index == (last if axis == "pp" else 0) for axis, index in self.coords.items())

    def merged(self, axes: Iterable[str]) -> Communicator:
        """All ranks that differ from this one only along these axes; the same object each time.

        Made when first asked for, which is collective over its members (and nobody else): they ask for their merges in
        the same order.

        Args:
            axes: names, in any order; "dp" is short for edp and ep.

        Raises:
            MeshError: an axis that does not exist.
        """
        atoms = {atom for axis in axes for atom in MERGED_AXES.get(axis, (axis,))}
        unknown = atoms.difference(ATOMIC_AXES)
        if unknown:
            known = " ".join((*ATOMIC_AXES, *MERGED_AXES))
            raise MeshError(f"axis {' '.join(sorted(unknown))} does not exist; known axes: {known}")
        return self._axis(tuple(axis for axis in ATOMIC_AXES if axis in atoms))

    def _axis(self, axes: tuple[str, ...]) -> Communicator:
        """The communicator over atomic axes in their own order."""
        if axes not in self._merged:
            self._merged[axes] = self.world.group(self._members(axes), _name(axes))
        return self._merged[axes]

    if not TYPE_CHECKING:  # for type checkers a name that does not exist stays one

        def __getattr__(self, name: str) -> NoReturn:
            if name in ("name", "rank", "ranks", "size") or hasattr(Communicator, name):
                raise MeshError(
                    f"a Mesh stands where one of its axes belongs: it has no {name} of its own.\n"
                    "Give a layer the axis that it works over, as mesh.tp (there are pp dp edp ep cp tp), and ask"
                    f" mesh.tp.{name}, or mesh.world.{name} of all ranks."
                )
            raise AttributeError(f"'Mesh' object has no attribute {name!r}")

    @property
    def scratch(self) -> int:
        """Bytes that the axes keep between messages, for sums in rank order."""
        axes = {id(axis): axis for axis in (*self._merged.values(), self.ends, self.world)}
        return sum(axis.scratch for axis in axes.values())

    # -- ranks and coordinates

    def rank_of(self, coords: Mapping[str, int]) -> int:
        """The world rank at these coordinates; axes that are not named count as 0."""
        rank = 0
        for axis in ATOMIC_AXES:
            rank = rank * self.sizes[axis] + coords.get(axis, 0)
        return rank

    def coords_of(self, rank: int) -> dict[str, int]:
        """The coordinates of a world rank."""
        coords = {}
        for axis in reversed(ATOMIC_AXES):
            rank, coords[axis] = divmod(rank, self.sizes[axis])
        return {axis: coords[axis] for axis in ATOMIC_AXES}

    def _members(self, axes: Sequence[str]) -> list[int]:
        """World ranks that share this rank's coordinates on all other axes, the last of `axes` fastest."""
        places = product(*(range(self.sizes[axis]) for axis in axes))
        return [self.rank_of({**self.coords, **dict(zip(axes, place, strict=True))}) for place in places]

    def _end_ranks(self) -> list[int]:
        stage, last = self.coords["pp"], self.sizes["pp"] - 1
        stages = sorted({0, last}) if stage in (0, last) else [stage]
        return [self.rank_of({**self.coords, "pp": stage}) for stage in stages]

    # -- the picture

    def __str__(self) -> str:
        """The grid of world ranks: stages and replicas downwards, cp and tp across."""
        replicas = ("edp", "ep") if self.ep.size > 1 else ("dp",)
        down = [axis for axis in ("pp", *replicas) if self._length(axis) > 1]
        across = [axis for axis in ("cp", "tp") if self._length(axis) > 1]
        columns = list(product(*(range(self._length(axis)) for axis in across)))
        heads = [_label(across, place) for place in columns]
        width = max(len(head) for head in [*heads, str(self.world.size)]) + 2
        rows = []
        for place in product(*(range(self._length(axis)) for axis in down)):
            coords = {("edp" if axis == "dp" else axis): i for axis, i in zip(down, place, strict=True)}
            cells = [self.rank_of({**coords, **dict(zip(across, column, strict=True))}) for column in columns]
            rows.append((_label(down, place), cells))
        margin = max(len(label) for label, _ in rows)
        lines = [f"mesh of {_ranks(self.world.size)}: {self._sizes()}"]
        if across:
            lines.append("  " + " " * margin + "".join(head.rjust(width) for head in heads))
        lines += [f"  {label:{margin}}" + "".join(str(cell).rjust(width) for cell in cells) for label, cells in rows]
        here = {**self.coords, "dp": self.dp.rank}
        words = [f"{axis} {here[axis]}" for axis in (*down, *across)]
        lines += [f"this is rank {self.world.rank}: {' '.join(words)}"] if words else []
        return "\n".join(lines)

    def _length(self, axis: str) -> int:
        return self.dp.size if axis == "dp" else self.sizes[axis]

    def _sizes(self) -> str:
        dp = f"dp {self.dp.size}" + (f" (edp {self.edp.size} x ep {self.ep.size})" if self.ep.size > 1 else "")
        return f"pp {self.pp.size} x {dp} x cp {self.cp.size} x tp {self.tp.size}"


def _fit(world: World, pp: int, dp: int | None, cp: int, tp: int, ep: int) -> int:
    """The size of dp.

    Raises:
        MeshError: a size below 1, a product that is not the number of ranks, an ep that does not divide dp.
    """
    given = {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": ep}
    for axis, size in given.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise MeshError(f"--{axis} {size}: an axis has a whole number of ranks, 1 or more")
    shown = [
        axis for axis in ("pp", "dp", "cp", "tp") if given[axis] is not None and (axis == "dp" or given[axis] != 1)
    ]
    flags = " ".join(f"--{axis} {given[axis]}" for axis in shown)
    others = pp * cp * tp
    if dp is None:
        if world.size % others:
            fewer, more = world.size // others * others, (world.size // others + 1) * others
            ways = " or ".join(_command(world, n) for n in (fewer, more) if n)
            raise MeshError(f"{flags} needs a multiple of {others} ranks, but {_started(world)}.  Run: {ways}")
        dp = world.size // others
    elif dp * others != world.size:
        needs = dp * others
        raise MeshError(
            f"{flags} needs {_ranks(needs)}, but {_started(world)}.  Run: {_command(world, needs)}"
            + (", or leave out --dp" if world.size % others == 0 else "")
        )
    if dp % ep:
        smaller = max(size for size in range(1, min(ep, dp) + 1) if dp % size == 0)
        raise MeshError(
            f"--ep {ep} does not divide dp {dp}: experts are spread over ep of the dp ranks.  Take --ep {smaller}, or"
            f" {others * ep} ranks: {_command(world, others * ep)}"
        )
    return dp


def _started(world: World) -> str:
    starter = {"mpi": "MPI started", "local": "mpitrain local started"}.get(world.kind, "this is a world of")
    return f"{starter} {world.size}"


def _command(world: World, ranks: int) -> str:
    starter = "mpitrain local" if world.kind == "local" else "./run_mpi.sh"
    return f"{starter} -n {ranks} ..."


def _name(axes: tuple[str, ...]) -> str:
    return "+".join(axes).replace("edp+ep", "dp") or "none"


def _label(axes: Sequence[str], place: Sequence[int]) -> str:
    return " ".join(f"{axis} {index}" for axis, index in zip(axes, place, strict=True))


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
