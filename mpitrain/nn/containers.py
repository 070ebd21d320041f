"""Modules that hold other modules: in a row, or in a list.

    net = Sequential("net", Linear("net.0", 64, 32), Relu(), Linear("net.2", 32, 10))
    self.blocks = ModuleList("blocks", [Block(f"blocks.{n}") for n in range(4)])

    y = net(x, draw=batch.draw(seed))                # with a Dropout among its parts

Parts have the names that they were built with.  A plain list of modules as an attribute is found as well; a ModuleList
has a name of its own, refuses what is no module, and can be given on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from functools import lru_cache
from types import EllipsisType
from typing import Any, overload

from mpitrain.autograd.tape import TAPE
from mpitrain.errors import ConfigError
from mpitrain.nn.layers import Dropout, Residual
from mpitrain.nn.module import Module
from mpitrain.rng import Draw


class ModuleList(Module, MutableSequence[Module]):
    """Modules that one counts, slices and goes through; whoever has them calls them.

    Args:
        name: path in the model.
        layers: to begin with.

    Raises:
        ConfigError: something in it is no module, or holds the list itself.
    """

    holds_a_list = True

    def __init__(self, name: str = "", layers: Iterable[Module] = ()) -> None:
        super().__init__(name)
        self.layers: list[Module] = []
        self.extend(layers)

    def insert(self, index: int, value: Module) -> None:
        """Put a module before the one at an index."""
        self.layers.insert(index, self._checked(value))

    @overload
    def __getitem__(self, index: int) -> Module: ...
    @overload
    def __getitem__(self, index: slice) -> list[Module]: ...
    def __getitem__(self, index: Any) -> Any:
        return self.layers[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            value = [self._checked(one) for one in value]
        else:
            self._checked(value)
        self.layers[index] = value

    def __delitem__(self, index: int | slice) -> None:
        del self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Module]:
        return iter(self.layers)

    def __reversed__(self) -> Iterator[Module]:
        return reversed(self.layers)

    def _checked(self, value: Any) -> Module:
        if not isinstance(value, Module):
            raise ConfigError(
                f"{self.name or type(self).__name__}: a {type(value).__name__} is no module and has no place in it.\n"
                "A function goes into a Sequential, or into the forward of a Module."
            )
        if any(part is self for part in value.modules()):
            raise ConfigError(f"{self.name or type(self).__name__}: a list does not go into itself, or what is in it.")
        return value


class Sequential(Module):
    """Each part gets what the one before it has made.

    Args:
        name: path in the model.
        layers: modules, and functions of one tensor such as `ops.tanh`.

    Parts whose forward has an argument `draw`, as that of `Dropout` has, are given the draw that a call is given.  In
    training one that is given none would leave out its dropouts without a word, so that is refused.

    Raises:
        ConfigError: something among the parts cannot be called; (by a call) a tape records, there is a dropout, and
            nothing was said of a draw.
    """

    holds_a_list = True

    def __init__(self, name: str = "", *layers: Module | Callable[[Any], Any]) -> None:
        super().__init__(name)
        wrong = [type(layer).__name__ for layer in layers if not callable(layer)]
        if not isinstance(name, str):
            wrong.insert(0, f"{type(name).__name__} in the place of its name")
        if wrong:
            raise ConfigError(
                f"Sequential: a {wrong[0]} has no place in it.\n"
                "First comes its name, then modules or functions of a tensor: Sequential('net', Relu(), ...)."
            )
        self.layers: list[Module | Callable[..., Any]] = list(layers)

    def forward(self, x: Any, draw: Draw | EllipsisType | None = ...) -> Any:
        """What the first part takes -> what the last one makes; x itself where there is none.

        Args:
            draw: for dropouts among the parts (`batch.draw(seed)`); None: without dropout, as for evaluation.
        """
        if draw is ...:
            if TAPE.get() is not None:
                self._check_no_dropout()
            for layer in self.layers:
                x = layer(x)
        else:
            for layer in self.layers:
                x = layer(x, draw=draw) if _takes_draw(layer) else layer(x)
        return x

    def _check_no_dropout(self) -> None:
        for layer in self.layers:
            if isinstance(layer, Module):
                for part in layer.modules():
                    if isinstance(part, (Dropout, Residual)) and part.p and _takes_draw(layer):
                        me = self.name or "Sequential"
                        raise ConfigError(
                            f"{me} has a dropout, {part.name or type(part).__name__} with p={part.p:g}, which does"
                            " nothing without a draw.\n"
                            f"Give it one: {me}(x, draw=batch.draw(seed)); or say draw=None, for no dropout."
                        )

    def __getitem__(self, index: int | slice) -> Any:
        """A part; of a slice a Sequential of these parts."""
        return Sequential(self.name, *self.layers[index]) if isinstance(index, slice) else self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.layers)

    def about(self) -> str:
        functions = [getattr(f, "__name__", type(f).__name__) for f in self.layers if not isinstance(f, Module)]
        return f"with {', '.join(functions)}" if functions else ""


def _takes_draw(layer: Any) -> bool:
    """Whether a part has an argument `draw`."""
    return _has_draw(type(layer).forward) if isinstance(layer, Module) else _has_draw.__wrapped__(layer)


@lru_cache(maxsize=256)  # of modules, whose classes stay; functions may hold on to anything
def _has_draw(call: Callable[..., Any]) -> bool:
    try:
        return "draw" in inspect.signature(call).parameters
    except (TypeError, ValueError):  # some that are built in do not say
        return False
