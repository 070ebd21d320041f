"""Units: parts of a model whose weights are here only while they work.

    forward     fetch(blocks.3)   ops of the block ...   release(blocks.3)
    backward    release(blocks.3) brings the weights again, ... fetch(blocks.3) lets them go

The two are nodes on the tape, so the way back finds them in its order: it comes to `release` first.  Between the two
passes nothing holds the weights; what ops have saved of them is a note of which parameter it was.

While one unit works, the weights of the next are on their way, forwards as backwards.  Where they come from is the
business of a subclass: from other ranks (mpitrain.parallel.zero), from the host or a file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from mpitrain.autograd.function import Function
from mpitrain.autograd.node import Node, Visit
from mpitrain.autograd.recompute import recomputing
from mpitrain.autograd.tape import TAPE, Tape
from mpitrain.backend import Array
from mpitrain.errors import GraphError
from mpitrain.events import LISTENERS, Event, tell
from mpitrain.nn.parameter import Parameter


class Resident:
    """How many bytes of units are here: of all units of a model together.

    Attributes:
        now: whole weights of units that work, and of those that are on their way.
        coming: the latter alone.
        peak: the most that there ever were.
    """

    def __init__(self) -> None:
        self.now = self.coming = self.peak = 0

    def add(self, nbytes: int) -> None:
        """So many came; a negative number went."""
        self.now += nbytes
        self.peak = max(self.peak, self.now)


class Unit(ABC):
    """One part.

    Args:
        name: of the part.
        parameters: that come and go.
        resident: counts for all units of the model.

    Attributes:
        after, before: the units that are asked for ahead while this one works forwards, and backwards.
    """

    def __init__(self, name: str, parameters: Sequence[Parameter], resident: Resident) -> None:
        self.name = name
        self.parameters = tuple(parameters)
        self.resident = resident
        self.after: tuple[Unit, ...] = ()
        self.before: tuple[Unit, ...] = ()
        self._stood: list[list[Array]] = []  # what the parameters' arrays were before; units may be one in another
        self._comes = False
        self.nbytes = sum(p.data.nbytes for p in self.parameters)

    @abstractmethod
    def ask(self) -> None:
        """Have the weights sent on their way; at once."""

    @abstractmethod
    def arrived(self) -> list[Array]:
        """The whole weights, which were asked for: one array a parameter, nobody else's."""

    def take_gradients(self) -> None:  # noqa: B027 - most have nothing to do
        """Backward makes gradients of the weights from here on."""

    # -- coming and going ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Ask for the weights, unless they are on their way or here."""
        if not self._comes and not self._stood:
            self._comes = True
            self.resident.add(self.nbytes)
            self.resident.coming += self.nbytes
            self.ask()

    def fetch(self, ahead: Sequence[Unit] = ()) -> None:
        """Bring the weights, and ask for those of other units ahead."""
        listeners = LISTENERS.get()
        info = {"path": self.name, "unit": self, "bytes": self.nbytes}
        if listeners:
            tell(listeners, Event("unit", "begin", "fetch", info))
        if self._stood:  # within itself
            arrays = [p.data for p in self.parameters]
        else:
            self.start()
            self._comes = False
            self.resident.coming -= self.nbytes
            arrays = self.arrived()
        self._stood.append([p.data for p in self.parameters])
        for p, array in zip(self.parameters, arrays, strict=True):
            p.data = array
        for unit in ahead:
            unit.start()
        if listeners:
            tell(listeners, Event("unit", "end", "fetch", {**info, "arrays": arrays}))

    def release(self) -> None:
        """Let the weights go."""
        for p, before in zip(self.parameters, self._stood.pop(), strict=True):
            p.data = before
        if not self._stood:
            self.resident.add(-self.nbytes)
        listeners = LISTENERS.get()
        if listeners:
            tell(listeners, Event("unit", "end", "release", {"path": self.name, "unit": self, "bytes": self.nbytes}))

    def forget(self) -> None:
        """Drop weights that are on their way and will be out of date."""
        if self._comes:
            self._comes = False
            self.arrived()
            self.resident.coming -= self.nbytes
            self.resident.add(-self.nbytes)

    def reset(self) -> None:
        """Nothing of it is here and nothing on its way, whatever an error has left in the middle of a step."""
        if self._stood:
            for p, before in zip(self.parameters, self._stood[0], strict=True):
                p.data = before
            self._stood.clear()
            self.resident.add(-self.nbytes)
        self.forget()

    def checked(self, made: Any) -> Any:
        """What the part has made, which must not be one of the weights that go now.

        Raises:
            GraphError: it is.
        """
        for value in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(value, Parameter) and value in self.parameters:
                raise GraphError(
                    f"{self.name} returns its weight {value.name} itself, which is not here any more when the part is"
                    " done (zero 3).\nLet the part do what the weight is for, and return what comes of it."
                )
        return made

    def __enter__(self) -> None:
        self.fetch(() if recomputing() else self.after)  # what comes after a second forward is its backward
        tape = TAPE.get()
        if tape is not None:
            tape.mark(Fetched(self))

    def __exit__(self, *_: object) -> None:
        tape = TAPE.get()
        if tape is not None:
            last = tape.nodes[-1] if tape.nodes else None
            if isinstance(last, Fetched) and last.unit is self:
                tape.nodes.pop()  # nothing that it did goes backward
            else:
                tape.mark(Released(self))
        self.release()


class _Mark(Node):
    """A place on the tape, no operation."""

    def __init__(self, unit: Unit) -> None:
        self.function, self.static, self.path = Function, {}, unit.name
        self.inputs = self.outputs = self.wanted = self.weight_side = self.kinds = self.firsts = self.saved = ()
        self.unit = unit

    def __str__(self) -> str:
        return f"{self.title}({self.unit.name})"

    title = "mark"


class Fetched(_Mark):
    """Where the weights came; backward lets them go here.

    Attributes:
        again: whether the second half of a split backward has brought them once more.
    """

    title = "fetch"
    again = False

    def walk(self, tape: Tape, grad: Any, half: str) -> Iterator[tuple[Any, ...]]:
        if half != "weights" or self.again:
            self.unit.release()
        if half != "inputs":
            yield ()


class Released(_Mark):
    """Where the weights went; backward brings them again here.

    Gradients of weights need no weights, as a rule, so the second half of a split backward does without: unless a
    weight is multiplied with another, or goes through a function that is not linear.
    """

    title = "release"

    def walk(self, tape: Tape, grad: Any, half: str) -> Iterator[tuple[Any, ...]]:
        if half != "weights":
            self.unit.fetch(self.unit.before)
        else:
            between = self._between(tape)
            if any(map(_needs_weights, between)):
                between[0].again = True  # type: ignore[attr-defined]
                self.unit.fetch()
        if half != "inputs":
            self.unit.take_gradients()
            yield ()

    def _between(self, tape: Tape) -> list[Node]:
        """The nodes from where the weights came to here."""
        stop = start = next(place for place, node in enumerate(tape.nodes) if node is self)
        depth = 1
        while depth:
            start -= 1
            node = tape.nodes[start]
            if isinstance(node, _Mark) and node.unit is self.unit:
                depth += 1 if isinstance(node, Released) else -1
        return tape.nodes[start:stop]


def _needs_weights(node: Node) -> bool:
    """Whether the second half of a split backward needs weights for what is left of a node."""
    again = getattr(node, "again", None)
    if isinstance(again, Tape):  # made a second time: what is left is on a tape of its own
        return any(map(_needs_weights, again.nodes))
    if True not in node.weight_side:
        return False
    saved, sides = node.saved or (), node.weight_side[:2]
    if node.function.bilinear and not all(sides):  # a factor's gradient needs the other one, a summand's none
        saved = tuple(saved[1 - place] for place, is_weight in enumerate(sides) if is_weight)
    return any(isinstance(part, Visit) for item in saved for part in (item, *_parts(item)))


def _parts(item: Any) -> tuple[Any, ...]:
    """What is in an item that a policy has marked as packed or not."""
    return item if type(item) is tuple else ()
