"""Modules: objects that own parameters and other modules, and have a forward.

Nothing is registered behind the scenes: a module's parameters and children are its attributes, in the order in which
they were set; lists of modules count.  A module is built with its full name (`blocks.3.mlp`), which its parameters'
names begin with, and it is given the axes that it sends over.
"""

from __future__ import annotations

import contextlib
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
from mpitrain.nn.buffer import Buffer
from mpitrain.nn.freezing import Exchange, freeze
from mpitrain.nn.materialize import Home, materialize
from mpitrain.nn.parameter import Flat, Parameter
from mpitrain.nn.share import STAGES
from mpitrain.nn.stage_output import check_outputs
from mpitrain.nn.tree import tree
from mpitrain.nn.unit import Resident, Unit
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
        flats: the buffers of this rank's parameters that are trained, after `materialize`.
        frozen_flats: of those that are not.
        trains_from: the first stage of the whole model that backward goes to; below it all is frozen.
        in_use: whether an executor trains it, so that nothing can be frozen any more.
        layout: with what it was materialized.
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
        mixes_rows: whether what it makes of a row depends on the other rows of its batch, so that micro-batches are
            another training run.
        recompute: whether calls keep their inputs only, and are made again in backward (`mark_recompute`).
        zero: what ranks deal out that would all hold the same: nothing, or ZeRO's stage 1, 2, 3 (`mpitrain.nn.share`).
        unit: brings its weights where they are here only while it works; None: they always are.
        resident: how many bytes of such weights are here, of the outermost module; None: it has no units.
        elsewhere: what of it, of its optimizer and of its tapes lives elsewhere, as whoever has built it knows.
    """

    flats: Sequence[Flat] = ()
    frozen_flats: Sequence[Flat] = ()
    trains_from: int = 0
    in_use: bool = False
    layout: tuple[Any, ...] | None = None
    like: Array
    asked_dtype: Any = None
    seed: int = 0
    num_stages: int = 1
    stages: tuple[int, ...] = (0,)
    mixes_rows: bool = False
    recompute: bool = False
    branch_scales: Any = None
    made_of: Mapping[str, Any] = MappingProxyType({})
    adds_losses: bool = False
    counted: Mapping[str, int] = MappingProxyType({})
    zero: int = 0
    unit: Unit | None = None
    resident: Resident | None = None
    elsewhere: Any = None

    def __init__(self, name: str = "") -> None:
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{type(self).__name__} defines no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = PATH.set(self.name or PATH.get())  # a part without a name is its owner's
        try:
            if self.unit is not None:
                with self.unit:
                    return self.unit.checked(self._run(*args, **kwargs))
            return self._run(*args, **kwargs)
        finally:
            PATH.reset(token)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return recompute(self.forward, *args, **kwargs) if self.recompute else self.forward(*args, **kwargs)

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
            with contextlib.nullcontext() if self.unit is None else self.unit:
                outputs = self.forward_stage(stage, batch, *inputs, **slices)
        finally:
            PATH.reset(token)
        return check_outputs(self, stage, batch, outputs)

    def parts(self, stage: int) -> list[Module]:
        """The parts of the model that a stage uses, in the order of its forward; every parameter is in one of them.

        Where weights are here only while they are used, they come and go part by part.
        """
        return list(self.children())

    def boundary(self, stage: int, batch: Any) -> tuple[Boundary, ...]:
        """What comes into a stage for this micro-batch; nothing into stage 0."""
        return ()

    holds_a_list = False
    """Whether its parts are those of a list, known by their numbers (mpitrain.nn.containers)."""

    def about(self) -> str:
        """A few words about it besides its parameters, for whoever prints it; '' where there is nothing to say."""
        return ""

    def __repr__(self) -> str:
        return tree(self)

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

    def buffers(self) -> list[Buffer]:
        """What its parts keep from step to step besides parameters, in the model's order."""
        found: dict[Buffer, None] = {}
        for module in self.modules():
            found.update((value, None) for value in vars(module).values() if isinstance(value, Buffer))
        return list(found)

    @property
    def constants(self) -> tuple[Array, ...]:
        """Arrays that the model makes once of its sizes, and neither learns nor saves."""
        return ()

    def shares(self) -> list[Parameter]:
        """What this rank updates, in the model's order: its parameters, or with `zero` its rows of them."""
        return _shares_of(self.flats)

    def kept(self) -> list[Parameter]:
        """What this rank keeps of all parameters, in the model's order: its shares, and what it has of frozen ones."""
        return _shares_of([*self.flats, *self.frozen_flats])

    def freeze(self, *patterns: str, exchange: Exchange | None = None) -> list[str]:
        """Freeze parameters: from now on nobody trains them (mpitrain.nn.freezing).

        Before `materialize`; without ZeRO also after it, until an optimizer and an executor are made.

        Args:
            patterns: names of parameters or of parts of the model, as of a shell: `blocks.0`, `*.bias`; `!` before one
                has what it means trained all the same.  The last that means a parameter decides, and what none means
                stays as it is.
            exchange: of the axis over whose ranks the model's parts are divided (`mesh.pp.exchange`), where one rank
                need not hold what a pattern means; None: all of it is here.

        Returns:
            The names of this rank's frozen parameters, in the model's order.

        Raises:
            ConfigError: a pattern means no parameter, or nothing would be left to train, or it is too late; on every
                rank, and nothing is frozen.
        """
        return freeze(self, patterns, exchange)

    @property
    def num_parameters(self) -> int:
        """Elements of the full (unsharded) parameters of this module."""
        return sum(int(np.prod(p.full_shape, dtype=np.int64)) for p in self.parameters())

    def materialize(
        self,
        mesh: HasCoordinates,
        seed: int = 0,
        dtype: Any = np.float32,
        xp: Any = np,
        zero: int = 0,
        home: Home | None = None,
        *,
        start: bool = True,
    ) -> None:
        """Make this rank's slabs of all parameters, with their initial values; called once, by the outermost module.

        Args:
            mesh: the layout.
            seed: of the initial values and of dropout.
            dtype: of the weights.
            xp: where they live.
            zero: stage of ZeRO.
            home: where the parameters live, if not here; with stage 3.
            start: whether to write the initial values; else whoever asks writes others.

        Raises:
            ConfigError: two parameters have the same name, or there is no such stage.
        """
        if zero not in STAGES:
            raise ConfigError(f"zero {zero}: ZeRO has the stages 1, 2 and 3, and 0 deals out nothing.")
        if home is not None and zero != 3:
            raise ConfigError(f"zero {zero}: parameters that live elsewhere come when they are used, as in stage 3.")
        parameters = self.parameters()
        names: set[str] = set()
        buffers = self.buffers()
        named: list[Parameter | Buffer] = [*parameters, *buffers]
        for p in named:
            if p.name in names:
                raise ConfigError(f"two parameters are called {p.name!r}; every parameter needs a name of its own")
            names.add(p.name)
        forced = PRECISION.get()
        self.asked_dtype = np.dtype(dtype) if self.asked_dtype is None else self.asked_dtype
        dtype = dtype if forced is None else forced
        self.seed = seed
        self.like = xp.empty(0, np.dtype(dtype))
        self.zero = zero
        for buffer in buffers:
            buffer.materialize(mesh.coords, mesh.sizes, dtype, xp)
        self.layout = (mesh.coords, mesh.sizes, seed, np.dtype(dtype), xp, zero, home)
        self.place(materialize(parameters, *self.layout, start=start))

    def place(self, flats: Sequence[Flat]) -> None:
        """Take the buffers of the parameters."""
        self.flats = [flat for flat in flats if not flat.frozen]
        self.frozen_flats = [flat for flat in flats if flat.frozen]

    def start_step(self) -> None:
        """Forget the gradients of the last step: the next one that arrives is written, not added."""
        for flat in self.flats:
            for p in (*flat.parameters, *flat.shares):
                p.touched = False


def _shares_of(flats: Sequence[Flat]) -> list[Parameter]:
    places = [(place, share) for flat in flats for place, share in zip(flat.places, flat.shares, strict=True)]
    return [share for _, share in sorted(places, key=lambda each: each[0])]


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
    named: dict[str, Module] = {}
    for child in model.children():
        for module in child.modules():
            if module.name:  # of one that lies in another of its name, as projections do, the outer one is meant
                named.setdefault(module.name, module)
    parts = list(named.values())
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
