"""What stands on a tape: one operation that happened, and what waits there for the way back.

A node holds what forward returned for backward.  Two things may wait in the place of an array: the handle of a policy,
which has stored it another way, and a note of a weight that is here only while it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mpitrain.backend import Array

if TYPE_CHECKING:
    from mpitrain.autograd.function import Function
    from mpitrain.autograd.tape import Tape

CONSTANT = -1
"""The slot of an input of which no gradient is wanted."""


class SavePolicy(Protocol):
    """Decides how an array waits between forward and backward: as it is, in half precision, on the host ...

    What it gives back may be anything; `parts`, if it has them, are the arrays that wait (mpitrain.memory.policy).
    """

    def begin(self) -> SavePolicy:
        """The policy for one more tape: itself, unless it keeps books of each."""

    def pack(self, node: Node, place: int, array: Array) -> Any:
        """Take an array that a node saves, the `place`-th of all that it does, give back what shall wait for it."""

    def share(self, node: Node, place: int, array: Array, handle: Any) -> Any:
        """A further node saves an array for which something waits already: what shall wait for that node."""

    def unpack(self, node: Node, place: int, handle: Any) -> Array:
        """The array again, for a node that saved it."""


class Visit(NamedTuple):
    """What stands on a tape for a weight that is here only while it is used: which one it is.

    function, static: of the op whose view of the weight it is, as a transpose's; None: it is the weight itself.
    """

    parameter: Any
    function: Any = None
    static: Mapping[str, Any] = MappingProxyType({})

    @property
    def array(self) -> Array:
        """The weight, or the view of it, which are here again."""
        data = self.parameter.data
        return data if self.function is None else self.function.forward(data, **self.static)[0]


class Node:
    """One operation that happened.

    inputs: the slot of each input, CONSTANT where no gradient is wanted; wanted: where one is; weight_side: which of
    them are weight-side; outputs: slots, with shapes and dtypes for printing; saved: what forward returned for backward
    (or the policy's handles); firsts: parameters that are used here for the first time, so their gradient is final
    after this node.
    """

    __slots__ = (
        "firsts",
        "function",
        "inputs",
        "kinds",
        "outputs",
        "path",
        "saved",
        "static",
        "wanted",
        "weight_side",
    )

    function: type[Function]
    saved: Any
    static: dict[str, Any]
    path: str
    inputs: tuple[int, ...]
    wanted: tuple[bool, ...]
    weight_side: tuple[bool, ...]
    outputs: tuple[int, ...]
    kinds: tuple[tuple[tuple[int, ...], Any], ...]
    firsts: tuple[Any, ...]

    def __str__(self) -> str:
        left = ", ".join(f"%{slot}" for slot in self.outputs)
        args = ", ".join("const" if slot == CONSTANT else f"%{slot}" for slot in self.inputs)
        static = ", ".join(self.details())
        right = "  ".join(f"{shape} {dtype}" for shape, dtype in self.kinds)
        arrow = getattr(self.function, "arrow_text", None)
        parts = [f"{left} = {self.function.title()}({args}{'; ' if static else ''}{static})"]
        parts += [arrow(**self.static)] if arrow else []
        return "  ".join([*parts, right, self.path]).rstrip()

    def details(self) -> list[str]:
        """What is printed behind the inputs."""
        return [text for text in (_static_text(*item) for item in self.static.items()) if text]

    def held(self, packed: bool) -> Iterator[Any]:
        """The arrays that wait in this node, or a policy's handles."""
        for item in self.saved or ():
            if packed:
                yield from getattr(item[1], "parts", (item[1],))
            else:
                yield item

    def walk(self, tape: Tape, grad: Any, half: str) -> Iterator[tuple[Any, ...]]:
        """Its own way back, of a node that is of another kind than this class (see `Tape.backward` for what it yields).

        Args:
            tape: that it is on.
            grad: of its output, a tuple where there are several; None where nobody wants one.
            half: "" for the whole, "inputs" for B, which yields nothing, "weights" for W.
        """
        raise AssertionError("a plain node is walked by its tape")


def _static_text(name: str, value: Any) -> str:
    """One keyword argument of a node as text; '' for what would not fit on the line."""
    axis = getattr(value, "name", None)
    if axis is not None and hasattr(value, "ranks"):
        return str(axis)
    if getattr(value, "shape", ()):
        return f"{name}={tuple(value.shape)}"
    text = f"{name}={value}"
    return text if len(text) <= 40 else ""
