"""Modules: objects that own parameters and other modules, and have a forward.

Nothing is registered behind the scenes: a module's parameters and children are its attributes, in the order in which
they were set; lists of modules count.  A module is built with its full name (`blocks.3.mlp`), which its parameters'
names begin with, and it is given the axes that it sends over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpitrain.autograd.recompute import recompute
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
        asked_dtype: of the weights, as the script asks for it; a proof runs in another one all the same.
        seed: of the initial values and of dropout.
        num_stages: stages of the whole model.
        stages: numbers of those that this rank holds, ascending.
        branch_scales: of the gradients of the model's residual branches (`BlockScaler`); None: they have none.
        made_of: the numbers and words that say what the whole model computes, which all ranks must be given alike.
        adds_losses: whether forward passes of the whole model add losses of their own
            (`mpitrain.autograd.auxiliary`), so that the rows over which their means go are counted.
        counted: names and lengths of the vectors that forward passes of the whole model count there, the same on all
            ranks.
        recompute: whether calls keep their inputs only, and are made again in backward (`mark_recompute`).
    """

    flats: list[Flat]
    like: Array
    asked_dtype: Any = None
    seed: int = 0
    num_stages: int = 1
    stages: tuple[int, ...] = (0,)
    recompute: bool = False
    branch_scales: Any = None
    made_of: Mapping[str, Any] = MappingProxyType({})
    adds_losses: bool = False
    counted: Mapping[str, int] = MappingProxyType({})

    def __init__(self, name: str = "") -> None:
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{type(self).__name__} defines no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = PATH.set(self.name or PATH.get())  # a part without a name is its owner's
        try:
            if self.recompute:
                return recompute(self.forward, *args, **kwargs)
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
        self.asked_dtype = np.dtype(dtype) if self.asked_dtype is None else self.asked_dtype
        dtype = dtype if forced is None else forced
        self.seed = seed
        self.like = xp.empty(0, np.dtype(dtype))
        self.flats = materialize(parameters, mesh.coords, mesh.sizes, seed, np.dtype(dtype), xp)

    def start_step(self) -> None:
        """Forget the gradients of the last step: the next one that arrives is written, not added."""
        for flat in self.flats:
            for p in flat.parameters:
                p.touched = False


def mark_recompute(
    model: Module,
    patterns: Sequence[str] | str,
    exchange: Callable[[list[bool]], Sequence[list[bool]]] | None = None,
) -> list[str]:
    """Mark parts of a model, by their names, to be recomputed in backward.

    Args:
        model: built; parts below it can be marked.
        patterns: one or several: names as `blocks.3.mlp`, in which `*` stands for anything between two points:
            `blocks.*` is every block, and no part of one.
        exchange: of the axis over whose ranks the model's parts are divided (`mesh.pp.exchange`), where one rank need
            not hold what a pattern means; None: all of it is here.

    Returns:
        The names of the parts of this rank that are marked now, in the model's order.

    Raises:
        ConfigError: a pattern means no part, on any rank; raised on all, and nothing is marked.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    parts = [module for child in model.children() for module in child.modules() if module.name]
    meant = [[module for module in parts if _matches(module.name, pattern)] for pattern in patterns]
    here = [bool(modules) for modules in meant]
    everywhere = [here] if exchange is None else exchange(here)
    for number, pattern in enumerate(patterns):
        if not any(rank[number] for rank in everywhere):
            names = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module.name) for module in parts))
            raise ConfigError(
                f"to be recomputed: {pattern!r} is no part of the model, whose parts are {', '.join(names[:12])}"
                f"{' ...' if len(names) > 12 else ''}.\nA * stands for one name between two points: blocks.*.mlp"
            )
    for module in (module for modules in meant for module in modules):
        module.recompute = True
    return [module.name for module in parts if module.recompute]


def _matches(name: str, pattern: str) -> bool:
    """Whether a name is one that a pattern means, point by point."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))
