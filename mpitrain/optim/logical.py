"""Sums over logical tensors of which ranks hold parts: those of all parameters in one message for each set of axes.

A method whose step depends on a whole tensor (its root mean square, the sums of its rows) asks for sums, each over the
ranks that hold other summands of it:

    rows      the ranks that hold other columns of the same rows
    columns   those that hold other rows of the same columns
    matrix    those that hold other parts of the same matrices, made by the last two dims
    tensor    all that hold other parts of the tensor

Which axes these are follows from the parameter's spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain.backend import Array, array_module
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import ConfigError
from mpitrain.nn.parameter import Parameter
from mpitrain.spec import slab_shape

Sums = dict[str, Array]
"""A rank's summands, or the sums, by the words above."""


@dataclass(frozen=True)
class Cut:
    """How a parameter lies over ranks, seen from one of them.

    Attributes:
        over: by the words above, the axes of more than one rank whose ranks bring other summands.
        counts: of the ranks that hold other columns of the same rows, whether this is the first.
    """

    over: dict[str, tuple[str, ...]]
    counts: bool

    @property
    def is_cut(self) -> bool:
        """Whether other ranks hold other parts."""
        return bool(self.over["tensor"])

    @classmethod
    def of(cls, p: Parameter, mesh: Mesh | None) -> Cut:
        """That of a parameter on this rank of a mesh; None: the ranks are not known.

        Raises:
            ConfigError: it is cut and there is no mesh, or it is cut over pp.
        """
        sizes = {} if mesh is None else mesh.sizes
        cuts = {axis: dim for axis, dim in p.spec.shard_dims().items() if sizes.get(axis, 1) > 1}
        if mesh is None and slab_shape(p.rectangle) != p.full_shape:
            raise ConfigError(
                f"{p.name}: this rank holds {slab_shape(p.rectangle)} of {p.full_shape}, and the sum is over the"
                " whole tensor.\nGive the optimizer the layout: Adafactor(model.parameters(), mesh=mesh)."
            )
        if "pp" in cuts:
            raise ConfigError(
                f"{p.name} is cut over pp, whose stages may update at different times: nothing can be summed over it."
            )
        last = len(p.full_shape) - 1
        over = {
            "rows": tuple(axis for axis, dim in cuts.items() if dim == last),
            "columns": tuple(axis for axis, dim in cuts.items() if dim == last - 1),
            "matrix": tuple(axis for axis, dim in cuts.items() if dim >= last - 1),
            "tensor": tuple(cuts),
        }
        return cls(over, mesh is None or all(mesh.coords[axis] == 0 for axis in over["rows"]))


class LogicalSums:
    """The messages.

    Args:
        cuts: of the parameters that are summed, in the same order on all ranks of an axis.
        mesh: where axes come from; making it is collective, since merged axes are made.
    """

    def __init__(self, cuts: Sequence[Cut], mesh: Mesh | None) -> None:
        self._cuts = list(cuts)
        sets = sorted({axes for cut in cuts for axes in cut.over.values() if axes})
        self._axes = {} if mesh is None else {axes: mesh.merged(axes) for axes in sets}

    def __call__(self, own: Sequence[Sums]) -> list[Sums]:
        """The sums over ranks; one all-gather for each set of axes over which anything is asked for.

        Summands are gathered and added up in rank order: the two copies of a tied table get the same bits, although
        other parameters stand beside each of them.

        Args:
            own: this rank's summands of each parameter.

        Cost: each rank sends (n-1) times its summands.
        """
        found = [dict(sums) for sums in own]
        for axes, axis in self._axes.items():
            members = [
                (sums, what)
                for cut, sums in zip(self._cuts, found, strict=True)
                for what in sums
                if cut.over[what] == axes
            ]
            if not members:
                continue
            xp = array_module(*(sums[what] for sums, what in members))
            gathered = axis.all_gather(xp.concatenate([sums[what].reshape(-1) for sums, what in members]))
            total, *others = gathered.reshape(axis.size, -1)
            for summand in others:
                total = total + summand
            start = 0
            for sums, what in members:
                stop = start + sums[what].size
                sums[what] = total[start:stop].reshape(sums[what].shape)
                start = stop
        return found
