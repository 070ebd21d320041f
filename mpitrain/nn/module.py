"""Modules: objects that own parameters and other modules, and have a forward.

Nothing is registered behind the scenes: a module's parameters and children are its attributes, in the order in which
they were set; lists of modules count.  A module is built with its full name (`blocks.3.mlp`), which its parameters'
names begin with, and it is given the axes that it sends over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpitrain.autograd.tape import PATH
from mpitrain.backend import Array
from mpitrain.errors import ConfigError
from mpitrain.nn.parameter import Flat, Parameter, materialize
from mpitrain.nn.stage_output import check_outputs
from mpitrain.spec import State

PRECISION: ContextVar[Any] = ContextVar("mpitrain.precision", default=None)
"""The dtype of every model that is made, whatever its script asks for; None: as asked.  A proof sets it to float64."""


class HasCoordinates(Protocol):
    """What materialising needs to know of a mesh."""

    @property
    def coords(self) -> dict[str, int]: ...
    @property
    def sizes(self) -> dict[str, int]: ...


class Boundary(NamedTuple):
    """One tensor that goes from a stage of a pipeline to the next, and its gradient back.

    Attributes:
        shape, dtype: of both.
        states: how it lies across axes, by name; "dp" is short for edp and ep.
    """

    shape: tuple[int, ...]
    dtype: Any
    states: Mapping[str, State]


class Module:
    """Base of layers and models.  Subclasses set parameters and children in `__init__` and define `forward`.

    A model that can be cut into the stages of a pipeline says which of them this rank holds (`stages`), how many there
    are (`num_stages`), and defines `forward_stage` and `boundary`.  One that does not is a single stage.

    Attributes:
        flats: the buffers of this rank's parameters, after `materialize`.
        like: an empty array of the model's dtype where it lives, after `materialize`.
        seed: of the initial values and of dropout.
        num_stages: stages of the whole model.
        stages: numbers of those that this rank holds, ascending.
    """

    flats: list[Flat]
    like: Array
    seed: int = 0
    num_stages: int = 1
    stages: tuple[int, ...] = (0,)

    def __init__(self, name: str = "") -> None:
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{type(self).__name__} defines no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = PATH.set(self.name or PATH.get())  # a part without a name is its owner's
        try:
            return self.forward(*args, **kwargs)
        finally:
            PATH.reset(token)

    def forward_stage(self, stage: int, batch: Any, *inputs: Any, carry: Any = None) -> tuple[Any, ...]:
        """What one stage makes of a micro-batch.

        Args:
            stage: its number, one of `stages`.
            batch: the micro-batch; every stage is given it.
            inputs: what the stage before has made, Tensors as `boundary(stage, batch)` says; none for stage 0.
            carry: what earlier slices of the same sequences left (`mpitrain.autograd.carry`); given only where
                sequences are cut into slices, so that a model that never is needs no such argument.

        Returns:
            What goes to the next stage; of the last stage the loss alone: the sum over the batch's valid targets.
        """
        return (self(batch),)

    def run_stage(self, stage: int, batch: Any, *inputs: Any, carry: Any = None) -> tuple[Any, ...]:
        """`forward_stage`, whose ops then know that they are the model's, as a call makes them.

        Raises:
            ConfigError, ShapeError: it returned something else than the loss, or what `boundary` says.
        """
        token = PATH.set(self.name or PATH.get())
        try:
            slices = {} if carry is None else {"carry": carry}
            outputs = self.forward_stage(stage, batch, *inputs, **slices)
        finally:
            PATH.reset(token)
        return check_outputs(self, stage, batch, outputs)

    def boundary(self, stage: int, batch: Any) -> tuple[Boundary, ...]:
        """What comes into a stage for this micro-batch; nothing into stage 0."""
        return ()

    def children(self) -> Iterator[Module]:
        """Direct sub-modules, in the order in which they were set."""
        for value in vars(self).values():
            if isinstance(value, Module):
                yield value
            elif isinstance(value, (list, tuple)):
                yield from (item for item in value if isinstance(item, Module))

    def modules(self) -> Iterator[Module]:
        """This module and all below it, parents first."""
        yield self
        for child in self.children():
            yield from child.modules()

    def parameters(self) -> list[Parameter]:
        """All parameters, each once, in the model's order (a tied weight counts where it is met first)."""
        found: dict[Parameter, None] = {}
        for module in self.modules():
            found.update((value, None) for value in vars(module).values() if isinstance(value, Parameter))
        return list(found)

    @property
    def num_parameters(self) -> int:
        """Elements of the full (unsharded) parameters of this module."""
        return sum(int(np.prod(p.full_shape, dtype=np.int64)) for p in self.parameters())

    def materialize(self, mesh: HasCoordinates, seed: int = 0, dtype: Any = np.float32, xp: Any = np) -> None:
        """Make this rank's slabs of all parameters, with their initial values; called once, by the outermost module.

        Raises:
            ConfigError: two parameters have the same name.
        """
        parameters = self.parameters()
        names: set[str] = set()
        for p in parameters:
            if p.name in names:
                raise ConfigError(f"two parameters are called {p.name!r}; every parameter needs a name of its own")
            names.add(p.name)
        forced = PRECISION.get()
        dtype = dtype if forced is None else forced
        self.seed = seed
        self.like = xp.empty(0, np.dtype(dtype))
        self.flats = materialize(parameters, mesh.coords, mesh.sizes, seed, np.dtype(dtype), xp)

    def start_step(self) -> None:
        """Forget the gradients of the last step: the next one that arrives is written, not added."""
        for flat in self.flats:
            for p in flat.parameters:
                p.touched = False
