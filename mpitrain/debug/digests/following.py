"""How each value lies across ranks while a program runs: the rules of states, with one axis more.

The axis of replicas is followed also where it has one rank only.  What is Shard on it is different in every
micro-batch, what is Partial is a summand of each, what is Replicate is the same in all of them: a micro-batch is a part
of the batch as a replica's is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mpitrain.comm.mesh import Mesh
from mpitrain.debug.states.checker import AXES
from mpitrain.debug.states.known import BatchArrays, Known, of_parameter
from mpitrain.debug.states.onlooker import Onlooker
from mpitrain.nn.parameter import Parameter
from mpitrain.spec import INVARIANT, PARTIAL, REPLICATE

REPLICAS = "edp"
CUT, SUMMANDS, SAME, OWN, UNKNOWN = "S", "P", "R", "O", "?"
"""What ranks hold of a value: slices; summands; all of it; parts that each has picked by itself; nobody knows."""
_DUAL = {CUT: CUT, SUMMANDS: SAME, SAME: SUMMANDS, OWN: SUMMANDS, UNKNOWN: UNKNOWN}


class Following(Onlooker):
    """An onlooker that follows the axis of replicas always.

    Args:
        parameters: of the model.
        mesh: the layout.
        apart: axes along which ranks do not hold the same weights.
    """

    def __init__(self, parameters: Iterable[Parameter], mesh: Mesh, apart: Iterable[str] = ()) -> None:
        super().__init__((), mesh, apart)
        self._axes = tuple(axis for axis in AXES if axis == REPLICAS or mesh.sizes[axis] > 1)
        self._batch = BatchArrays(None, self._axes)
        for p in parameters:
            self._known[p] = replace(of_parameter(p, self._axes), own=frozenset(apart))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that are followed."""
        return self._axes

    def lies(self, known: Known | None) -> dict[str, str]:
        """What ranks hold of a value, by axis."""
        return {axis: _word(known, axis) for axis in self._axes}

    def gradient_lies(self, known: Known | None) -> dict[str, str]:
        """The same of its gradient, whose state is the dual one; of an Invariant value it is the same everywhere."""
        found = {}
        for axis in self._axes:
            states = () if known is None else known.states.get(axis, ())
            found[axis] = SAME if states == (INVARIANT,) else _DUAL[_word(known, axis)]
        return found


def _word(known: Known | None, axis: str) -> str:
    states = () if known is None else known.states.get(axis, ())
    if not states:
        return UNKNOWN
    if all(state.dim is not None for state in states):
        return CUT
    if states == (PARTIAL,):
        return SUMMANDS
    if states in ((REPLICATE,), (INVARIANT,)):
        return OWN if known is not None and axis in known.own else SAME
    return UNKNOWN
