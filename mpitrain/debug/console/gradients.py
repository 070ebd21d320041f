"""How far the gradients of a rank's parameters have come, as far as events tell.

adding     backward passes add to them; on axes where a parameter is Replicate they are summands (Partial)
summed     a reducer has summed them over the ranks
used       the update was made with them: scale and clipping are in them
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from mpitrain.comm.payload import LIKE_BLOCKING
from mpitrain.comm.wire import share_memory
from mpitrain.events import Event
from mpitrain.nn.parameter import Parameter

ADDING, SUMMED, USED = "adding", "summed", "used"

SUMS = ("all_reduce", "reduce_scatter")


class Gradients:
    """A listener.

    Attributes:
        state: of all gradients of an executor's step: ADDING, SUMMED or USED.
    """

    def __init__(self) -> None:
        self.state = ADDING
        self._adds: WeakKeyDictionary[Parameter, int] = WeakKeyDictionary()
        self._over: WeakKeyDictionary[Parameter, tuple[str, ...]] = WeakKeyDictionary()
        self._made: list[Parameter] = []  # by the op that has ended; its tape adds them up only now

    def __call__(self, event: Event, parameters: Iterable[Parameter]) -> None:
        """Take note of an event.

        Args:
            event: of the rank.
            parameters: of the rank.
        """
        kind, phase, name, info = event
        for p in self._made:
            self._adds[p] = self._adds.get(p, 0) + 1
            self._over.pop(p, None)
        self._made.clear()
        if kind == "action":
            self._act(phase, info["action"].kind)
        elif kind == "op" and phase == "end" and "grads" in info:
            self._made = made_by(info)
        elif phase == "end" and kind in ("message", "arrival") and LIKE_BLOCKING.get(name, name) in SUMS:
            self._sum(info["axis"], info.get("result"), parameters)

    def _act(self, phase: str, kind: str) -> None:
        if phase == "begin" and kind in ("COUNT", "B", "W") and self.state == USED:
            self.state = ADDING
            self._adds.clear()
            self._over.clear()
        elif phase == "end" and kind == "REDUCE":
            self.state = SUMMED
        elif phase == "end" and kind == "STEP":
            self.state = USED

    def _sum(self, axis: str, result: Any, parameters: Iterable[Parameter]) -> None:
        """A sum over ranks was written: into a flat buffer of gradients, maybe, or a part of it."""
        for p in parameters if hasattr(result, "dtype") else ():
            if type(p.grad) is type(result) and p.grad.size and share_memory(result, p.grad):
                self._over[p] = (*self._over.get(p, ()), axis)

    def adds(self, p: Parameter) -> int:
        """How often something was added to its gradient in this step."""
        return self._adds.get(p, 0)

    def summed_over(self, p: Parameter) -> tuple[str, ...]:
        """The axes over which a message has summed the gradient that is there now, where it was seen."""
        return self._over.get(p, ())


def made_by(info: Any) -> list[Parameter]:
    """The parameters to which the tape is going to add what an op's backward has just made."""
    tape, node = info["tape"], info["node"]
    found = []
    for slot, grad in zip(node.inputs, info["grads"], strict=False):
        leaf = tape.leaf(slot) if slot >= 0 and grad is not None else None
        if isinstance(leaf, Parameter):
            found.append(leaf)
    return found
