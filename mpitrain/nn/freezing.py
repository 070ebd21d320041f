"""Freezing: parameters that nobody trains.

    model.freeze("table", "blocks.0", "blocks.1")        the token table, and all of two blocks
    model.freeze("*", "!head.*")                         everything but the head

A frozen weight has no gradient, no master of full precision and no optimizer state; nothing of it is summed over ranks,
and the norm does not know it.  Nothing goes backward that would end in frozen weights alone: below the lowest one that
is trained no op is recorded, and the stages of a pipeline that lie there have no B.

Weights are frozen before the model is materialized, or after it as long as nothing has been made of its parameters.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from mpitrain.errors import ConfigError
from mpitrain.nn.materialize import materialize
from mpitrain.nn.parameter import Parameter

if TYPE_CHECKING:
    from mpitrain.nn.module import Module

THAW = "!"
"""Begins a pattern of what is trained all the same."""

Exchange = Callable[[Any], Sequence[Any]]
"""Gives what each of the ranks has given that hold a model's parts (`mesh.pp.exchange`)."""


def means(pattern: str, name: str) -> bool:
    """Whether a pattern means a parameter: by its name, or by that of a part that it is in."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def is_frozen(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter that is trained unless it is said is frozen by patterns: the last that means it decides."""
    decisive = [pattern for pattern in patterns if means(pattern.removeprefix(THAW), name)]
    return bool(decisive) and not decisive[-1].startswith(THAW)


def freeze(model: Module, patterns: Sequence[str], exchange: Exchange | None = None) -> list[str]:
    """Freeze parameters by their names; see `Module.freeze`."""
    parameters = model.parameters()
    laid = any(p.is_laid for p in parameters)
    if laid:
        _check_may_move(model)
    before = [p.requires_grad for p in parameters]
    met = [False] * len(patterns)
    for number, pattern in enumerate(patterns):
        for p in parameters:
            if means(pattern.removeprefix(THAW), p.name):
                p.requires_grad = pattern.startswith(THAW)
                met[number] = True
    known = [] if all(met) else _names(parameters)
    told: list[Any] = [met, lowest_trained(model), any(p.frozen for p in parameters), known]
    everywhere = [told] if exchange is None else exchange(told)
    for number, pattern in enumerate(patterns):
        if not any(rank[0][number] for rank in everywhere):
            for p, wanted in zip(parameters, before, strict=True):
                p.requires_grad = wanted
            names = sorted({str(name) for rank in everywhere for name in rank[3]})
            near = difflib.get_close_matches(pattern, names, 3, 0.0)
            raise ConfigError(
                f"to be frozen: {pattern!r} means no parameter of the model.\nNames look like {', '.join(near)}; a part"
                " of the model means all that is in it, and * stands for any characters."
            )
    model.trains_from = first_stage([rank[1:3] for rank in everywhere])
    if laid and before != [p.requires_grad for p in parameters]:
        _move(model)
    return [p.name for p in parameters if p.frozen]


def lowest_trained(model: Module) -> int | None:
    """The first stage of this rank that has a parameter which is trained; None: none of its stages has."""
    if model.num_stages == 1:
        return 0 if any(not p.frozen for p in model.parameters()) else None
    return next((stage for stage in model.stages if _trains(model, stage)), None)


def first_stage(told: Sequence[Sequence[Any]]) -> int:
    """The first stage of the whole model that backward goes to.

    Args:
        told: of each rank its `lowest_trained`, and whether it has frozen parameters.

    Raises:
        ConfigError: all parameters are frozen.
    """
    if not any(frozen for _, frozen in told):
        return 0
    stages = [stage for stage, _ in told if stage is not None]
    if not stages:
        raise ConfigError(
            "all parameters of the model are frozen: nothing is left to train.\nFreeze fewer, as with '*' and '!head'."
        )
    return int(min(stages))


def _trains(model: Module, stage: int) -> bool:
    return any(not p.frozen for part in model.parts(stage) for p in part.parameters())


def _names(parameters: Sequence[Parameter]) -> list[str]:
    """Names and parts, for whoever has mistaken one."""
    found = dict.fromkeys(p.name for p in parameters)
    found.update(dict.fromkeys(name.rpartition(".")[0] for name in [*found]))
    return [name for name in found if name][:200]


def _check_may_move(model: Module) -> None:
    """Refuse to freeze parameters that have their place for good."""
    if not model.flats and not model.frozen_flats:
        raise ConfigError(
            f"{model.name or type(model).__name__} is a part of a model that has its weights: it is the model that"
            " freezes them.\nSay model.freeze(...) with the part's name, or freeze before the model is materialized."
        )
    if model.in_use:
        raise ConfigError(
            "an Executor trains the model already: its messages and its optimizer are laid out for the weights that"
            " are trained.\nFreeze before the optimizer and the Executor are made."
        )
    if model.zero or any(p.visits for p in model.parameters()):
        raise ConfigError(
            f"zero {model.zero}: rows of the weights are dealt out, which depends on what is frozen.\n"
            "Freeze before the model is materialized; the library's models take freeze=[...] for that."
        )


def _move(model: Module) -> None:
    """Give parameters other places, with the values that they have."""
    layout = model.layout
    assert layout is not None
    values = [(p, p.master) for p in model.parameters()]
    model.place(materialize([p for p, _ in values], *layout, start=False))
    for p, master in values:
        p.master[...] = master if isinstance(master, type(p.data)) else master[...]
        p.refresh()
