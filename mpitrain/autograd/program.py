"""Operations that are always the same, written down once and gone through again without the model around them.

A model that writes a text makes the same operations for each token, on arrays of the same shapes.  Modules, checks and
tensors cost Python more time then than the mathematics takes.  So the first time is listened to:

    %3 = layer_norm(%0, weight, weight)
    %4 = linear(%3, weight, weight)             each op's forward, and from where each of its inputs comes
    ...

and from then on the list is run: an input is an array that is given each time, a weight as it is then, what an
operation before has made, or a constant.  An array that comes from none of these was made outside of any operation, so
the list would not tell all: then there is none, and the model runs as ever.  So it does while a tape records or anybody
listens to operations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from mpitrain.autograd.tape import TAPE
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, address
from mpitrain.events import OP_LISTENERS, Event, listen


class _Line(NamedTuple):
    """One operation: its forward, the places of its inputs, and where its outputs go (one, or from there on)."""

    forward: Callable[..., Any]
    places: tuple[int, ...]
    static: dict[str, Any]
    into: int
    outputs: int


class Program:
    """A list of operations with places for values: first what is given, then weights, constants and what is made.

    Args:
        given: the arrays of the run that is listened to.
    """

    def __init__(self, given: Sequence[Array]) -> None:
        self._like = [(array.shape, array.dtype) for array in given]
        self._values: list[Any] = [None] * len(given)
        self._weights: list[tuple[int, Tensor]] = []
        self._lines: list[_Line] = []
        self._result = -1
        self._is_whole = True
        self._place_of: dict[int, int] = {id(array): place for place, array in enumerate(given)}
        self._alive: list[Any] = list(given)  # so that no other array gets the address of one of them

    def __call__(self, event: Event) -> None:
        """Write down an operation that has ended."""
        if event.kind != "op" or event.phase != "end" or not self._is_whole:
            return
        info = event.info
        places = tuple(map(self._place, info["tensors"], info["inputs"]))
        outputs = info["output"] if type(info["output"]) is tuple else (info["output"],)
        if len(outputs) == 1 and (
            same := [place for place, x in zip(places, info["inputs"], strict=True) if _is(x, outputs[0])]
        ):
            self._alive.append(outputs[0])
            self._place_of[id(outputs[0])] = same[0]  # a message among one rank
            return
        into = len(self._values)
        for array in outputs:
            self._alive.append(array)
            self._place_of[id(array)] = len(self._values)
            self._values.append(None)
        several = len(outputs) if type(info["output"]) is tuple else 0
        self._lines.append(_Line(info["function"].forward, places, info["static"], into, several))

    def _place(self, given: Any, value: Any) -> int:
        """The place of an input."""
        if isinstance(given, Tensor) and given.is_parameter:
            self._weights.append((len(self._values), given))
        elif hasattr(value, "dtype") and hasattr(value, "shape"):
            if id(value) in self._place_of:
                return self._place_of[id(value)]
            self._is_whole = False  # nobody knows how it was made
        self._values.append(None if hasattr(value, "dtype") else value)
        return len(self._values) - 1

    def ended(self, made: Tensor) -> bool:
        """The run is over, and this is what it made; whether the list tells all of it."""
        self._result = self._place_of.get(id(made.data), -1)
        self._alive, self._place_of = [], {}
        return self._is_whole and self._result >= 0

    def fits(self, given: Sequence[Array]) -> bool:
        """Whether these arrays have the shapes and dtypes with which the list was written."""
        return [(array.shape, array.dtype) for array in given] == self._like

    def run(self, given: Sequence[Array]) -> Array:
        """What the operations make of these arrays."""
        values = self._values.copy()
        values[: len(given)] = given
        for place, weight in self._weights:
            values[place] = weight.data
        for forward, places, static, into, outputs in self._lines:
            y, _ = forward(*[values[place] for place in places], **static)
            if outputs:
                values[into : into + outputs] = y
            else:
                values[into] = y
        return values[self._result]


def _is(x: Any, made: Array) -> bool:
    """Whether what was made is the input, under another name."""
    if made is x:
        return True
    if not hasattr(x, "strides") or x.size == 0 or (x.shape, x.strides) != (made.shape, made.strides):
        return False
    return x.dtype == made.dtype and address(x) == address(made)


class Programs:
    """The programs of several things that are made again and again."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Program | None] = {}

    def made(self, what: Hashable, make: Callable[[], Tensor], given: Sequence[Array]) -> Tensor:
        """What `make` makes, by its program from the second time on.

        Args:
            what: names it.
            make: makes it, of these arrays and of weights, by operations alone.
            given: arrays that are others each time, of the same shapes.
        """
        if OP_LISTENERS.get() or TAPE.get() is not None:
            return make()
        if what not in self._known:
            written = Program(given)
            with listen(written):
                made = make()
            self._known[what] = written if written.ended(made) else None
            return made
        program = self._known[what]
        return make() if program is None or not program.fits(given) else Tensor(program.run(given))
