"""The two tapes of a recomputed function: a sketch when it runs first, a tape of its own when it runs again.

A sketch knows which tensors are used that the function did not make, and nothing else, so all that ops save is dropped
at once.  What the function makes belongs to it until the function returns; then the outputs become values of the tape
outside, and the rest has lost its way back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.autograd.function import Function
from mpitrain.autograd.node import Node
from mpitrain.autograd.tape import TAPE, Tape
from mpitrain.autograd.tensor import Tensor


class Inner(Tape):
    """The tape of a recomputed function.

    Args:
        outer: the tape that its node is on.
        given: leaves that stand for values of that tape, by their slots there; where the function finds such a value
            by itself as well, it is the same leaf.

    Attributes:
        handed_out: values that leave it by another way than its return.
    """

    def __init__(self, outer: Tape | None = None, given: Mapping[int, Tensor] | None = None) -> None:
        super().__init__(None if outer is None else outer.policy)
        self.handed_out: list[Tensor] = []
        self._outer = outer
        self._given = given or {}

    def _leaf(self, t: Tensor, node: Node) -> int:
        if self._given and not t.is_parameter and self._outer is not None:
            place = self._outer.slot(t)
            t = t if place is None else self._given.get(place.number, t)
        return super()._leaf(t, node)

    def close(self) -> None:
        """The function has returned."""
        self._outer, self._given = None, {}


class Sketch(Inner):
    """The tape of a first forward: it notes which tensors are used that it did not make, and keeps nothing else.

    Attributes:
        used: those that want a gradient, in the order of their first use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used: dict[Tensor, None] = {}

    def record(
        self,
        function: type[Function],
        inputs: Sequence[Any],
        outputs: Sequence[Tensor],
        saved: tuple[Any, ...],
        static: dict[str, Any],
        path: str,
    ) -> None:
        weights_only = function.weight_side
        for t in inputs:
            if isinstance(t, Tensor) and t.requires_grad:
                if t.tape is not self:
                    self.used.setdefault(t)
                weights_only = weights_only and t.weight_side
        for t in outputs:
            t.requires_grad = True
            t.tape = self
            t.weight_side = weights_only

    def mark(self, node: Node) -> None:
        """What runs a second time makes its marks then."""

    def close(self) -> None:
        """A gradient of what it made and did not return would be lost from now on."""
        super().close()
        self.used = {}
        self.gone = True


def hand_out(x: Tensor) -> None:
    """Say that a value leaves the function that makes it by another way than its return.

    Where that function is recomputed, the value becomes one more output of its node, so that gradients find the way
    back; elsewhere nothing happens.
    """
    tape = TAPE.get()
    if isinstance(tape, Inner) and x.tape is tape:
        tape.handed_out.append(x)
